"""Quantized representations: which tensors stand for a weight, and of which modules.

Sources: compressed-tensors (float-quantized, pack-quantized, mxfp4-pack-quantized), ModelOpt NVFP4 as Miles'
tools/convert_hf_to_nvfp4.py writes it, and the block FP8 of DeepSeek-V3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..schema import Checkpoint
from .geometry import Geometry, Quantization
from .spec import Tensor, Tensors
from .tensors import tensors

BLOCK = 128
"""Rows and columns that share a scale in fp8-block128, if not said otherwise; fewer at the edges."""

NVFP4_GROUP = 16
MXFP4_GROUP = 32

INPUT_SCALE = ".input_scale"
"""Of NVFP4: calibrated once, and never changed by training."""

EXPERTS = r"\.experts\.\d+\.(gate_proj|up_proj|down_proj|w[123])$"
SHARED = r"\.shared_experts\.(gate_proj|up_proj|down_proj)$"
LINEAR = (
    r"\.self_attn\.(q|k|v|o|q_a|q_b|kv_b)_proj$|\.self_attn\.kv_a_proj_with_mqa$"
    r"|\.mlp\.(gate|up|down)_proj$|" + EXPERTS + "|" + SHARED
)


class LayoutError(ValueError):
    """A tensor that a format cannot hold; the message names it."""


def _fp8_channel(name: str, out: int, into: int, _: int) -> Tensors:
    yield Tensor(f"{name}.weight", "F8_E4M3", (out, into))
    yield Tensor(f"{name}.weight_scale", "F32", (out, 1))


def _fp8_block(name: str, out: int, into: int, block: int) -> Tensors:
    yield Tensor(f"{name}.weight", "F8_E4M3", (out, into))
    yield Tensor(f"{name}.weight_scale_inv", "F32", (-(-out // block), -(-into // block)))


def _nvfp4(name: str, out: int, into: int, group: int) -> Tensors:
    yield Tensor(f"{name}.weight", "U8", (out, into // 2))
    yield Tensor(f"{name}.weight_scale", "F8_E4M3", (out, into // group))
    yield Tensor(f"{name}.weight_scale_2", "F32", ())
    yield Tensor(f"{name}{INPUT_SCALE}", "F32", ())


def _mxfp4(name: str, out: int, into: int, group: int) -> Tensors:
    yield Tensor(f"{name}.weight_packed", "U8", (out, into // 2))
    yield Tensor(f"{name}.weight_scale", "U8", (out, into // group))


def _int4(name: str, out: int, into: int, group: int) -> Tensors:
    yield Tensor(f"{name}.weight_packed", "I32", (out, into // 8))
    yield Tensor(f"{name}.weight_scale", "BF16", (out, into // group))
    yield Tensor(f"{name}.weight_shape", "I32", (2,))


@dataclass(frozen=True)
class Format:
    """``scope``: the modules that it quantizes; ``parts``: what stands for one, by name, out, in and group.

    ``group`` inputs share a scale; None where the checkpoint says how many, 0 where all of an output's do.
    """

    scope: str
    parts: Callable[[str, int, int, int], Tensors]
    group: int | None
    ragged: bool = False


FORMATS: dict[Quantization, Format] = {
    "fp8-channel": Format(LINEAR + r"|\.shared_head\.head$", _fp8_channel, 0),
    "fp8-block128": Format(LINEAR + r"|\.indexer\.(wq_b|wk)$", _fp8_block, BLOCK, ragged=True),
    "nvfp4-modelopt": Format(EXPERTS + "|" + SHARED, _nvfp4, NVFP4_GROUP),
    "mxfp4-packed": Format(EXPERTS, _mxfp4, MXFP4_GROUP),
    "int4-packed": Format(EXPERTS, _int4, None),
}


def group_of(checkpoint: Checkpoint) -> int:
    """Inputs that share a scale, 0 where all of an output's do. Raises LayoutError where nothing says it."""
    group = FORMATS[checkpoint.quantization].group if checkpoint.quantization != "bf16" else 0
    if group is None or checkpoint.quantization == "fp8-block128":
        group = checkpoint.group_size or group
    if group is None:
        raise LayoutError(f"{checkpoint.quantization} needs the checkpoint's group_size")
    return group


def scope(checkpoint: Checkpoint) -> Callable[[Tensor], bool]:
    """Whether a tensor of the BF16 model is quantized in this checkpoint."""
    if checkpoint.quantization == "bf16":
        return lambda tensor: False
    inside = re.compile(FORMATS[checkpoint.quantization].scope).search
    outside = [re.compile(pattern).search for pattern in checkpoint.not_quantized]

    def quantizes(tensor: Tensor) -> bool:
        if len(tensor.shape) != 2 or not tensor.name.endswith(".weight"):
            return False
        module = tensor.name.removesuffix(".weight")
        return inside(module) is not None and not any(search(module) for search in outside)

    return quantizes


def of_quantized(checkpoint: Checkpoint) -> Callable[[Tensor], bool]:
    """Whether a tensor of this checkpoint is a part of a weight that is quantized, by its name."""
    inside = scope(checkpoint)
    suffix = re.compile(r"\.(weight(_packed|_scale|_scale_2|_scale_inv|_shape)?|input_scale)$")
    return lambda tensor: inside(Tensor(suffix.sub(".weight", tensor.name), "BF16", (0, 0)))


def parts(master: Tensor, checkpoint: Checkpoint) -> tuple[Tensor, ...]:
    """What stands for a weight that is quantized. Raises LayoutError for groups that are not whole."""
    how, group = FORMATS[checkpoint.quantization], group_of(checkpoint)
    out, into = master.shape
    if group and not how.ragged and (into % group or into % 8):
        raise LayoutError(f"{master.name}: {into} inputs are no whole number of groups of {group}")
    return tuple(how.parts(master.name.removesuffix(".weight"), out, into, group))


def quantized(masters: Iterable[Tensor], checkpoint: Checkpoint) -> Tensors:
    """The checkpoint's tensors, from those of the BF16 model. Raises LayoutError."""
    inside = scope(checkpoint)
    for master in masters:
        if inside(master):
            yield from parts(master, checkpoint)
        else:
            yield master


def totals(geometry: Geometry, checkpoint: Checkpoint) -> tuple[int, int]:
    """Tensors and bytes of the checkpoint. Raises LayoutError."""
    count = size = 0
    for tensor in quantized(tensors(geometry), checkpoint):
        count += 1
        size += tensor.nbytes
    return count, size
