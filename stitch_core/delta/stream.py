"""Applies the deltas of a plan to one tensor part by part: memory does not grow with the tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import xxhash
import zstandard

from ..safetensors import ByteArray
from .directory import DeltaDirectory
from .overwrite import Changes
from .sparse_file import SparseFile
from .wire import DeltaError, FrameFile, FrameReader

PART_BYTES = 2 << 20
"""Of this size a part's old and new bytes and what differs stay in the cache; a multiple of every width."""

Read = Callable[[int, ByteArray], None]
"""Fills an array with a tensor's old bytes from an offset on."""

_NOTHING = np.empty(0, np.uint8)
_local = threading.local()


class _Feed(Protocol):
    """One delta of the tensor; the parts come in order, without gaps."""

    def apply(self, part: ByteArray, start: int) -> None: ...
    def finish(self) -> None: ...


def stream(
    name: str,
    size: int,
    read: Read,
    deltas: Sequence[DeltaDirectory],
    *,
    zones: Sequence[tuple[int, int]] = (),
    part_bytes: int = PART_BYTES,
) -> Iterator[tuple[int, ByteArray, ByteArray, str]]:
    """Each part of a tensor of ``size`` bytes as (start, old bytes, new bytes, xxh3-128 of the new so far).

    Both arrays are valid until the next part, and this thread's. The digest is hex, and empty before the
    last part; a tensor without bytes has no part. With ``zones``, ascending (end, first), the bytes up to
    each end have the deltas before ``first`` in them already. Raises DeltaError.
    """
    feeds = [_feed(delta, name, size) for delta in deltas]
    hasher = xxhash.xxh3_128()
    start = 0
    for end, first in zones or [(size, 0)]:
        while start < end:
            length = min(part_bytes, end - start)
            old, new = _buffer("old", length), _buffer("new", length)
            read(start, old)
            np.copyto(new, old)
            for feed in feeds[:first]:
                feed.apply(_buffer("passed", length), start)
            for feed in feeds[first:]:
                feed.apply(new, start)
            hasher.update(new.data)
            last = start + length == size
            if last:
                _finish(feeds)
            yield start, old, new, hasher.hexdigest() if last else ""
            start += length
    if size == 0:
        _finish(feeds)


def digest_after(name: str, size: int, read: Read, deltas: Sequence[DeltaDirectory]) -> str:
    """The xxh3-128 of the tensor after ``deltas``, in hex; DeltaError."""
    digest = xxhash.xxh3_128_hexdigest(b"")
    for *_, so_far in stream(name, size, read, deltas):
        digest = so_far
    return digest


def _finish(feeds: Sequence[_Feed]) -> None:
    for feed in feeds:
        feed.finish()


def _buffer(use: str, length: int) -> ByteArray:
    """Memory that is not given back and faulted in again for each part."""
    buffer: ByteArray = getattr(_local, use, _NOTHING)
    if buffer.size < length:
        buffer = np.empty(max(length, PART_BYTES), np.uint8)
        setattr(_local, use, buffer)
    return buffer[:length]


def _feed(delta: DeltaDirectory, name: str, size: int) -> _Feed:
    if name in delta.sparse:
        return SparseFeed(delta.sparse[name], name, size)
    if delta.index.encoding == "overwrite":
        return Changes(lambda: delta.frame(name), size)
    return _Xor(delta.frame(name))


class SparseFeed:
    """The changes of a sparse file between ``start``, from where on the parts come, and ``end``."""

    def __init__(
        self, file: SparseFile, name: str, size: int, start: int = 0, end: int | None = None
    ) -> None:
        row = file.tensors[name]
        if row.nbytes != size:
            raise DeltaError(f"{file.path}: tensor {name} has {row.nbytes} bytes there, {size} here")
        self._pieces, self._width, self._done = file.pieces(name, start, end), row.width, start
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
    def __init__(self, frame: bytes | FrameFile) -> None:
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
