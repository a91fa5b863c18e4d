"""A Hugging Face checkpoint directory as named, typed byte ranges."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from .dialects import INDEX_NAME, Index, check_shard_name, read_index
from .parallel import in_order
from .ports import FileMarks, Files
from .safetensors import CheckpointError, TensorRef, read_header
from .state import TensorInfo, state_digest

__all__ = ["CHUNK_BYTES", "Checkpoint", "CheckpointError", "TensorRef"]

CHUNK_BYTES = 8 << 20

_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{1,9})-of-(?P<count>[0-9]{1,9})\.safetensors\Z", re.DOTALL)

Progress = Callable[[str, int, int], None]
"""Told how far a call that goes through a whole model has come: ``hashed`` or ``copied``, bytes, of bytes.

It is called by the thread that made that call, whichever threads do the work.
"""

_local = threading.local()


def untold(what: str, done: int, total: int) -> None:
    """A Progress for nobody."""


@dataclass(frozen=True)
class Checkpoint:
    """A full checkpoint whose files, headers and index agree. ``weight_files`` are the shards' names, sorted.

    ``index`` is None where there is no index file: then the directory has one ``*.safetensors``, or a whole
    numbered set of them, ``NAME-00001-of-00003.safetensors`` and so on, and no other. With an index other
    files are no part of it.
    """

    directory: Path
    files: Files = field(repr=False)
    tensors: Mapping[str, TensorRef] = field(repr=False)
    weight_files: tuple[str, ...]
    index: Index | None = field(repr=False)

    @classmethod
    def open(cls, directory: Path, files: Files) -> Checkpoint:
        """Read the index and every header, no tensor; CheckpointError names the file or tensor at fault."""
        names = list_directory(directory, files)
        index = None
        if INDEX_NAME in names:
            where = directory / INDEX_NAME
            index = read_index(files.read(where), str(where))
            if index.kind == "delta":
                raise CheckpointError(f"{where}: a delta ({index.encoding}), not a full checkpoint")
            if not index.weight_map:
                raise CheckpointError(f"{where}: names no tensors")
        shards = set(index.weight_map.values()) if index else _only_set(directory, names)
        tensors: dict[str, TensorRef] = {}
        for shard in sorted(check_shard_name(shard, str(directory)) for shard in shards):
            if shard not in names:
                raise CheckpointError(f"{directory / shard}: named by the index, but not there")
            for name, ref in read_header(directory / shard, files).tensors.items():
                if name in tensors:
                    raise CheckpointError(
                        f"{directory / shard}: tensor {name} is also in {tensors[name].file}"
                    )
                tensors[name] = ref
        if index:
            _check_index(directory, index, tensors)
        return cls(directory, files, tensors, tuple(sorted(shards)), index)

    def read(self, name: str) -> bytes:
        """A tensor's bytes."""
        ref = self.tensors[name]
        data = self.files.read(ref.file, ref.offset, ref.nbytes) if ref.nbytes else b""
        if len(data) != ref.nbytes:
            raise CheckpointError(
                f"{ref.file}: tensor {name} is cut short, {len(data)} bytes of {ref.nbytes}"
            )
        return data

    def chunks(self, name: str, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        """A tensor's bytes in pieces of ``size``, the last one shorter."""
        ref = self.tensors[name]
        for at in range(0, ref.nbytes, size):
            length = min(size, ref.nbytes - at)
            data = self.files.read(ref.file, ref.offset + at, length)
            if len(data) != length:
                raise CheckpointError(f"{ref.file}: tensor {name} is cut short at byte {at + len(data)}")
            yield data

    def table(
        self, workers: int = 1, progress: Progress = untold, names: Iterable[str] | None = None
    ) -> dict[str, TensorInfo]:
        """Hash every tensor, or only ``names``, on ``workers`` threads, 8 MiB each in memory.

        ``progress`` is told after each tensor of 8 MiB and more, and after each such group of small ones.
        """
        table: dict[str, TensorInfo] = {}
        refs = self.tensors if names is None else {name: self.tensors[name] for name in names}
        done, total = 0, sum(ref.nbytes for ref in refs.values())
        for infos in in_order((functools.partial(self._infos, group) for group in _groups(refs)), workers):
            table |= infos
            done += sum(self.tensors[name].nbytes for name in infos)
            progress("hashed", done, total)
        return table

    def state(self, workers: int = 1) -> str:
        """The digest that names these weights; reads every byte."""
        return state_digest(self.table(workers))

    def _infos(self, names: list[str]) -> dict[str, TensorInfo]:
        return {name: self._info(name, self.tensors[name]) for name in names}

    def _info(self, name: str, ref: TensorRef) -> TensorInfo:
        digest = xxhash.xxh3_128()
        for at in range(0, ref.nbytes, CHUNK_BYTES):
            chunk = _buffer(min(CHUNK_BYTES, ref.nbytes - at))
            count = self.files.read_into(ref.file, ref.offset + at, chunk)
            if count != len(chunk):
                raise CheckpointError(f"{ref.file}: tensor {name} is cut short at byte {at + count}")
            digest.update(chunk)
        return TensorInfo(ref.dtype, ref.shape, digest.hexdigest())


def _groups(refs: Mapping[str, TensorRef]) -> Iterator[list[str]]:
    """Large tensors one by one, small ones together: a task has a price."""
    group: list[str] = []
    size = 0
    for name, ref in refs.items():
        group.append(name)
        size += ref.nbytes
        if size >= CHUNK_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _buffer(length: int) -> memoryview:
    """Memory of this thread that is not given back and faulted in again for each chunk."""
    if len(getattr(_local, "buffer", b"")) < length:
        _local.buffer = memoryview(bytearray(CHUNK_BYTES))
    buffer: memoryview = _local.buffer[:length]
    return buffer


def list_directory(directory: Path, files: Files) -> list[str]:
    """Names in a checkpoint's directory; CheckpointError if it is not there."""
    try:
        return files.list(directory)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{directory}: no such directory") from None


def marks_of(directory: Path, files: Files) -> FileMarks:
    """Of a checkpoint's directory and of all that is in it: equal only if nothing there was changed.

    Raises CheckpointError if it is not there, OSError.
    """
    names = list_directory(directory, files)
    marks = {"": files.mark(directory)}
    for name in names:
        with contextlib.suppress(OSError):  # it went meanwhile, or is a link to nothing or to itself
            marks[name] = files.mark(directory / name)
    return marks


def first_change(before: FileMarks, after: FileMarks) -> str | None:
    """The name of a file (or "", the directory itself) that differs; None if all are as they were."""
    # A file tells more than its directory.
    names = sorted(before.keys() | after.keys(), key=lambda name: (not name, name))
    return next((name for name in names if before.get(name) != after.get(name)), None)


def _only_set(directory: Path, names: list[str]) -> set[str]:
    """The shards of a checkpoint without an index, where nothing but their names says that they are one.

    A second file, or one of a set that is not whole, may be another attempt's: CheckpointError.
    """
    found = [name for name in names if name.endswith(".safetensors") and not name.startswith(".")]
    if not found:
        raise CheckpointError(f"{directory}: no *.safetensors file")
    parts = [_PART.match(name) for name in found]
    if len(found) == 1 and parts[0] is None:
        return set(found)
    sets = {(part["stem"], int(part["count"])) for part in parts if part}
    if all(parts) and len(sets) == 1:
        numbers = sorted(int(part["number"]) for part in parts if part)
        ((_, count),) = sets
        if numbers in (list(range(count)), list(range(1, count + 1))):
            return set(found)
    raise CheckpointError(
        f"{directory}: there is no {INDEX_NAME} that says which files are one checkpoint, and "
        f"{', '.join(found)} are neither one file nor a whole set NAME-00001-of-0000N: remove what another "
        "attempt has left, or write the index"
    )


def _check_index(directory: Path, index: Index, tensors: Mapping[str, TensorRef]) -> None:
    for name, shard in index.weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{directory / shard}: tensor {name} is missing, the index names it there")
        if tensors[name].file.name != shard:
            raise CheckpointError(
                f"{directory / shard}: tensor {name} is not there but in {tensors[name].file.name}"
            )
    for name, ref in tensors.items():
        if name not in index.weight_map:
            raise CheckpointError(f"{ref.file}: tensor {name} is extra, the index does not name it")
