"""Merges sparse deltas without the weights that they apply to.

XOR deltas in a row make one: the union of their positions, values of equal ones combined. Inputs are read
block by block and side by side, so the memory does not grow with the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..ports import Files
from .sparse_block import Positions, Values, encode_block
from .sparse_encode import BLOCK_BYTES, FILE_BYTES, FILE_TENSORS
from .sparse_file import SparseFile
from .sparse_layout import SMALL_BYTES, Block, Changed, order
from .sparse_writer import SparseWriter
from .wire import DeltaError

DENSE = 64
"""With more than one change in so many elements, they are combined in an array of all elements."""

Change = tuple[Positions, Values]  # positions in bytes of the output's byte space, or in elements of a block


def merge_sparse(
    deltas: Sequence[Iterable[SparseFile]],
    path_of: Callable[[int], Path],
    files: Files,
    *,
    file_bytes: int = FILE_BYTES,
) -> tuple[list[Path], dict[str, Changed]]:
    """Write the one delta that does what ``deltas`` do in order; each is given by its files.

    Returns the files ``path_of(0)``, ... and the tensors in them; one that ends as it began is left out.
    A delta whose files are opened ``backwards`` is undone.
    Raises DeltaError when a delta does not start from where the ones before it end.
    """
    given = [list(delta) for delta in deltas]
    net = _net(given)
    inputs = [file for delta in given for file in delta]
    paths: list[Path] = []
    try:
        for part in split_files(net, sum(file.stored_bytes for file in inputs), file_bytes):
            writer = SparseWriter(path_of(len(paths)), files)
            try:
                for block in _blocks(part, inputs):
                    writer.add_block(block)
                writer.finish(part)
            except BaseException:
                writer.discard()
                raise
            paths.append(writer.path)
    except BaseException:
        for path in paths:
            files.remove(path)
        raise
    return paths, net


def _net(deltas: Sequence[Sequence[SparseFile]]) -> dict[str, Changed]:
    """What the deltas do together, in ``order``."""
    net: dict[str, Changed] = {}
    for delta in deltas:
        seen: set[str] = set()
        for file in delta:
            for name, row in file.tensors.items():
                before = net.get(name)
                if name in seen:
                    raise DeltaError(f"{file.path}: tensor {name} is also in another file of the delta")
                if before and (before.new, before.nbytes, before.width) != (row.old, row.nbytes, row.width):
                    raise DeltaError(
                        f"{file.path}: tensor {name} of {row.nbytes} bytes, width {row.width}, must be "
                        f"{row.old}, but is {before.new} of {before.nbytes} bytes, width {before.width}"
                    )
                seen.add(name)
                net[name] = row._replace(old=before.old) if before else row
    kept = ((name, row) for name, row in net.items() if row.old != row.new)
    return dict(sorted(kept, key=lambda item: order(item[0], item[1].nbytes, item[1].width)))


def split_files(tensors: Mapping[str, Changed], stored: int, file_bytes: int) -> Iterator[dict[str, Changed]]:
    """Tensors for each output file, where all take about ``stored`` bytes."""
    weight = stored / max(1, sum(row.nbytes for row in tensors.values()))
    part: dict[str, Changed] = {}
    size = 0.0
    for name, row in tensors.items():
        if part and (size + row.nbytes * weight > file_bytes or len(part) >= FILE_TENSORS):
            yield part
            part, size = {}, 0.0
        part[name] = row
        size += row.nbytes * weight
    if part:
        yield part


def _blocks(tensors: Mapping[str, Changed], inputs: Sequence[SparseFile]) -> Iterator[Block]:
    """The blocks of one output file."""
    starts = dict(
        zip(tensors, itertools.accumulate((r.nbytes for r in tensors.values()), initial=0), strict=False)
    )
    readers = [_Reader(file, starts) for file in inputs if not starts.keys().isdisjoint(file.names)]
    for start, end, width in cut_blocks(tensors):
        found = [change for reader in readers for change in reader.until(end)]
        positions, values = _combine(
            [((p - start) // width, v) for p, v in found], (end - start) // width, width
        )
        yield Block(encode_block(positions, values), end - start, width, positions.size)


def cut_blocks(tensors: Mapping[str, Changed]) -> Iterator[tuple[int, int, int]]:
    """Start, end and width of each block: parts of large tensors, runs of small ones."""
    at = start = width = 0
    for row in tensors.values():
        if at > start and (
            row.nbytes >= SMALL_BYTES or row.width != width or at + row.nbytes - start > BLOCK_BYTES
        ):
            yield start, at, width
            start = at
        width = row.width
        if row.nbytes >= SMALL_BYTES:
            for offset in range(0, row.nbytes, BLOCK_BYTES):
                yield at + offset, at + min(offset + BLOCK_BYTES, row.nbytes), width
            start = at + row.nbytes
        at += row.nbytes
    if at > start:
        yield start, at, width


class _Reader:
    """One input's changes in the order of the output, which is the input's own: both are sorted alike."""

    def __init__(self, file: SparseFile, starts: Mapping[str, int]) -> None:
        self._blocks = file.blocks()
        self._starts = file.starts
        # Where each of the input's tensors goes; -1 for one that is not in this output.
        self._goes = np.array([starts.get(name, -1) for name in file.names], np.int64)
        self._left: list[Change] = []

    def until(self, end: int) -> list[Change]:
        """The changes below byte ``end`` that were not returned yet."""
        taken: list[Change] = []
        while True:
            while self._left:
                positions, values = self._left[0]
                count = int(np.searchsorted(positions, end))
                if count:
                    taken.append((positions[:count], values[:count]))
                if count < positions.size:
                    self._left[0] = positions[count:], values[count:]
                    return taken
                self._left.pop(0)
            block = next(self._blocks, None)
            if block is None:
                return taken
            self._left += self._placed(*block)

    def _placed(self, start: int, width: int, positions: Positions, values: Values) -> list[Change]:
        """A block's changes where they go in the output."""
        if not positions.size:
            return []
        own = positions * width + start
        first, last = np.searchsorted(self._starts, (own[0], own[-1]), "right").tolist()
        moves = self._goes[first - 1 : last] - self._starts[first - 1 : last]
        gone = self._goes[first - 1 : last] < 0
        if last == first:
            return [] if gone[0] else [(own + moves[0], values)]
        bounds = np.searchsorted(own, self._starts[first - 1 : last + 1])
        counts = np.diff(bounds)
        own += np.repeat(moves, counts)
        if gone.any():
            kept = np.repeat(~gone, counts)
            own, values = own[kept], values[kept]
        return [(own, values)] if own.size else []


def _combine(changes: Sequence[Change], elements: int, width: int) -> Change:
    """The union of ascending changes among ``elements``: equal positions are XORed, zeros dropped."""
    if not changes:
        return np.empty(0, np.int64), np.empty(0, f"<u{width}")
    if len(changes) == 1:
        return changes[0]
    if sum(p.size for p, _ in changes) > elements // DENSE:
        total = np.zeros(elements, f"<u{width}")
        for at, what in changes:
            there = total.take(at)
            there ^= what
            total[at] = there
        positions = np.flatnonzero(total != 0)
        return positions, total.take(positions)
    positions = np.concatenate([p for p, _ in changes])
    values = np.concatenate([v for _, v in changes])
    by_position = np.argsort(positions, kind="stable")  # a merge of runs that are sorted already
    positions, values = positions[by_position], values[by_position]
    is_first = np.ones(positions.size, np.bool_)
    np.not_equal(positions[1:], positions[:-1], out=is_first[1:])
    firsts: npt.NDArray[np.int64] = np.flatnonzero(is_first)
    if firsts.size < positions.size:
        positions, values = positions[firsts], np.bitwise_xor.reduceat(values, firsts)
    kept = np.flatnonzero(values)
    return (positions, values) if kept.size == values.size else (positions[kept], values[kept])
