"""Sends what Megatron and the trainers ask of a GPU to the CPU."""

import contextlib
import types

import torch

FACTORIES = (
    "tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "linspace",
    "zeros_like", "ones_like", "empty_like", "full_like", "as_tensor",
)  # fmt: skip


class Stream:
    def __init__(self, *args, **kwargs):
        pass

    def synchronize(self):
        pass

    wait_stream = wait_event = lambda self, *args: None

    def query(self):
        return True


class Event(Stream):
    def record(self, *args):
        pass

    def elapsed_time(self, other):
        return 0.0


def install():
    nothing = lambda *args, **kwargs: None  # noqa: E731
    fixed = {
        "current_device": "cpu",
        "device_count": 1,
        "get_device_capability": (9, 0),
        "get_device_name": "cpu",
        "get_device_properties": types.SimpleNamespace(major=9, minor=0, name="cpu", total_memory=16 << 30),
        "mem_get_info": (8 << 30, 16 << 30),
        "memory_stats": {},
        "memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
    }
    for name, value in fixed.items():
        setattr(torch.cuda, name, lambda *args, _value=value, **kwargs: _value)
    for name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"):
        setattr(torch.cuda, name, nothing)
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args, **kwargs: Stream()
    torch.cuda.Stream, torch.cuda.Event = Stream, Event
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = nothing
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.manual_seed
    torch.Tensor.cuda = torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    to, type_of = torch.Tensor.to, torch.Tensor.type

    def tensor_to(self, *args, **kwargs):
        args = tuple(_cpu(a) if isinstance(a, str | torch.device) else a for a in args)
        if "device" in kwargs:
            kwargs["device"] = _cpu(kwargs["device"])
        return to(self, *args, **kwargs)

    def tensor_type(self, *args, **kwargs):
        found = type_of(self, *args, **kwargs)
        # Megatron's optimizer sorts parameters by the names of GPU tensor types.
        if isinstance(found, str) and not found.startswith("torch.cuda."):
            return found.replace("torch.", "torch.cuda.", 1)
        return found

    torch.Tensor.to, torch.Tensor.type = tensor_to, tensor_type


def _cpu(device):
    if isinstance(device, int) and not isinstance(device, bool):
        return "cpu"
    if isinstance(device, str | torch.device) and str(device).startswith("cuda"):
        return torch.device("cpu")
    return device


def _on_cpu(factory):
    def make(*args, **kwargs):
        kwargs.pop("pin_memory", None)
        if "device" in kwargs:
            kwargs["device"] = _cpu(kwargs["device"])
        return factory(*args, **kwargs)

    make.__name__ = getattr(factory, "__name__", "factory")
    return make
