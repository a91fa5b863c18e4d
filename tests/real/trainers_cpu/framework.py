"""What is left in Megatron and Miles themselves that only a GPU machine, or an older numpy, has."""

import contextlib
import importlib.util

import numpy
import torch


class OlderNumpy:
    """numpy, under a version that Miles accepts."""

    __version__ = "1.26.4"

    def __getattr__(self, name):
        return getattr(numpy, name)


def install():
    import megatron.core.tensor_parallel as parallel
    import megatron.core.tensor_parallel.random as random_states

    @contextlib.contextmanager
    def fork(self, name=None):
        yield

    def seed_all(seed, *args, **kwargs):
        torch.manual_seed(seed)

    random_states.CudaRNGStatesTracker.fork = fork
    random_states.model_parallel_cuda_manual_seed = parallel.model_parallel_cuda_manual_seed = seed_all
    if importlib.util.find_spec("slime"):
        register_accelerator()
        import slime.backends.megatron_utils.initialize as initialize

        initialize.np = OlderNumpy()
    elif importlib.util.find_spec("miles"):
        import miles.backends.megatron_utils.initialize as initialize

        initialize.np = OlderNumpy()
        import hf_load

        hf_load.install()


def register_accelerator():
    """slime finds its device through a registry; SLIME_ACCELERATOR=cputest picks this one."""
    from slime.utils import accelerator
    from slime.utils.accelerator.cuda import CUDAAccelerator

    class OnCPU(CUDAAccelerator):
        def is_available(self):
            return True

        def current_device(self):
            return "cpu"

        def device(self, *args, **kwargs):
            return torch.device("cpu")

    accelerator.register_accelerator(
        "cputest", OnCPU, is_available=lambda: True, priority=1000, communication_backends=("gloo",)
    )
