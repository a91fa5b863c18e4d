"""A sparse file: the XOR deltas of many tensors, in blocks that are coded and read independently.

The changed tensors lie end to end in one byte space, in ``order``; blocks tile it. Names, sizes, digests and
block offsets are binary tables at the end, so that 60,000 tensors cost 2 MB and no JSON. A checksum
covers every byte. Layout: docs/format.md, "Sparse files".
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ..ports import Files
from ..safetensors import ByteArray
from ..state import ITEM_BITS
from .sparse_block import MAX_BLOCK_BYTES, WIDTHS, Positions, Values, decode_block, inflate
from .wire import DeltaError, compress

MAGIC = b"STSPARSE"
END_MAGIC = b"STSPEND1"
VERSION = 1
SMALL_BYTES = 256 << 10
"""Tensors below this come after the others of their width, and share blocks."""

MAX_TABLE_BYTES = 256 << 20

DENSE_CHANGES = 1 << 19
"""Decoding more takes many times the weights' bytes of memory: one such block at a time."""

_DENSE = threading.Lock()

_HEAD = struct.Struct("<8sII")
_FOOT = struct.Struct(
    "<QQQQQQQ8s"
)  # tables at, stored, raw, tensors, blocks, element changes, xxh3-64, magic


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


class Piece(NamedTuple):
    """Changes of one tensor between bytes ``start`` and ``end``: ``positions`` are elements of the tensor."""

    start: int
    end: int
    positions: Positions
    values: Values

    def since(self, start: int, width: int) -> Piece:
        """What of it lies at byte ``start`` or after."""
        first = int(np.searchsorted(self.positions, start // width))
        return Piece(start, self.end, self.positions[first:], self.values[first:])


def order(name: str, nbytes: int, width: int) -> tuple[int, bool, bytes]:
    """The key by which tensors are sorted in every sparse file."""
    return -width, nbytes < SMALL_BYTES, name.encode()


@cache
def width_of(dtype: str) -> int:
    """Bytes of the elements that a dtype is compared by: packed ones by the byte, complex ones by part."""
    bits = 32 if dtype == "C64" else ITEM_BITS[dtype]
    return bits // 8 if bits in (16, 32, 64) else 1


# ----------------------------------------------------------------------------------------------- write


class SparseWriter:
    """Writes one file, block by block. ``add_block`` in the order of the byte space, then ``finish``."""

    def __init__(self, path: Path, files: Files) -> None:
        self.path, self._files = path, files
        self._temporary = path.with_name(f".{path.name}.tmp")
        if files.exists(self._temporary):
            files.remove(self._temporary)
        files.write_new(self._temporary, _HEAD.pack(MAGIC, VERSION, 0))
        self._blocks: list[tuple[int, int, int, int, int]] = []
        self.size = _HEAD.size
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0

    def add_block(self, block: Block) -> None:
        self._blocks.append(
            (block.nbytes, block.changes, len(block.data), block.width, xxhash.xxh3_64_intdigest(block.data))
        )
        self._waiting.append(block.data)
        self._waiting_bytes += len(block.data)
        self.size += len(block.data)
        if self._waiting_bytes > 4 << 20:
            self._flush()

    def finish(self, tensors: Mapping[str, Changed]) -> None:
        """Write the tables for ``tensors``, which are in ``order``, and make the file durable."""
        self._flush()
        raw = _encode_tables(tensors, self._blocks)
        if len(raw) > MAX_TABLE_BYTES:
            raise DeltaError(f"{self.path}: tables of {len(raw)} bytes: write more files")
        stored = compress(raw)
        changes = sum(block[1] for block in self._blocks)
        foot = (self.size, len(stored), len(raw), len(tensors), len(self._blocks), changes)
        check = xxhash.xxh3_64_intdigest(stored + struct.pack("<6Q", *foot))
        self._files.write_at(self._temporary, self.size, stored + _FOOT.pack(*foot, check, END_MAGIC))
        self._files.sync(self._temporary)
        self._files.rename(self._temporary, self.path)
        self.size += len(stored) + _FOOT.size

    def discard(self) -> None:
        """Remove what was written."""
        if self._files.exists(self._temporary):
            self._files.remove(self._temporary)

    def _flush(self) -> None:
        if self._waiting:
            at = self.size - self._waiting_bytes
            self._files.write_at(self._temporary, at, b"".join(self._waiting))
        self._waiting, self._waiting_bytes = [], 0


def _encode_tables(tensors: Mapping[str, Changed], blocks: Sequence[tuple[int, int, int, int, int]]) -> bytes:
    names = [name.encode() for name in tensors]
    rows = list(tensors.values())
    columns: list[npt.NDArray[Any]] = [np.array([len(name) for name in names], "<u4")]
    parts = [columns[0].tobytes(), b"".join(names), np.array([row.nbytes for row in rows], "<u8").tobytes()]
    parts += [
        bytes.fromhex("".join(row.old for row in rows)),
        bytes.fromhex("".join(row.new for row in rows)),
    ]
    for dtype, column in zip(("<u4", "<u4", "<u4", "u1", "<u8"), range(5), strict=True):
        parts.append(np.array([block[column] for block in blocks], dtype).tobytes())
    return b"".join(parts)


# ------------------------------------------------------------------------------------------------ read


@dataclass(frozen=True)
class _Tables:
    """Per tensor and per block: where each starts in the byte space, with the end of it, and more."""

    names: list[str]
    starts: npt.NDArray[np.int64]
    old: str
    new: str
    block_starts: npt.NDArray[np.int64]
    changes: npt.NDArray[np.int64]
    widths: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    checks: npt.NDArray[np.uint64]


class SparseFile:
    """Reads one file. Opening checks the tables; every block is checked when it is read.

    Safe to use from several threads.
    """

    def __init__(self, path: Path, files: Files, *, backwards: bool = False) -> None:
        """``backwards``: as the delta from the new tensors to the old ones, which has the same changes.

        Raises DeltaError, naming ``path``, for a file that is cut short, damaged or not of this format.
        """
        self.path, self._files = path, files
        try:
            self._tables = _read_tables(path, files)
        except DeltaError as error:
            raise DeltaError(f"{path}: {error}") from None
        self.backwards = backwards
        self._shared: _SharedBlock | None = None

    @property
    def names(self) -> list[str]:
        """Its tensors, in the order of the byte space."""
        return self._tables.names

    @cached_property
    def tensors(self) -> dict[str, Changed]:
        """Every tensor, in the order of the byte space."""
        t = self._tables
        widths = t.widths[self._first_blocks].tolist()
        sizes = np.diff(t.starts).tolist()
        old, new = (t.new, t.old) if self.backwards else (t.old, t.new)
        rows = zip(t.names, sizes, widths, _hex(old), _hex(new), strict=True)
        return {name: Changed(size, width, old, new) for name, size, width, old, new in rows}

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self._tables.names)}

    @property
    def changes(self) -> int:
        """Changed elements in all."""
        return int(self._tables.changes.sum())

    def pieces(self, name: str, start: int = 0, end: int | None = None) -> Iterator[Piece]:
        """The changes of a tensor, in order; the pieces cover it without gaps. DeltaError.

        With ``start`` and ``end``, bytes of the tensor on whole elements, those that cover what lies between,
        none before ``start``.
        """
        t, i = self._tables, self._index[name]
        base, b = int(t.starts[i]), self._first_blocks[i]
        shared = self._shared
        if shared is not None and shared.block == b and i in shared.whole:
            piece = shared.piece(i, 0, self.tensors[name].nbytes)
            yield piece.since(start, int(t.widths[b])) if start else piece
            return
        limit = int(t.starts[i + 1]) if end is None else base + end
        if start:
            b = max(b, int(np.searchsorted(t.block_starts, base + start, "right")) - 1)
        while b < len(t.changes) and int(t.block_starts[b]) < limit:
            piece = self._piece(i, b)
            yield piece.since(start, int(t.widths[b])) if piece.start < start else piece
            b += 1

    def _piece(self, i: int, b: int) -> Piece:
        """What block ``b`` has of tensor ``i``."""
        t = self._tables
        start, end = int(t.starts[i]), int(t.starts[i + 1])
        begin, stop = int(t.block_starts[b]), int(t.block_starts[b + 1])
        if begin < start or stop > end:
            return self._shared_block(b).piece(i, max(begin, start) - start, min(stop, end) - start)
        positions, values = self.block(b)
        if begin > start:
            positions += (begin - start) // int(t.widths[b])
        return Piece(begin - start, stop - start, positions, values)

    def blocks(self) -> Iterator[tuple[int, int, Positions, Values]]:
        """Every block in order: its start in the byte space, its width, positions from its start, values."""
        t = self._tables
        for b in range(len(t.changes)):
            yield int(t.block_starts[b]), int(t.widths[b]), *self.block(b)

    def stored_blocks(self) -> Iterator[Block]:
        """Every block in order, as it is stored."""
        t = self._tables
        for b in range(len(t.changes)):
            covered = int(t.block_starts[b + 1] - t.block_starts[b])
            yield Block(self._stored(b), covered, int(t.widths[b]), int(t.changes[b]))

    @property
    def stored_bytes(self) -> int:
        """Bytes of all blocks."""
        return int(self._tables.offsets[-1]) - _HEAD.size

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where each tensor starts in the byte space, and the end of it."""
        return self._tables.starts

    def block(self, b: int) -> tuple[Positions, Values]:
        """Read and decode block ``b``."""
        t = self._tables
        width = int(t.widths[b])
        elements, changes = int(t.block_starts[b + 1] - t.block_starts[b]) // width, int(t.changes[b])
        try:
            with _DENSE if changes > DENSE_CHANGES else contextlib.nullcontext():
                return decode_block(self._stored(b), width, changes, elements)
        except DeltaError as error:
            raise DeltaError(f"{self.path}: block {b}: {error}") from None

    def _stored(self, b: int) -> bytes:
        t = self._tables
        at, size = int(t.offsets[b]), int(t.offsets[b + 1] - t.offsets[b])
        data = self._files.read(self.path, at, size)
        if len(data) != size or xxhash.xxh3_64_intdigest(data) != int(t.checks[b]):
            raise DeltaError(f"{self.path}: block {b} at byte {at} is damaged")
        return data

    @cached_property
    def _first_blocks(self) -> list[int]:
        t = self._tables
        blocks: list[int] = (np.searchsorted(t.block_starts, t.starts[:-1], "right") - 1).tolist()
        return blocks

    def _shared_block(self, b: int) -> _SharedBlock:
        """A block of several tensors: decoded once for all of them, if they are read in order."""
        shared = self._shared
        if shared is None or shared.block != b:
            shared = self._shared = _SharedBlock.cut(b, self._tables, *self.block(b))
        return shared


@dataclass(frozen=True)
class _SharedBlock:
    """A decoded block, cut at its tensors' ends: ``positions`` count from the start of their own tensor."""

    block: int
    first: int
    whole: range  # tensors that no other block has a part of
    bounds: list[int]
    positions: Positions
    values: Values

    @classmethod
    def cut(cls, block: int, tables: _Tables, positions: Positions, values: Values) -> _SharedBlock:
        begin, stop = tables.block_starts[block], tables.block_starts[block + 1]
        width = tables.widths[block]
        first = int(np.searchsorted(tables.starts, begin, "right")) - 1
        last = int(np.searchsorted(tables.starts, stop, "left"))
        starts = (tables.starts[first : last + 1] - begin) // width  # the first may lie before the block
        bounds = np.searchsorted(positions, starts)
        positions -= np.repeat(starts[:-1], np.diff(bounds))
        whole = range(first + int(starts[0] < 0), last - int(tables.starts[last] > stop))
        return cls(block, first, whole, bounds.tolist(), positions, values)

    def piece(self, tensor: int, start: int, end: int) -> Piece:
        a, z = self.bounds[tensor - self.first : tensor - self.first + 2]
        return Piece(start, end, self.positions[a:z], self.values[a:z])


def _read_tables(path: Path, files: Files) -> _Tables:
    size = files.size(path)
    if size < _HEAD.size + _FOOT.size:
        raise DeltaError(f"cut short at {size} bytes")
    if files.read(path, 0, _HEAD.size) != _HEAD.pack(MAGIC, VERSION, 0):
        raise DeltaError(f"not a sparse delta of format {VERSION}")
    foot = files.read(path, size - _FOOT.size, _FOOT.size)
    if len(foot) != _FOOT.size:
        raise DeltaError("cut short while it was read")
    at, stored, raw, tensors, blocks, changes, check, magic = _FOOT.unpack(foot)
    if magic != END_MAGIC:
        raise DeltaError(f"cut short, or damaged at its end: {size} bytes")
    if at + stored + _FOOT.size != size or at < _HEAD.size:
        raise DeltaError(f"{size} bytes, but its tables are said to lie at {at} to {at + stored}")
    if raw > MAX_TABLE_BYTES or raw < tensors * (4 + 8 + 32) + blocks * 21:
        raise DeltaError(f"tables of {raw} bytes for {tensors} tensors and {blocks} blocks")
    data = files.read(path, at, stored)
    if xxhash.xxh3_64_intdigest(data + foot[:48]) != check:
        raise DeltaError("its tables are damaged")
    return _parse_tables(inflate(data, raw), tensors, blocks, at, changes)


def _parse_tables(raw: ByteArray, tensors: int, blocks: int, data_end: int, changes: int) -> _Tables:
    position = 0

    def take(count: int, dtype: str) -> npt.NDArray[Any]:
        nonlocal position
        length = count * np.dtype(dtype).itemsize
        if position + length > raw.size:
            raise DeltaError("its tables end early")
        position += length
        return np.frombuffer(raw.data, dtype, count, position - length)

    lengths = take(tensors, "<u4").astype(np.int64)
    text = take(int(lengths.sum()), "u1").tobytes()
    sizes = take(tensors, "<u8")
    old, new = (take(16 * tensors, "u1").tobytes().hex() for _ in range(2))
    covered, counts, stored = (take(blocks, "<u4").astype(np.int64) for _ in range(3))
    widths, checks = take(blocks, "u1").astype(np.int64), take(blocks, "<u8")
    if position != raw.size:
        raise DeltaError(f"its tables have {raw.size} bytes, {position} were expected")
    if tensors and (not sizes.all() or int(sizes.max()) >= 1 << 62 or float(sizes.sum(dtype=float)) >= 2**62):
        raise DeltaError("a tensor without bytes, or with too many")
    starts, block_starts, offsets = _sums(sizes.astype(np.int64)), _sums(covered), _sums(stored, _HEAD.size)
    if blocks and (int(covered.max()) > MAX_BLOCK_BYTES or not covered.all()):
        raise DeltaError(f"a block that covers nothing, or more than {MAX_BLOCK_BYTES} bytes")
    if block_starts[-1] != starts[-1] or offsets[-1] != data_end:
        raise DeltaError("its blocks do not cover its tensors, or not its bytes")
    if not np.isin(widths, WIDTHS).all() or (covered % widths).any() or (counts > covered // widths).any():
        raise DeltaError("a block's width or count does not fit the bytes that it covers")
    if int(counts.sum()) != changes:
        raise DeltaError(f"its blocks change {int(counts.sum())} elements, its footer says {changes}")
    names = _names(text, _sums(lengths))
    _check_order(names, starts, block_starts, widths)
    return _Tables(names, starts, old, new, block_starts, counts, widths, offsets, checks)


def _names(text: bytes, ends: npt.NDArray[np.int64]) -> list[str]:
    bounds = ends.tolist()
    try:
        return [text[a:b].decode() for a, b in itertools.pairwise(bounds)]
    except UnicodeDecodeError as error:
        raise DeltaError(f"a tensor's name is not UTF-8 ({error})") from None


def _check_order(
    names: list[str],
    starts: npt.NDArray[np.int64],
    block_starts: npt.NDArray[np.int64],
    widths: npt.NDArray[np.int64],
) -> None:
    """Each tensor lies in blocks of one width, on whole elements, and all are in ``order``."""
    if not names:
        return
    first = np.searchsorted(block_starts, starts[:-1], "right") - 1
    last = np.searchsorted(block_starts, starts[1:], "left") - 1
    own = widths[first]
    # In order, widths only go down: equal at both ends means equal in between.
    if (np.diff(widths) > 0).any() or (widths[last] != own).any():
        raise DeltaError("blocks are not in the order of their widths, or a tensor lies in two widths")
    if ((starts[:-1] - block_starts[first]) % own).any() or (np.diff(starts) % own).any():
        raise DeltaError("a tensor does not start on an element of its block")
    sizes, ranks = np.diff(starts).tolist(), own.tolist()
    keys = [order(*row) for row in zip(names, sizes, ranks, strict=True)]
    for i, (before, after) in enumerate(itertools.pairwise(keys)):
        if before >= after:
            raise DeltaError(f"tensor {names[i + 1]} is there twice, or not in its place")


def _sums(lengths: npt.NDArray[np.int64], first: int = 0) -> npt.NDArray[np.int64]:
    ends = np.empty(lengths.size + 1, np.int64)
    ends[0] = first
    np.cumsum(lengths, out=ends[1:])
    ends[1:] += first
    return ends


def _hex(text: str) -> Iterator[str]:
    return (text[i : i + 32] for i in range(0, len(text), 32))
