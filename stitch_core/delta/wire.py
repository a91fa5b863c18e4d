"""One tensor's delta on the wire: a single zstd frame, level 1.

Writers give the content size; some in the field do not, so readers take both. A reader always knows how
many bytes must come out and never lets more out, whatever the frame says.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, cast

import numpy as np
import zstandard

from ..ports import Buffer
from ..safetensors import ByteArray

LEVEL = 1
CHUNK_BYTES = 1 << 20
READ_BYTES = 1 << 20
"""Of a payload that lies in a file, at a time."""

_MAGIC = 0xFD2FB528
_RLE, _RESERVED = 1, 3
_local = threading.local()


class DeltaError(ValueError):
    """A delta that cannot be read, written or applied; the message names the file or tensor."""


def compress(data: Buffer) -> bytes:
    """One frame with its content size."""
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=LEVEL)
    frame: bytes = _local.compressor.compress(data)
    return frame


class FrameReader:
    """Reads a payload that must be exactly one frame, no more bytes than are asked for. DeltaError."""

    def __init__(
        self, frame: Buffer | FrameFile, decompressor: zstandard.ZstdDecompressor | None = None
    ) -> None:
        """Readers that take turns need a ``decompressor`` each; else this thread's serves them all."""
        self._file = frame if isinstance(frame, FrameFile) else None
        if not isinstance(frame, FrameFile):
            length = frame_length(frame)
            if length != len(frame):
                raise _not_one_frame(len(frame), length)
        if not hasattr(_local, "decompressor"):
            _local.decompressor = zstandard.ZstdDecompressor()
        self._reader = (decompressor or _local.decompressor).stream_reader(
            cast(Any, frame), read_size=READ_BYTES
        )

    def read_into(self, out: ByteArray) -> None:
        """Fill ``out``."""
        done = 0
        while done < out.size:
            count = self.read_some(out[done:])
            if count == 0:
                raise DeltaError(f"zstd frame ends {out.size - done} bytes early")
            done += count

    def finish(self) -> None:
        """Check that nothing is left."""
        if self.read_some(np.empty(1, np.uint8)):
            raise DeltaError("zstd frame holds more bytes than the tensor has")
        if self._file is not None:
            self._file.finish()

    def read_some(self, out: ByteArray) -> int:
        """Fill a part of ``out``, how much of it; 0 at the end."""
        try:
            count: int = self._reader.readinto(out)
        except zstandard.ZstdError as error:
            raise DeltaError(f"zstd frame is damaged ({error})") from None
        return count


def read_chunks(frame: Buffer, size: int) -> Iterator[tuple[int, ByteArray]]:
    """The ``size`` bytes of a frame as (position, chunk); each chunk is valid until the next one."""
    if not hasattr(_local, "chunk"):
        _local.chunk = np.empty(CHUNK_BYTES, np.uint8)
    reader = FrameReader(frame)
    for at in range(0, size, CHUNK_BYTES):
        chunk = _local.chunk[: min(CHUNK_BYTES, size - at)]
        reader.read_into(chunk)
        yield at, chunk
    reader.finish()


def content_size(frame: Buffer) -> int:
    """Bytes that come out of a frame, also of one that does not say it: that is read through."""
    reader = FrameReader(frame)  # which checks that it is a frame
    said = zstandard.frame_content_size(frame)
    if said >= 0:
        return int(said)
    chunk, size = np.empty(CHUNK_BYTES, np.uint8), 0
    while count := reader.read_some(chunk):
        size += count
    return size


def frame_length(data: Buffer) -> int:
    """Bytes of the zstd frame that ``data`` starts with. DeltaError if it does not end there."""
    walk = _Walk()
    walk.feed(data)
    if walk.end is None:
        raise DeltaError(f"zstd frame is cut short at {len(data)} bytes")
    return walk.end


class FrameFile:
    """A payload of ``size`` bytes that is read as it is needed, by ``read(offset, count)``."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self._read, self._size, self._at, self._walk = read, size, 0, _Walk()

    def read(self, count: int) -> bytes:
        """The next bytes, as a decompressor asks for them."""
        data = self._read(self._at, min(count, self._size - self._at)) if self._at < self._size else b""
        self._at += len(data)
        self._walk.feed(data)
        return data

    def finish(self) -> None:
        """DeltaError unless the payload is one frame, to its last byte."""
        while self._walk.end is None and self.read(READ_BYTES):
            pass
        if self._walk.end is None:
            raise DeltaError(f"zstd frame is cut short at {self._at} bytes")
        if self._walk.end != self._size:
            raise _not_one_frame(self._size, self._walk.end)


class _Walk:
    """Follows a frame by its block headers (RFC 8878, 3.1.1) to where it ends.

    The library does not say where that was, and its one-shot decoder drops what follows in silence.
    """

    def __init__(self) -> None:
        self.end: int | None = None
        self._steps = self._headers()
        self._wanted = next(self._steps)  # bytes of the next header
        self._have = b""
        self._skip = self._at = 0  # bytes before it; bytes that were fed

    def feed(self, data: Buffer) -> None:
        view = memoryview(data)
        at = 0
        while self.end is None:
            passed = min(self._skip, len(view) - at)
            self._skip -= passed
            at += passed
            if self._skip:
                break
            if self._wanted == 0:
                self.end = self._at + at
                break
            taken = bytes(view[at : at + self._wanted - len(self._have)])
            at += len(taken)
            self._have += taken
            if len(self._have) < self._wanted:
                break
            header, self._have = self._have, b""
            self._wanted = self._steps.send(header)
        self._at += len(view)

    def _headers(self) -> Generator[int, bytes, None]:
        """Asks for headers by their size, 0 at the end, and says how much lies between them."""
        magic, descriptor = struct.unpack("<IB", (yield 5))
        if magic != _MAGIC:
            raise DeltaError("payload is not a zstd frame")
        single = descriptor >> 5 & 1
        self._skip = (1 - single) + (0, 1, 2, 4)[descriptor & 3] + (single, 2, 4, 8)[descriptor >> 6]
        last = False
        while not last:
            header = int.from_bytes((yield 3), "little")
            last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
            if kind == _RESERVED:
                raise DeltaError("zstd frame is damaged: a block of a reserved kind")
            self._skip = 1 if kind == _RLE else size
        self._skip += 4 if descriptor >> 2 & 1 else 0
        yield 0


def _not_one_frame(size: int, end: int) -> DeltaError:
    return DeltaError(f"payload of {size} bytes is not one zstd frame, which ends at byte {end}")
