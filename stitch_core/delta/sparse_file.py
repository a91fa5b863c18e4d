"""Reads a sparse file: the XOR deltas of many tensors, in blocks that are coded and read independently.

A checksum covers every byte. Layout: sparse_layout.py, and docs/format.md, "Sparse files".
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ..ports import Files
from .sparse_block import Positions, Values, decode_block
from .sparse_layout import HEAD, Changed
from .sparse_tables import Tables, read_tables
from .wire import DeltaError

DENSE_CHANGES = 1 << 19
"""Decoding more takes many times the weights' bytes of memory: one such block at a time."""

_DENSE = threading.Lock()


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
            self._tables = read_tables(path, files)
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

    @property
    def stored_bytes(self) -> int:
        """Bytes of all blocks."""
        return int(self._tables.offsets[-1]) - HEAD.size

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
    def cut(cls, block: int, tables: Tables, positions: Positions, values: Values) -> _SharedBlock:
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


def _hex(text: str) -> Iterator[str]:
    return (text[i : i + 32] for i in range(0, len(text), 32))
