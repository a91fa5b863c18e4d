"""Tensor bytes as numbers, by safetensors dtype: enough to say how far two tensors are apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .ports import Buffer

Floats = npt.NDArray[np.float64]

_PLAIN = {
    "F16": "<f2", "F32": "<f4", "F64": "<f8", "BOOL": "u1", "U8": "u1", "I8": "i1", "U16": "<u2",
    "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8", "I64": "<i8",
}  # fmt: skip

_BYTE_FORMATS: dict[str, tuple[int, int, bool]] = {
    "F8_E4M3": (4, 7, False),
    "F8_E4M3FNUZ": (4, 8, True),
    "F8_E5M2FNUZ": (5, 16, True),
}
"""Bits of the exponent, its bias, and whether 0x80 is the only NaN (arXiv 2209.05433 for E4M3, and
2206.02915 for the FNUZ forms). E5M2 is the upper byte of a half, E8M0 a power of two (OCP MX 1.0)."""


def element_bytes(dtype: str) -> int | None:
    """Bytes of one element; None where elements share bytes, or a pair of floats is one."""
    if dtype in _PLAIN:
        return int(np.dtype(_PLAIN[dtype]).itemsize)
    return 2 if dtype == "BF16" else 1 if dtype.startswith("F8_") else None


def to_float64(dtype: str, data: Buffer) -> Floats | None:
    """The numbers in whole elements' little-endian bytes, exactly (integers above 2**53 rounded); NaN stays.

    None for a dtype whose elements are no single numbers of whole bytes (F4, F6, C64).
    """
    if dtype in _PLAIN:
        return np.frombuffer(data, _PLAIN[dtype]).astype(np.float64)
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    table = _byte_table(dtype)
    return None if table is None else table[np.frombuffer(data, np.uint8)]


_tables: dict[str, Floats] = {}


def _byte_table(dtype: str) -> Floats | None:
    """The number that each of the 256 bytes stands for."""
    if dtype not in _tables:
        codes: npt.NDArray[Any] = np.arange(256)
        if dtype == "F8_E5M2":
            table = (codes.astype("<u2") << 8).view("<f2").astype(np.float64)
        elif dtype == "F8_E8M0":
            table = np.exp2(codes - 127.0)
            table[255] = np.nan
        elif dtype in _BYTE_FORMATS:
            table = _decode(codes, *_BYTE_FORMATS[dtype])
        else:
            return None
        _tables[dtype] = table
    return _tables[dtype]


def _decode(codes: npt.NDArray[Any], exponent_bits: int, bias: int, unsigned_zero: bool) -> Floats:
    mantissa_bits = 7 - exponent_bits
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    normal = exponent > 0
    size = np.where(normal, 1.0 + fraction, fraction) * np.exp2(np.where(normal, exponent, 1) - float(bias))
    table: Floats = np.where(codes & 0x80, -size, size)
    if unsigned_zero:
        table[0x80] = np.nan
    else:
        table[[0x7F, 0xFF]] = np.nan
    return table
