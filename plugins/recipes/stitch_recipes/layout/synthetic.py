"""Versions that differ by random elements, as deltas are made synthetically to measure an update's time.

The densities are those of the public table (modal-projects/stitch, tools/profiling at a250dc3): 0.6 % of the
values in FP8, 0.3 % in 4 bits, 1 % of those in BF16 and F32; scales as the values that they scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from ..schema import Checkpoint
from .formats import INPUT_SCALE, of_quantized
from .geometry import Quantization
from .masters import generator
from .spec import Tensor

Density = Mapping[str, float]
"""Changed elements of all, as a fraction, for "quantized" and "high_precision" tensors."""

HIGH_PRECISION = 0.01
QUANTIZED: Mapping[Quantization, float] = {
    "bf16": 0.0,
    "fp8-channel": 0.006,
    "fp8-block128": 0.006,
    "nvfp4-modelopt": 0.003,
    "mxfp4-packed": 0.003,
    "int4-packed": 0.003,
}

Bytes = npt.NDArray[np.uint8]

_FIXED = (INPUT_SCALE, ".weight_shape")
_NIBBLES = (("U8", ".weight"), ("U8", ".weight_packed"), ("I32", ".weight_packed"))
_WIDTH = {"BF16": 2, "F32": 4}


def densities(how: Quantization, given: Density) -> dict[str, float]:
    """``given``, and the public table's where it says nothing."""
    return {"quantized": QUANTIZED[how], "high_precision": HIGH_PRECISION, **given}


def perturbed(
    content: Iterable[tuple[Tensor, Bytes]], checkpoint: Checkpoint, density: Density, seed: int
) -> Iterator[tuple[Tensor, Bytes]]:
    """The next version of any checkpoint's tensors, published ones too; immutable ones stay as they are.

    Another ``seed`` for each version, or the same elements change back.
    """
    is_part = of_quantized(checkpoint)
    for tensor, data in content:
        fixed = tensor.name.startswith(tuple(checkpoint.immutable))
        yield tensor, data if fixed else changed(data, tensor, is_part(tensor), density, seed)


def changed(data: Bytes, tensor: Tensor, of_quantized: bool, density: Density, seed: int) -> Bytes:
    """The next version's bytes: the last place of random elements flipped. ``seed`` says of which."""
    if tensor.name.endswith(_FIXED):
        return data
    share = density["quantized" if of_quantized else "high_precision"]
    # Gate and up share their second scale, and keep sharing it.
    name = tensor.name.replace(".up_proj.", ".gate_proj.").replace(".w3.", ".w1.")
    rng = generator(seed, name if tensor.name.endswith(".weight_scale_2") else tensor.name, purpose=2)
    result = data.copy()
    if any(tensor.dtype == dtype and tensor.name.endswith(end) for dtype, end in _NIBBLES):
        for flip in (0x01, 0x10):
            result[rng.random(result.size, np.float32) < share] ^= np.uint8(flip)
        return result
    width = _WIDTH.get(tensor.dtype, 1)
    first = result[::width]  # the lowest byte of each element
    chosen = rng.random(first.size, np.float32) < share
    if tensor.dtype == "F8_E4M3":
        # The largest value's neighbour above is no number.
        first[chosen & ((first & 0x7F) >= 0x7E)] ^= np.uint8(2)
        chosen &= (data & 0x7F) < 0x7E
    first[chosen] ^= np.uint8(1)
    return result
