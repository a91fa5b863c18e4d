"""One tensor's delta on the wire: a single zstd frame, level 1.

Writers give the content size; some in the field do not, so readers take both. A reader always knows how
many bytes must come out and never lets more out, whatever the frame says.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator

import numpy as np
import zstandard

from ..ports import Buffer
from ..safetensors import ByteArray

LEVEL = 1
CHUNK_BYTES = 1 << 20

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


def decompress(frame: Buffer, size: int) -> ByteArray:
    """The ``size`` bytes in a frame; DeltaError if it holds fewer or more."""
    out = np.empty(size, np.uint8)
    reader = FrameReader(frame)
    reader.read_into(out)
    reader.finish()
    return out


class FrameReader:
    """Reads a payload that must be exactly one frame, no more bytes than are asked for. DeltaError."""

    def __init__(self, frame: Buffer, decompressor: zstandard.ZstdDecompressor | None = None) -> None:
        """Readers that take turns need a ``decompressor`` each; else this thread's serves them all."""
        length = frame_length(frame)
        if length != len(frame):
            raise DeltaError(
                f"payload of {len(frame)} bytes is not one zstd frame, which ends at byte {length}"
            )
        if not hasattr(_local, "decompressor"):
            _local.decompressor = zstandard.ZstdDecompressor()
        self._reader = (decompressor or _local.decompressor).stream_reader(frame)

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
    """Bytes of the zstd frame that ``data`` starts with, by its block headers (RFC 8878, 3.1.1).

    The library does not say where a frame ended, and its one-shot decoder drops what follows in silence.
    """
    view = memoryview(data)
    try:
        magic, descriptor = struct.unpack_from("<IB", view)
        if magic != _MAGIC:
            raise DeltaError("payload is not a zstd frame")
        single = descriptor >> 5 & 1
        at = 5 + (1 - single) + (0, 1, 2, 4)[descriptor & 3] + (single, 2, 4, 8)[descriptor >> 6]
        last = False
        while not last:
            header = view[at] | view[at + 1] << 8 | view[at + 2] << 16
            last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
            if kind == _RESERVED:
                raise DeltaError(f"zstd frame is damaged at byte {at}")
            at += 3 + (1 if kind == _RLE else size)
    except (IndexError, struct.error):
        raise DeltaError(f"zstd frame is cut short at {len(view)} bytes") from None
    at += 4 if descriptor >> 2 & 1 else 0
    if at > len(view):
        raise DeltaError(f"zstd frame is cut short, {len(view)} bytes of {at}")
    return at
