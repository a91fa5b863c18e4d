"""One large tensor whose deltas are all sparse, in segments that several threads compute at once."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence

import numpy as np
import xxhash

from ..safetensors import ByteArray
from .sparse_file import SparseFile
from .stream import PART_BYTES, Read, SparseFeed
from .wire import DeltaError

SEGMENT_BYTES = 4 << 20
"""A block of what the encoder writes for large tensors; a thread holds the new bytes of one segment."""

_NOTHING = np.empty(0, np.uint8)
_local = threading.local()


class Segments:
    """The tensor ``name`` of ``size`` bytes after ``files``; ``expected`` is the xxh3-128 of that, in hex.

    Segments may be computed by several threads, but must be begun in order: each waits for those before it
    with its share of the digest.
    """

    def __init__(self, name: str, size: int, files: Sequence[SparseFile], expected: str) -> None:
        self._name, self._size, self._files, self._expected = name, size, files, expected
        self._hasher, self._hashed, self._broken = xxhash.xxh3_128(), 0, False
        self._turn = threading.Condition()

    def __len__(self) -> int:
        return -(-self._size // SEGMENT_BYTES)

    def parts(
        self, number: int, read: Read, part_bytes: int = PART_BYTES
    ) -> Generator[tuple[int, ByteArray, ByteArray], None, None]:
        """Each part of one segment as (start, old bytes, new bytes), valid until the next.

        The last segment ends only if the whole tensor has the digest that it must have. Raises DeltaError.
        """
        try:
            start = number * SEGMENT_BYTES
            end = min(start + SEGMENT_BYTES, self._size)
            feeds = [SparseFeed(file, self._name, self._size, start, end) for file in self._files]
            whole, old = _buffers(end - start, part_bytes)
            for at in range(start, end, part_bytes):
                new = whole[at - start : at - start + part_bytes]
                before = old[: new.size]
                read(at, before)
                np.copyto(new, before)
                for feed in feeds:
                    feed.apply(new, at)
                yield at, before, new
            self._hash(number, whole)
        except BaseException:
            with self._turn:
                self._broken = True
                self._turn.notify_all()
            raise

    def _hash(self, number: int, data: ByteArray) -> None:
        with self._turn:
            # Whoever is waited for was begun before, and waits for nobody after it.
            self._turn.wait_for(lambda: self._hashed == number or self._broken)
            if self._broken:
                raise DeltaError(f"tensor {self._name}: another part of it failed")
            self._hasher.update(data.data)
            self._hashed += 1
            self._turn.notify_all()
            if self._hashed == len(self) and self._hasher.hexdigest() != self._expected:
                raise DeltaError("another digest")


def _buffers(length: int, part_bytes: int) -> tuple[ByteArray, ByteArray]:
    """This thread's, kept: a segment's new bytes, and the old ones of a part."""
    if getattr(_local, "whole", _NOTHING).size < length:
        _local.whole = np.empty(max(length, SEGMENT_BYTES), np.uint8)
    if getattr(_local, "old", _NOTHING).size < part_bytes:
        _local.old = np.empty(part_bytes, np.uint8)
    return _local.whole[:length], _local.old
