"""Small number formats in numpy: round to nearest, ties to even, and what codes mean.

Formats: OCP 8-bit floating point (E4M3 without infinities, largest 448), OCP microscaling (E2M1, largest 6;
E8M0, powers of two), bfloat16. Arrays of any shape.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]

E4M3_MAX = 448.0
E2M1_MAX = 6.0
INT4_MIN, INT4_MAX = -8, 7
E8M0_BIAS = 127

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def to_bf16(values: F32) -> npt.NDArray[np.uint16]:
    """The 16 bits of the nearest bfloat16. Finite values only."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(codes: npt.NDArray[np.uint16]) -> F32:
    return (codes.astype(np.uint32) << 16).view(np.float32)


def to_e4m3(values: F32) -> Codes:
    """E4M3 codes; what is above 448 becomes 448. Finite values only."""
    return _to_small(values, E4M3_MAX, exponent=4, mantissa=3)


def from_e4m3(codes: Codes) -> F32:
    """Values of E4M3 codes; 0x7f and 0xff are no numbers."""
    return _E4M3_VALUES[codes]


def to_e2m1(values: F32) -> Codes:
    """E2M1 codes, one a byte; what is above 6 becomes 6. Finite values only."""
    return _to_small(values, E2M1_MAX, exponent=2, mantissa=1)


def from_e2m1(codes: Codes) -> F32:
    values: F32 = E2M1_VALUES[codes]
    return values


def e8m0_for(largest: F32) -> Codes:
    """The exponent with which E2M1 holds values up to ``largest``: floor(log2(largest)) - 2, as OCP says.

    Values of the top quarter of a power of two saturate.
    """
    _, exponent = np.frexp(largest)  # largest = mantissa * 2**exponent, 0.5 <= mantissa < 1
    codes = np.where(largest > 0, exponent.astype(np.int32) - 1 - 2 + E8M0_BIAS, E8M0_BIAS)
    return np.asarray(np.clip(codes, 0, 254), np.uint8)


def from_e8m0(codes: Codes) -> F32:
    return np.ldexp(np.float32(1), codes.astype(np.int32) - E8M0_BIAS).astype(np.float32)


def packed(nibbles: Codes) -> Codes:
    """Two codes a byte along the last axis, the even one low."""
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << np.uint8(4))


def unpacked(data: Codes) -> Codes:
    """What ``packed`` made of: codes, one a byte."""
    both = np.stack([data & 0xF, data >> 4], axis=-1)
    return both.reshape(*data.shape[:-1], data.shape[-1] * 2)


def _to_small(values: F32, largest: float, *, exponent: int, mantissa: int) -> Codes:
    """Codes of a sign and so many bits of ``exponent`` and ``mantissa``.

    Above the smallest normal number the code is the top of the float's own bits, rounded; below it counts
    the smallest step.
    """
    bias = (1 << (exponent - 1)) - 1
    size = np.minimum(np.abs(np.ascontiguousarray(values, np.float32)), np.float32(largest))
    bits, drop = size.view(np.uint32), 23 - mantissa
    rounded = (bits + np.uint32((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)) >> drop
    normal = (rounded - np.uint32((127 - bias) << mantissa)).astype(np.uint8)  # of no use where it wraps
    steps = np.rint(size * np.float32(2.0 ** (bias - 1 + mantissa))).astype(np.uint16).astype(np.uint8)
    codes = np.where(size < np.float32(2.0 ** (1 - bias)), steps, normal)
    return codes | (np.signbit(values).astype(np.uint8) << (exponent + mantissa))


def _e4m3_values() -> Any:
    codes = np.arange(256)
    exponent, fraction = (codes >> 3) & 15, codes & 7
    normal = np.ldexp(1 + fraction / 8, exponent - 7)
    size = np.where(exponent == 0, np.ldexp(fraction / 8, -6), normal)
    size[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes >= 128, -size, size).astype(np.float32)


_E4M3_VALUES = _e4m3_values()
