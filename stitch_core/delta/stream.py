"""Applies the XOR deltas of a plan to one tensor part by part: memory does not grow with the tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import xxhash
import zstandard

from ..safetensors import ByteArray
from .directory import DeltaDirectory
from .sparse_file import SparseFile
from .wire import DeltaError, FrameReader

PART_BYTES = 2 << 20
"""Of this size a part's old and new bytes and what differs stay in the cache; a multiple of every width."""


_local = threading.local()


class _Feed(Protocol):
    """One delta of the tensor; the parts come in order, without gaps."""

    def apply(self, part: ByteArray, start: int) -> None: ...
    def finish(self) -> None: ...


def stream(
    name: str, size: int, read: Callable[[int, ByteArray], None], deltas: Sequence[DeltaDirectory]
) -> Iterator[tuple[int, ByteArray, ByteArray, str]]:
    """Each part of a tensor of ``size`` bytes as (start, old bytes, new bytes, xxh3-128 of the new so far).

    ``read`` fills an array with the old bytes from an offset on. Both arrays are valid until the next part,
    and this thread's. The digest is hex, and empty before the last part; a tensor without bytes has no part.
    Raises DeltaError; of an ``overwrite`` delta always, which has no parts.
    """
    feeds = [_feed(delta, name, size) for delta in deltas]
    hasher = xxhash.xxh3_128()
    for start in range(0, size, PART_BYTES):
        length = min(PART_BYTES, size - start)
        old, new = _buffers(length)
        read(start, old)
        np.copyto(new, old)
        for feed in feeds:
            feed.apply(new, start)
        hasher.update(new.data)
        last = start + length == size
        if last:
            for feed in feeds:
                feed.finish()
        yield start, old, new, hasher.hexdigest() if last else ""


def _buffers(length: int) -> tuple[ByteArray, ByteArray]:
    """Memory that is not given back and faulted in again for each part."""
    if not hasattr(_local, "buffers"):
        _local.buffers = np.empty((2, PART_BYTES), np.uint8)
    return _local.buffers[0, :length], _local.buffers[1, :length]


def _feed(delta: DeltaDirectory, name: str, size: int) -> _Feed:
    if delta.index.encoding == "overwrite":
        raise DeltaError(f"{delta.path}: an overwrite of tensor {name} is applied as a whole")
    if name in delta.sparse:
        return _Sparse(delta.sparse[name], name, size)
    return _Xor(delta.read(name))


class _Sparse:
    def __init__(self, file: SparseFile, name: str, size: int) -> None:
        row = file.tensors[name]
        if row.nbytes != size:
            raise DeltaError(f"{file.path}: tensor {name} has {row.nbytes} bytes there, {size} here")
        self._pieces, self._width, self._done = file.pieces(name), row.width, 0
        self._positions = np.empty(0, np.int64)
        self._values = np.empty(0, f"<u{row.width}")

    def apply(self, part: ByteArray, start: int) -> None:
        words = part.view(self._values.dtype)
        first, end = start // self._width, (start + part.size) // self._width
        while True:
            count = int(np.searchsorted(self._positions, end))
            if count:
                at = self._positions[:count] - first
                changed = words.take(at)
                changed ^= self._values[:count]
                words[at] = changed
                self._positions, self._values = self._positions[count:], self._values[count:]
            if self._done >= start + part.size:
                return
            _, self._done, self._positions, self._values = next(self._pieces)

    def finish(self) -> None:
        pass


class _Xor:
    def __init__(self, frame: bytes) -> None:
        # Readers of one tensor take turns, so each has a decompressor of its own.
        self._reader = FrameReader(frame, zstandard.ZstdDecompressor())
        self._buffer = np.empty(0, np.uint8)

    def apply(self, part: ByteArray, start: int) -> None:
        if self._buffer.size < part.size:
            self._buffer = np.empty(part.size, np.uint8)
        self._reader.read_into(self._buffer[: part.size])
        np.bitwise_xor(part, self._buffer[: part.size], out=part)

    def finish(self) -> None:
        self._reader.finish()
