"""Encodes what changed between two sets of tensors as sparse files, in bounded memory on several threads.

Each block is compared, hashed and coded while it is in the cache. Small tensors share tasks and blocks; a
large one is split between threads, and then hashed on its own. Results are written in order as they come.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ..parallel import default_workers
from ..ports import Files
from ..safetensors import ByteArray
from ..state import tensor_digest
from .scan import scan
from .sparse_block import Values, encode_block
from .sparse_layout import SMALL_BYTES, Block, Changed, order
from .sparse_writer import SparseWriter

BLOCK_BYTES = 4 << 20
DENSE_BLOCK_BYTES = 1 << 20
TASK_BYTES = 8 << 20
AHEAD_BYTES = 80 << 20
"""Weights that are under way: what they become, at most about as much, waits for its turn in memory."""

FILE_BYTES = 1 << 30
FILE_TENSORS = 1 << 20
"""Tensors of one file, about, so that its tables stay below what a reader takes (MAX_TABLE_BYTES)."""

_PROBE = 1 << 14  # bytes that say whether most changes
_DENSE = threading.Lock()
_local = threading.local()


class Source(NamedTuple):  # not a dataclass, and arrays: there may be 100,000, and the collector walks them
    """One tensor: its bytes before and after, the width of its elements, and the xxh3-128 of ``old``.

    ``packed``: two elements of 4 bits in a byte, which are counted one by one.
    """

    name: str
    old: ByteArray
    new: ByteArray
    width: int
    digest: str
    packed: bool = False


@dataclass
class SparseStats:
    """What was encoded so far: tensors and bytes of weights, which of them changed, and bytes of files."""

    tensors: int = 0
    bytes: int = 0
    changed_tensors: int = 0
    changed_elements: int = 0
    changed_bytes: int = 0
    encoded_bytes: int = 0


@dataclass
class _Part:
    """What one task found out: ``tensors`` end in it. ``split``: the tensor that the blocks are a part of."""

    bytes: int
    blocks: list[Block]
    changed: dict[str, Changed]
    counts: tuple[int, int] = (0, 0)  # changed elements and bytes
    tensors: int = 1
    split: _Split | None = None


@dataclass(frozen=True)
class _Split:
    """A tensor that several tasks encode, and what its new bytes' xxh3-128 will be, in hex."""

    source: Source
    digest: Future[str]


def encode_sparse(
    sources: Sequence[Source],
    path_of: Callable[[int], Path],
    files: Files,
    *,
    workers: int | None = None,
    file_bytes: int = FILE_BYTES,
    progress: Callable[[SparseStats], None] | None = None,
) -> tuple[list[Path], dict[str, Changed], SparseStats]:
    """Write ``path_of(0)``, ``path_of(1)``, ..., files of about ``file_bytes`` at most; none for no change.

    Returns the paths, the changed tensors, and statistics; ``progress`` gets these after each task.
    ``workers`` threads (by default one for each CPU, at most 8) hold a few MiB each, more only where most
    elements change. Buffers must not change meanwhile. Files of a call that raises are removed.
    """
    ordered = sorted(sources, key=lambda s: order(s.name, s.new.size, s.width))
    output = _Output(path_of, files, file_bytes)
    count = workers or default_workers()
    try:
        for part in _run(ordered, count):
            output.add(part)
            if progress:
                progress(output.stats)
        output.end_file()
    except BaseException:
        output.discard()
        raise
    return output.paths, output.changed, output.stats


class _Output:
    """The files as parts come in; blocks of a tensor wait in memory until one of them has a change."""

    def __init__(self, path_of: Callable[[int], Path], files: Files, file_bytes: int) -> None:
        self.paths: list[Path] = []
        self.changed: dict[str, Changed] = {}
        self.stats = SparseStats()
        self._path_of, self._files, self._file_bytes = path_of, files, file_bytes
        self._writer: SparseWriter | None = None
        self._in_file: dict[str, Changed] = {}
        self._held: list[Block] = []  # of a tensor without changes so far
        self._split_changes = 0

    def add(self, part: _Part) -> None:
        self.stats.bytes += part.bytes
        self.stats.tensors += part.tensors
        self.stats.changed_elements += part.counts[0]
        self.stats.changed_bytes += part.counts[1]
        self._held += part.blocks
        if any(block.changes for block in part.blocks):
            self._write_held()
        changed = part.changed
        if part.split:
            self._split_changes += sum(block.changes for block in part.blocks)
            if part.tensors and self._split_changes:
                source = part.split.source
                digest = part.split.digest.result()
                changed = {source.name: Changed(source.new.size, source.width, source.digest, digest)}
                self._write_held()
            if part.tensors:
                self._held.clear()  # of a tensor that has not changed
                self._split_changes = 0
        self._in_file |= changed
        self.changed |= changed
        self.stats.changed_tensors += len(changed)
        full = self._writer and (self._writer.size > self._file_bytes or len(self._in_file) > FILE_TENSORS)
        if full and part.tensors:
            self.end_file()

    def _write_held(self) -> None:
        if self._writer is None:
            self._writer = SparseWriter(self._path_of(len(self.paths)), self._files)
        for block in self._held:
            self._writer.add_block(block)
        self._held.clear()

    def end_file(self) -> None:
        if self._writer is not None:
            self._writer.finish(self._in_file)
            self.paths.append(self._writer.path)
            self.stats.encoded_bytes += self._writer.size
        self._writer, self._in_file = None, {}

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.discard()
        for path in self.paths:
            self._files.remove(path)


# ----------------------------------------------------------------------------------------------- tasks

_Task = tuple[int, Callable[[], _Part]]  # with the bytes of weights that it is about


def _run(ordered: Sequence[Source], workers: int) -> Iterator[_Part]:
    """The parts in order. A bounded number of bytes is under way or waits to be written."""
    if workers == 1:
        yield from (task() for _, task in _tasks(ordered, None))
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="stitch-encode") as pool:
        waiting: deque[Future[_Part]] = deque()
        ahead = 0
        try:
            for nbytes, task in _tasks(ordered, pool):
                while waiting and ahead + nbytes > AHEAD_BYTES:
                    part = waiting.popleft().result()
                    ahead -= part.bytes
                    yield part
                waiting.append(pool.submit(task))
                ahead += nbytes
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _tasks(ordered: Sequence[Source], pool: ThreadPoolExecutor | None) -> Iterator[_Task]:
    """Tasks in the order of the byte space: runs of small tensors, whole tensors, parts of large ones."""
    batch: list[Source] = []
    size = 0
    for source in ordered:
        nbytes = source.new.size
        if batch and (nbytes >= SMALL_BYTES or size + nbytes > BLOCK_BYTES or source.width != batch[0].width):
            yield size, partial(_small, batch)
            batch, size = [], 0
        if nbytes >= SMALL_BYTES:
            yield from _large_tasks(source, pool)
        else:
            batch.append(source)
            size += nbytes
    if batch:
        yield size, partial(_small, batch)


def _large_tasks(source: Source, pool: ThreadPoolExecutor | None) -> Iterator[_Task]:
    nbytes = source.new.size
    if pool is None or nbytes <= 2 * TASK_BYTES:
        yield nbytes, partial(_whole, source)
        return
    split = _Split(source, pool.submit(tensor_digest, source.new.data))
    for start in range(0, nbytes, TASK_BYTES):
        end = min(start + TASK_BYTES, nbytes)
        yield end - start, partial(_range, split, start, end)


def _whole(source: Source) -> _Part:
    """A tensor in one task, hashed while each block is in the cache."""
    hasher = xxhash.xxh3_128()
    blocks, counts = _blocks(source, 0, source.new.size, hasher)
    if not counts[0]:
        return _Part(source.new.size, [], {})
    row = Changed(source.new.size, source.width, source.digest, hasher.hexdigest())
    return _Part(source.new.size, blocks, {source.name: row}, counts)


def _range(split: _Split, start: int, end: int) -> _Part:
    """A part of a tensor that is hashed elsewhere."""
    blocks, counts = _blocks(split.source, start, end, None)
    return _Part(end - start, blocks, {}, counts, int(end == split.source.new.size), split)


def _small(batch: Sequence[Source]) -> _Part:
    """Tensors that share a block; those that have not changed are taken out of it."""
    sizes = np.array([source.new.size for source in batch], np.int64)
    old, new = _joined([source.old for source in batch], 0), _joined([source.new for source in batch], 1)
    with _DENSE if _is_dense(old, new) else contextlib.nullcontext():
        return _small_block(batch, sizes, old, new)


def _small_block(
    batch: Sequence[Source], sizes: npt.NDArray[np.int64], old: ByteArray, new: ByteArray
) -> _Part:
    width, total = batch[0].width, new.size
    positions, values = scan(old, new, width)
    ends = np.cumsum(sizes)
    changes = np.diff(np.searchsorted(positions, ends // width), prepend=0)
    changed, view, start = {}, new.data, 0
    for source, end, count in zip(batch, ends.tolist(), changes.tolist(), strict=True):
        if count:
            digest = tensor_digest(view[start:end])
            changed[source.name] = Changed(end - start, width, source.digest, digest)
        start = end
    if not changed:
        return _Part(total, [], {}, tensors=len(batch))
    removed = np.cumsum(np.where(changes, 0, sizes)) // width
    if removed[-1]:
        positions -= np.repeat(removed, changes)
    covered = total - int(removed[-1]) * width
    block = Block(encode_block(positions, values), covered, width, positions.size)
    elements = positions.size
    if width == 1:
        packed = values[np.repeat([source.packed for source in batch], changes)]
        elements += _elements(packed) - packed.size
    counts = elements, int(np.count_nonzero(values.view(np.uint8)))
    return _Part(total, [block], changed, counts, len(batch))


def _blocks(
    source: Source, start: int, end: int, hasher: xxhash.xxh3_128 | None
) -> tuple[list[Block], tuple[int, int]]:
    """The blocks between two bytes of a tensor, and how many elements and bytes change there."""
    before, after, width = source.old, source.new, source.width
    blocks, elements, changed_bytes = [], 0, 0
    at = start
    while at < end:
        dense = _is_dense(before[at:end], after[at:end])
        stop = min(at + (DENSE_BLOCK_BYTES if dense else BLOCK_BYTES), end)
        new = after[at:stop]
        with _DENSE if dense else contextlib.nullcontext():
            positions, values = scan(before[at:stop], new, width)
            blocks.append(Block(encode_block(positions, values), new.size, width, positions.size))
            elements += _elements(values) if source.packed else positions.size
            changed_bytes += int(np.count_nonzero(values.view(np.uint8)))
            del positions, values
        if hasher:
            hasher.update(new.data)
        at = stop
    return blocks, (elements, changed_bytes)


def _is_dense(old: ByteArray, new: ByteArray) -> bool:
    """Whether so much changes that positions take many times the weights' bytes: then one block at a time."""
    return int(np.count_nonzero(old[:_PROBE] != new[:_PROBE])) > _PROBE // 8


def _elements(values: Values) -> int:
    """Packed elements of 4 bits that change."""
    return int(np.count_nonzero(values & 15) + np.count_nonzero(values >> 4))


def _joined(parts: list[ByteArray], which: int) -> ByteArray:
    """The parts end to end in one of this thread's two buffers."""
    if not hasattr(_local, "joined"):
        _local.joined = np.empty((2, BLOCK_BYTES), np.uint8)
    size = sum(map(len, parts))
    out: ByteArray = _local.joined[which][:size]
    np.concatenate(parts, out=out)
    return out
