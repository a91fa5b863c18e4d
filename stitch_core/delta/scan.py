"""Finds the elements that differ between two buffers, in two levels: 8-byte words first, then elements."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from ..safetensors import ByteArray
from .sparse_block import Positions, Values

SCAN_BYTES = 1 << 20
"""Compared at a time: fits the second-level cache with its mask."""

_local = threading.local()


def scan(old: ByteArray, new: ByteArray, width: int) -> tuple[Positions, Values]:
    """Ascending element positions and XOR values where ``old`` and ``new`` differ.

    Both have the same size, a multiple of ``width`` bytes.
    """
    found = [
        _scan(old[at : at + SCAN_BYTES], new[at : at + SCAN_BYTES], width, at // width)
        for at in range(0, new.size, SCAN_BYTES)
    ]
    if len(found) == 1:
        return found[0]
    if not found:
        return np.empty(0, np.int64), np.empty(0, f"<u{width}")
    return np.concatenate([positions for positions, _ in found]), np.concatenate([v for _, v in found])


def _scan(old: ByteArray, new: ByteArray, width: int, first: int) -> tuple[Positions, Values]:
    whole = new.size // 8 * 8
    positions, values = _scan_words(old[:whole].view("<u8"), new[:whole].view("<u8"), width)
    if whole != new.size:
        rest = (old[whole:] ^ new[whole:]).view(f"<u{width}")
        tail = np.flatnonzero(rest)
        positions = np.concatenate([positions, tail + whole // width])
        values = np.concatenate([values, rest[tail]])
    if first:
        positions += first
    return positions, values


def _scan_words(old: npt.NDArray[Any], new: npt.NDArray[Any], width: int) -> tuple[Positions, Values]:
    if not hasattr(_local, "mask"):
        _local.mask = np.empty(SCAN_BYTES // 8, np.bool_)
    words = np.flatnonzero(np.not_equal(old, new, out=_local.mask[: new.size]))
    difference = np.take(old, words)
    difference ^= np.take(new, words)
    if width == 8:
        return words, difference
    elements = difference.view(f"<u{width}")
    inside = np.flatnonzero(elements != 0)
    per_word = 8 // width
    positions = np.take(words, inside >> (per_word.bit_length() - 1))
    positions *= per_word
    inside_values = np.take(elements, inside)
    inside &= per_word - 1
    positions += inside
    return positions, inside_values
