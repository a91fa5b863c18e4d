"""One block of a sparse file: ascending positions and non-zero XOR values of a few MiB of weights, coded.

Gaps between changed elements are nearly geometric, so their high and low bits are independent: the low
``shift`` bits are stored as they are, and what is left fits a byte and an entropy coder, as does each byte of
the values on its own. Layout: docs/format.md, "Sparse files". All functions are pure and thread-safe.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from ..ports import Buffer
from ..safetensors import ByteArray
from .wire import DeltaError

MAX_BLOCK_BYTES = 8 << 20
"""Bytes of weights that one block may cover: bounds what a reader ever allocates for it."""

WIDTHS = (1, 2, 4, 8)

Positions = npt.NDArray[np.int64]
Values = npt.NDArray[Any]
"""Unsigned integers of the block's width."""

_RAW, _ZSTD, _ZEROS = range(3)
_HEAD = struct.Struct("<IB")  # gap symbols, shift
_STREAM = struct.Struct("<BI")  # kind, stored bytes
_SHIFTS = (0, 4, 8, 16)
_ESCAPE = 255
_local = threading.local()


def encode_block(positions: Positions, values: Values) -> bytes:
    """The block of changes at ascending element ``positions`` with XOR ``values``; empty for none."""
    count, width = positions.size, values.dtype.itemsize
    if count == 0:
        return b""
    gaps = positions.copy()
    gaps[1:] -= positions[:-1]
    gaps[1:] -= 1
    shift = _choose_shift((int(positions[-1]) + 1) / count)
    symbols = _escape(gaps >> shift if shift else gaps)
    planes = np.ascontiguousarray(values.view(np.uint8).reshape(count, width).T)
    streams = [(_RAW, _pack(gaps, shift)), _compress(symbols), *(_compress(plane) for plane in planes)]
    heads = (_STREAM.pack(kind, len(data)) for kind, data in streams)
    return b"".join((_HEAD.pack(symbols.size, shift), *heads, *(data for _, data in streams)))


def decode_block(data: Buffer, width: int, count: int, elements: int) -> tuple[Positions, Values]:
    """Positions and values of a block of ``count`` changes among ``elements`` elements; DeltaError.

    Allocates in proportion to ``count``, which must be at most ``elements``, whatever the data says.
    """
    if count == 0:
        if len(data):
            raise DeltaError(f"a block without changes has {len(data)} bytes")
        return np.empty(0, np.int64), np.empty(0, f"<u{width}")
    view = memoryview(data)
    if len(view) < _HEAD.size + _STREAM.size * (2 + width):
        raise DeltaError(f"a block is cut short at {len(view)} bytes")
    symbols, shift = _HEAD.unpack_from(view)
    if shift not in _SHIFTS or not count <= symbols <= count + (elements >> shift) // _ESCAPE:
        raise DeltaError(f"a block of {count} changes has {symbols} gap symbols, shift {shift}")
    at = _HEAD.size + _STREAM.size * (2 + width)
    sizes = [(count * shift + 7) // 8, symbols] + [count] * width
    streams = []
    for i, size in enumerate(sizes):
        kind, stored = _STREAM.unpack_from(view, _HEAD.size + i * _STREAM.size)
        streams.append(_stream(view[at : at + stored], kind, stored, size))
        at += stored
    if at != len(view):
        raise DeltaError(f"a block has {len(view)} bytes, its streams end at {at}")
    gaps = _unescape(streams[1], count)
    if shift:
        gaps <<= shift
        gaps |= _unpack(streams[0], shift, count)
    gaps[1:] += 1
    positions = np.cumsum(gaps, out=gaps)
    if int(positions[-1]) >= elements:
        raise DeltaError(f"a block changes element {int(positions[-1])} of {elements}")
    if width == 1:
        return positions, streams[2]
    planes = np.empty((count, width), np.uint8)
    for i, plane in enumerate(streams[2:]):
        planes[:, i] = plane
    return positions, planes.view(f"<u{width}").reshape(count)


def _choose_shift(distance: float) -> int:
    """Bits of a gap that are stored as they are, for a mean distance between changes (measured optimum)."""
    return 0 if distance < 150 else 4 if distance < 600 else 8 if distance < 20_000 else 16


def _pack(gaps: Positions, shift: int) -> bytes:
    if shift == 0:
        return b""
    if shift == 4:
        low = (gaps & 15).astype(np.uint8)
        packed = low[::2].copy()
        packed[: low.size // 2] |= low[1::2] << 4
        return packed.tobytes()
    return (gaps & ((1 << shift) - 1)).astype(f"<u{shift // 8}").tobytes()


def _unpack(data: ByteArray, shift: int, count: int) -> npt.NDArray[Any]:
    if shift == 4:
        low = np.empty(2 * data.size, np.uint8)
        np.bitwise_and(data, 15, out=low[::2])
        np.right_shift(data, 4, out=low[1::2])
        return low[:count]
    return data.view(f"<u{shift // 8}")


def _escape(high: Positions) -> ByteArray:
    """Bytes: 255 for each 255 in a number, then the rest."""
    if int(high.max()) < _ESCAPE:
        return high.astype(np.uint8)
    large = np.flatnonzero(high >= _ESCAPE)  # few: dividing all would take longer than anything else here
    times, rest = np.divmod(high[large], _ESCAPE)
    symbols = high.astype(np.uint8)
    symbols[large] = rest
    return np.insert(symbols, np.repeat(large, times), _ESCAPE)


def _unescape(symbols: ByteArray, count: int) -> Positions:
    if symbols.size == count:
        if symbols.max() == _ESCAPE:
            raise DeltaError("a block's gaps end early")
        return symbols.astype(np.int64)
    is_end = symbols != _ESCAPE
    escapes = np.flatnonzero(symbols == _ESCAPE)
    if symbols.size - escapes.size != count or not is_end[-1]:
        raise DeltaError(f"a block has {symbols.size - escapes.size} gaps for {count} changes")
    high = symbols[is_end].astype(np.int64)
    # The k-th escape belongs to the gap that comes after as many symbols as are no escapes before it.
    np.add.at(high, escapes - np.arange(escapes.size), _ESCAPE)
    return high


def _compress(stream: ByteArray) -> tuple[int, bytes]:
    """One stream as (kind, bytes): zeros, a zstd frame, or as it is where that is not larger."""
    if not stream.any():
        return _ZEROS, b""
    if not hasattr(_local, "compressor"):
        # Entropy coding is all that is wanted: matches in noise cost more bits than they save.
        parameters = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, min_match=7, window_log=17, hash_log=6, target_length=0,
            write_content_size=True, write_checksum=False, write_dict_id=False,
        )  # fmt: skip
        _local.compressor = zstandard.ZstdCompressor(compression_params=parameters)
    frame: bytes = _local.compressor.compress(stream.data)
    return (_ZSTD, frame) if len(frame) < stream.size else (_RAW, stream.tobytes())


def _stream(data: memoryview, kind: int, stored: int, size: int) -> ByteArray:
    """The ``size`` bytes of a stream."""
    if len(data) != stored:
        raise DeltaError(f"a block is cut short: a stream has {len(data)} bytes of {stored}")
    if kind == _ZEROS and stored == 0:
        return np.zeros(size, np.uint8)
    if kind == _RAW and stored == size:
        return np.frombuffer(data, np.uint8)
    if kind != _ZSTD:
        raise DeltaError(f"a block's stream of kind {kind} has {stored} bytes for {size}")
    return inflate(data, size)


def inflate(data: Buffer, size: int) -> ByteArray:
    """The ``size`` bytes of one zstd frame that says its content size; DeltaError, before allocating more."""
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    try:
        said = zstandard.frame_content_size(data)
        if said != size:
            raise DeltaError(f"a zstd frame says that it holds {said} bytes, not {size}")
        if size == 0:
            raise DeltaError("a zstd frame holds nothing")
        raw = _local.decompressor.decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaError(f"a zstd frame is damaged ({error})") from None
    if len(raw) != size:
        raise DeltaError(f"a zstd frame holds {len(raw)} bytes, not {size}")
    return np.frombuffer(raw, np.uint8)
