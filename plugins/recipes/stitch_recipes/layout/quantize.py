"""Weights in BF16 as the tensors of a quantized checkpoint, and back.

Each function maps the suffix of a part's name (formats.py) to its array. Scales as the converters make them:
FP8 and NVFP4 from the largest magnitude over the largest code; NVFP4 in two levels, the block's scale itself
in E4M3; MXFP4 by the OCP rule; INT4 symmetric, 15 steps over twice the largest, as compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from .formats import INPUT_SCALE
from .geometry import Quantization
from .rounding import (
    E2M1_MAX,
    E4M3_MAX,
    F32,
    INT4_MAX,
    INT4_MIN,
    e8m0_for,
    from_bf16,
    from_e2m1,
    from_e4m3,
    from_e8m0,
    packed,
    to_bf16,
    to_e2m1,
    to_e4m3,
    unpacked,
)

Parts = dict[str, npt.NDArray[np.generic]]

TINY = np.float32(2.0**-100)
"""In place of the scale of weights that are all zero."""


def quantize(weight: F32, how: Quantization, group: int, largest: float | None = None) -> Parts:
    """The parts of one weight [out, in]. ``largest`` is of all weights that share NVFP4's second scale."""
    if how == "fp8-channel":
        return _fp8_channel(weight)
    if how == "fp8-block128":
        return _fp8_block(weight, group)
    if how == "nvfp4-modelopt":
        return _nvfp4(weight, group, float(np.abs(weight).max()) if largest is None else largest)
    if how == "mxfp4-packed":
        return _mxfp4(weight, group)
    if how == "int4-packed":
        return _int4(weight, group)
    raise ValueError(f"{how} is no quantization")


def dequantize(parts: Mapping[str, npt.NDArray[np.generic]], how: Quantization, group: int) -> F32:
    """The weight that an engine computes with, from arrays as ``quantize`` makes them."""
    if how == "fp8-channel":
        return from_e4m3(_u8(parts[".weight"])) * parts[".weight_scale"].astype(np.float32)
    if how == "fp8-block128":
        values = from_e4m3(_u8(parts[".weight"]))
        return values * _spread(parts[".weight_scale_inv"].astype(np.float32), values.shape, group)
    if how == "nvfp4-modelopt":
        scales = from_e4m3(_u8(parts[".weight_scale"])) * parts[".weight_scale_2"].astype(np.float32)
        return _grouped(from_e2m1(unpacked(_u8(parts[".weight"]))), scales, group)
    if how == "mxfp4-packed":
        values = from_e2m1(unpacked(_u8(parts[".weight_packed"])))
        return _grouped(values, from_e8m0(_u8(parts[".weight_scale"])), group)
    if how == "int4-packed":
        codes = unpacked(np.ascontiguousarray(parts[".weight_packed"]).view(np.uint8))
        scales = from_bf16(parts[".weight_scale"].astype(np.uint16))
        return _grouped(codes.astype(np.float32) + INT4_MIN, scales, group)
    raise ValueError(f"{how} is no quantization")


def _fp8_channel(weight: F32) -> Parts:
    scales = _positive(np.abs(weight).max(axis=1, keepdims=True) / np.float32(E4M3_MAX))
    return {".weight": to_e4m3(weight / scales), ".weight_scale": scales}


def _fp8_block(weight: F32, block: int) -> Parts:
    rows, columns = (np.arange(0, size, block) for size in weight.shape)
    largest: F32 = np.maximum.reduceat(np.maximum.reduceat(np.abs(weight), rows, axis=0), columns, axis=1)
    scales = _positive(largest / np.float32(E4M3_MAX))
    return {".weight": to_e4m3(weight / _spread(scales, weight.shape, block)), ".weight_scale_inv": scales}


def _nvfp4(weight: F32, group: int, largest: float) -> Parts:
    second = _positive(np.array(largest / (E4M3_MAX * E2M1_MAX), np.float32))
    blocks = weight.reshape(weight.shape[0], -1, group)
    scales = to_e4m3(np.abs(blocks).max(axis=2) / np.float32(E2M1_MAX) / second)
    real = from_e4m3(scales) * second
    # A block that is small beside the largest has scale 0, and means 0.
    divisor = np.where(real > 0, real, np.float32(np.inf)).astype(np.float32)
    codes = to_e2m1(blocks / divisor[..., None]).reshape(weight.shape)
    return {
        ".weight": packed(codes),
        ".weight_scale": scales,
        ".weight_scale_2": second,
        INPUT_SCALE: np.array(1, np.float32),
    }


def _mxfp4(weight: F32, group: int) -> Parts:
    blocks = weight.reshape(weight.shape[0], -1, group)
    scales = e8m0_for(np.abs(blocks).max(axis=2))
    codes = to_e2m1(blocks / from_e8m0(scales)[..., None]).reshape(weight.shape)
    return {".weight_packed": packed(codes), ".weight_scale": scales}


def _int4(weight: F32, group: int) -> Parts:
    blocks = weight.reshape(weight.shape[0], -1, group)
    scales = to_bf16(_positive(np.abs(blocks).max(axis=2) * np.float32(2 / (INT4_MAX - INT4_MIN))))
    steps = np.clip(np.rint(blocks / from_bf16(scales)[..., None]), INT4_MIN, INT4_MAX)
    codes = (steps - INT4_MIN).astype(np.uint8).reshape(weight.shape)
    return {
        ".weight_packed": packed(codes).view("<i4"),  # eight nibbles a word, the first one lowest
        ".weight_scale": scales,
        ".weight_shape": np.array(weight.shape, "<i4"),
    }


def _positive(scales: F32) -> F32:
    return np.where(scales > 0, scales, TINY).astype(np.float32)


def _spread(scales: F32, shape: tuple[int, ...], block: int) -> F32:
    """A scale for each element, from one for each block; those at the edges are cut."""
    return scales.repeat(block, axis=0)[: shape[0]].repeat(block, axis=1)[:, : shape[1]]


def _grouped(values: F32, scales: F32, group: int) -> F32:
    return (values.reshape(*scales.shape, group) * scales[..., None]).reshape(values.shape)


def _u8(part: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    return part.view(np.uint8)
