"""The tensor table of a set of weights, and its state digest.

The byte form is part of the format (docs/format.md, with a test vector): two parties that hold the same
weights must name them alike, whatever files they lie in.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from .ports import Buffer

STATE_PREFIX = "sha256:"

ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits an element, by safetensors dtype spelling (source: the safetensors format)."""


@dataclass(frozen=True)
class TensorInfo:
    """``dtype`` in safetensors spelling, ``digest`` the xxh3-128 of the bytes, 32 lower-case hex digits."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


TensorTable = Mapping[str, TensorInfo]


def tensor_digest(data: Buffer) -> str:
    """xxh3-128 of a tensor's little-endian bytes, as 32 lower-case hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def state_digest(table: TensorTable) -> str:
    """``sha256:<hex>`` over the table, sorted by the UTF-8 bytes of the names.

    Byte form: ``stitch-state-1\\n``, u64 count, then for each tensor u32 length and UTF-8 name, u32 length
    and ASCII dtype, u32 rank, u64 for each dimension, 32 ASCII hex digits; integers little-endian.
    """
    digest = hashlib.sha256(b"stitch-state-1\n" + struct.pack("<Q", len(table)))
    for name, tensor in sorted((name.encode(), tensor) for name, tensor in table.items()):
        dtype = tensor.dtype.encode("ascii")
        digest.update(
            struct.pack(
                f"<I{len(name)}sI{len(dtype)}sI", len(name), name, len(dtype), dtype, len(tensor.shape)
            )
            + struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape)
            + tensor.digest.encode("ascii")
        )
    return STATE_PREFIX + digest.hexdigest()


def changed_tensors(old: TensorTable, new: TensorTable) -> list[str]:
    """Names whose bytes differ; the tables must have equal layout (see ``layout_difference``)."""
    return [name for name, tensor in new.items() if old[name].digest != tensor.digest]


def layout_difference(old: TensorTable, new: TensorTable) -> str | None:
    """The first tensor that is missing, extra, or of another dtype or shape, in words; None if none is."""
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            return f"tensor {name} is missing"
        if name not in old:
            return f"tensor {name} is extra"
        a, b = old[name], new[name]
        if a.dtype != b.dtype:
            return f"tensor {name} has dtype {b.dtype}, expected {a.dtype}"
        if a.shape != b.shape:
            return f"tensor {name} has shape {list(b.shape)}, expected {list(a.shape)}"
    return None
