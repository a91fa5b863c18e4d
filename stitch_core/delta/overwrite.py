"""The ``overwrite`` encoding: u4 LE count, count u4 LE byte positions (ascending), count new bytes.

Idempotent, but goes forward only. Positions have 32 bits, so a tensor over 4 GiB cannot be expressed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import zstandard

from ..ports import Buffer
from ..safetensors import ByteArray, as_bytes
from . import wire
from .wire import DeltaError

MAX_BYTES = 1 << 32
CHUNK_CHANGES = 1 << 18
"""Changes that are in memory at a time, whatever the tensor's size."""

PART_BYTES = 4 << 20


def encode(old: Buffer, new: Buffer) -> bytes:
    """The frame that turns ``old`` into ``new``, of equal length; DeltaError for more than 4 GiB."""
    before, after = as_bytes(old), as_bytes(new)
    check_size(after.size)
    positions = np.flatnonzero(before != after)
    parts = struct.pack("<I", positions.size), positions.astype("<u4").tobytes(), after[positions].tobytes()
    return wire.compress(b"".join(parts))


def apply(data: ByteArray, frame: Buffer) -> None:
    """Apply in place; DeltaError, and then ``data`` may be partly changed."""
    changes = Changes(lambda: frame, data.size)
    for start in range(0, data.size, PART_BYTES):
        changes.apply(data[start : start + PART_BYTES], start)
    changes.finish()


class Changes:
    """The changes of a tensor of ``size`` bytes, part by part in order. Memory does not grow with them.

    All positions come before the first value, so the frame is read by two readers, one ahead of the other.
    Raises DeltaError.
    """

    def __init__(self, frame: Callable[[], Buffer | wire.FrameFile], size: int) -> None:
        self._size = size
        # The two take turns, with others too, so each has a decompressor of its own.
        self._where, self._what = (wire.FrameReader(frame(), zstandard.ZstdDecompressor()) for _ in range(2))
        head = np.empty(4, np.uint8)
        self._where.read_into(head)
        count = int(head.view("<u4")[0])
        if count > size:
            raise DeltaError(f"overwrite of {count} bytes in a tensor of {size}")
        self._left, self._last = count, -1
        self._positions, self._values = np.empty(0, np.int64), np.empty(0, np.uint8)
        scratch = np.empty(4 * min(count + 1, CHUNK_CHANGES), np.uint8)
        for at in range(0, 4 + 4 * count, scratch.size):
            self._what.read_into(scratch[: 4 + 4 * count - at])

    def apply(self, part: ByteArray, start: int) -> None:
        """Overwrite what changes in ``part``, which begins at ``start``."""
        while True:
            count = int(np.searchsorted(self._positions, start + part.size))
            part[self._positions[:count] - start] = self._values[:count]
            self._positions, self._values = self._positions[count:], self._values[count:]
            if self._positions.size or not self._left:
                return
            self._read()

    def finish(self) -> None:
        """Check that nothing is left."""
        if self._left or self._positions.size:
            raise self._misplaced()
        self._what.finish()

    def _read(self) -> None:
        count = min(self._left, CHUNK_CHANGES)
        raw, self._values = np.empty(4 * count, np.uint8), np.empty(count, np.uint8)
        self._where.read_into(raw)
        self._what.read_into(self._values)
        self._positions = raw.view("<u4").astype(np.int64)
        if self._positions[0] <= self._last or not (self._positions[1:] > self._positions[:-1]).all():
            raise self._misplaced()
        self._left, self._last = self._left - count, int(self._positions[-1])

    def _misplaced(self) -> DeltaError:
        return DeltaError(f"overwrite positions are not ascending within a tensor of {self._size} bytes")


def check_size(size: int) -> None:
    """DeltaError for a tensor of more bytes than positions can name."""
    if size > MAX_BYTES:
        raise DeltaError(f"overwrite cannot express a tensor of {size} bytes: use xor")
