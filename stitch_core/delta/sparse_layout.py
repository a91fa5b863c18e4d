"""The layout of a sparse file: its head and foot, its rows, and the order in which tensors lie in it.

The changed tensors lie end to end in one byte space, in ``order``; blocks tile it. All of the format:
docs/format.md, "Sparse files".
"""

from __future__ import annotations

import struct
from functools import cache
from typing import NamedTuple

from ..state import ITEM_BITS

MAGIC = b"STSPARSE"
END_MAGIC = b"STSPEND1"
VERSION = 1
HEAD = struct.Struct("<8sII")  # magic, version, 0
FOOT = struct.Struct("<7Q8s")  # tables at, stored, raw, tensors, blocks, element changes, xxh3-64, magic

SMALL_BYTES = 256 << 10
"""Tensors below this come after the others of their width, and share blocks."""


class Changed(NamedTuple):
    """A tensor in a sparse file: ``old`` and ``new`` are its xxh3-128 in hex, ``nbytes`` its whole size."""

    nbytes: int
    width: int
    old: str
    new: str


class Block(NamedTuple):
    """A coded block: it covers ``nbytes`` bytes of the byte space."""

    data: bytes
    nbytes: int
    width: int
    changes: int


def order(name: str, nbytes: int, width: int) -> tuple[int, bool, bytes]:
    """The key by which tensors are sorted in every sparse file."""
    return -width, nbytes < SMALL_BYTES, name.encode()


@cache
def width_of(dtype: str) -> int:
    """Bytes of the elements that a dtype is compared by: packed ones by the byte, complex ones by part."""
    bits = 32 if dtype == "C64" else ITEM_BITS[dtype]
    return bits // 8 if bits in (16, 32, 64) else 1
