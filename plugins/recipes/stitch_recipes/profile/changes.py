"""What the next version of a checkpoint is, tensor by tensor: random elements, or a step of training.

Nothing is kept between tensors, so that a checkpoint of any size can be read and changed as a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ..layout.formats import of_quantized
from ..layout.geometry import Quantization
from ..layout.masters import BETA1, generator
from ..layout.rounding import F32, from_bf16, to_bf16
from ..layout.spec import Tensor
from ..layout.synthetic import HIGH_PRECISION, Bytes, Density, changed, perturbed
from ..schema import Checkpoint

Change = Callable[[Tensor, Bytes], Bytes]
"""The next version's bytes of a tensor; the same array where nothing changes."""

MEASURED_RATE = 1e-6
MEASURED: Mapping[Quantization, float] = {
    "bf16": 0.0,
    "fp8-channel": 0.00078,
    "fp8-block128": 0.00078,
    "nvfp4-modelopt": 0.00005,
    "mxfp4-packed": 0.00005,
    "int4-packed": 0.000035,
}
"""Changed values of quantized tensors in a step at ``MEASURED_RATE``, as fractions.

Measured of a decoder of 10 million parameters (the runs of benchmarks/rl_traces) whose BF16 weights were
quantized after each step: 0.078 % of the values in FP8 with blocks of 128, 0.005 % in NVFP4, 0.0035 % in INT4
with groups of 32. They grow about as the rate does. FP8 by channels and MXFP4 were not measured: they have
the value of what is nearest.
"""

PIECE = 1 << 22
"""Elements that training moves at a time."""


def synthetic(checkpoint: Checkpoint, density: Density, seed: int) -> Change:
    """Random elements of these densities: the public table's deltas (layout/synthetic.py)."""

    def change(tensor: Tensor, data: Bytes) -> Bytes:
        ((_, result),) = perturbed([(tensor, data)], checkpoint, density, seed)
        return result

    return change


def training(checkpoint: Checkpoint, rate: float, seed: int) -> Change:
    """A step of Adam at learning rate ``rate``, with the updates of layout/masters.py.

    Of a BF16 weight the digits that the checkpoint does not have are drawn. Of a quantized one nothing is
    known but its code: random ones change, as many as were measured.
    """
    density = {
        "quantized": MEASURED[checkpoint.quantization] * rate / MEASURED_RATE,
        "high_precision": HIGH_PRECISION,
    }
    is_part = of_quantized(checkpoint)
    immutable = tuple(checkpoint.immutable)

    def change(tensor: Tensor, data: Bytes) -> Bytes:
        if tensor.name.startswith(immutable):
            return data
        if not is_part(tensor) and tensor.dtype in ("BF16", "F32"):
            return _stepped(tensor, data, rate, seed)
        return changed(data, tensor, is_part(tensor), density, seed)

    return change


def _stepped(tensor: Tensor, data: Bytes, rate: float, seed: int) -> Bytes:
    rng = generator(seed, tensor.name, purpose=3)
    scale = np.float32(rate * np.sqrt((1 - BETA1) / (1 + BETA1)))
    result = data.copy()
    if tensor.dtype == "F32":
        weights = result.view(np.float32)
        for start in range(0, weights.size, PIECE):
            piece = weights[start : start + PIECE]
            piece -= rng.standard_normal(piece.size, np.float32) * scale
        return result
    codes = result.view(np.uint16)
    for start in range(0, codes.size, PIECE):
        piece16 = codes[start : start + PIECE]
        digits: F32 = rng.random(piece16.size, np.float32) - np.float32(0.5)
        master = from_bf16(piece16) + digits * _spacing(piece16)
        after = to_bf16(master - rng.standard_normal(piece16.size, np.float32) * scale)
        # Below a power of two numbers lie twice as dense: there a master may round to a neighbour already.
        np.copyto(piece16, after, where=after != to_bf16(master))
    return result


def _spacing(codes: np.typing.NDArray[np.uint16]) -> F32:
    """The distance from a bfloat16 to the next larger one."""
    exponent = ((codes >> 7) & 0xFF).astype(np.int32)
    return np.ldexp(np.float32(1), np.maximum(exponent, 1) - 127 - 7).astype(np.float32)
