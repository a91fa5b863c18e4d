"""Stitch's own encoder: keeps what the trainer last published and writes what has changed since."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ..checkpoint import Checkpoint
from ..dialects import INDEX_NAME, SPARSE_SUFFIX
from ..host_data import copy_files
from ..ports import Files
from ..safetensors import ByteArray, Tensor, as_bytes, tensor_nbytes
from ..state import ITEM_BITS, TensorInfo, TensorTable, layout_difference, state_digest, tensor_digest
from ..stores.probe import NO_LINKS
from . import wire, xor
from .directory import prepare_directory, write_delta, write_sparse_index
from .sparse_apply import apply_sparse
from .sparse_encode import Source, SparseStats, encode_sparse
from .sparse_file import SparseFile
from .sparse_layout import width_of
from .wire import DeltaError

ENCODINGS = ("xor", "sparse")
_KEPT = ".undo"

Writer = Callable[[Mapping[str, tuple[bytes, str]]], Sequence[str]]
"""Writes frames with the xxh3-128 of the new bytes, by tensor; returns the names of the files."""


@dataclass(frozen=True)
class EncodedDelta:
    """A delta directory that was written, and all that a manifest says of it.

    ``changed`` maps each tensor in it to its old and new xxh3-128. ``files`` are names in the directory,
    the index last. Elements are counted in the width of the tensor's dtype (in ``sparse`` by the byte for
    dtypes of 6 bits, by the part for complex ones).
    """

    base: str
    state: str
    encoding: str
    changed: Mapping[str, tuple[str, str]]
    files: tuple[str, ...]
    changed_elements: int
    elements: int
    changed_bytes: int
    bytes: int
    payload_bytes: int

    @property
    def changed_fraction(self) -> float:
        """Changed elements of all elements, 0 to 1."""
        return self.changed_elements / max(1, self.elements)


@dataclass(frozen=True)
class _Undo:
    """Takes the base back over one encode: what was encoded is XOR, so it also undoes.

    Sparse files stay on disk, under names of their own in ``kept``: hard links, or copies without them.
    """

    table: dict[str, TensorInfo]
    state: str
    frames: Mapping[str, bytes] = field(default_factory=dict)
    kept: Path | None = None
    files: Files | None = None

    def take(self, base: Mapping[str, ByteArray]) -> None:
        for name, frame in self.frames.items():
            xor.apply(base[name], frame)
        for file in self._sparse():
            for name in file.names:
                apply_sparse(base[name], name, [file])
        self.forget()

    def forget(self) -> None:
        if self.kept and self.files:
            self.files.remove_tree(self.kept)

    def _sparse(self) -> list[SparseFile]:
        if not self.kept or not self.files or not self.files.exists(self.kept):
            return []
        return [SparseFile(self.kept / name, self.files) for name in self.files.list(self.kept)]


class DeltaEncoder:
    """Holds a host copy of every tensor as last encoded: ``bytes`` of RAM. Not thread-safe.

    ``encode`` moves the base at once, so that the next step can be encoded while this one is published;
    ``commit`` and ``undo`` say how the publishing ended. The layout never changes.
    """

    def __init__(
        self, base: Mapping[str, Tensor], encoding: str = "xor", *, workers: int | None = None
    ) -> None:
        """``encoding``: "xor", as stock slime and Miles write it, or "sparse", on ``workers`` threads."""
        if encoding not in ENCODINGS:
            raise DeltaError(f"no encoder for {encoding!r}: known are {', '.join(ENCODINGS)}")
        self.encoding = encoding
        self._workers = workers
        self._base: dict[str, ByteArray] = {}
        self.table: dict[str, TensorInfo] = {}
        for name, tensor in base.items():
            self._add(name, tensor, as_bytes(tensor.data).copy())
        self.state = state_digest(self.table)
        self._outstanding: deque[_Undo] = deque()

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        encoding: str = "xor",
        *,
        names: Iterable[str] | None = None,
        proven: TensorTable | None = None,
        state: str | None = None,
        workers: int | None = None,
    ) -> DeltaEncoder:
        """An encoder whose base is a checkpoint on disk, or only the tensors ``names`` of it.

        ``proven`` is the table that the base has to have, or ``state`` its digest: what is compared are the
        bytes that are kept, as they were read. Raises DeltaError, naming the tensor and its file or the
        directory, CheckpointError.
        """
        encoder = cls({}, encoding, workers=workers)
        for name in checkpoint.tensors if names is None else names:
            ref = checkpoint.tensors[name]
            encoder._read(checkpoint, name)
            if proven is not None and encoder.table[name] != proven.get(name):
                encoder._read(checkpoint, name)  # one bad read is no other file
                check_base(name, encoder.table[name], proven, ref.file)
        encoder.state = state_digest(encoder.table)
        if state not in (None, encoder.state):
            raise DeltaError(
                f"{checkpoint.directory}: its state was {state}, what was read is {encoder.state}"
            )
        return encoder

    @property
    def outstanding(self) -> int:
        """Encodes that are neither committed nor undone."""
        return len(self._outstanding)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(data.size for data in self._base.values())

    def encode(
        self,
        tensors: Mapping[str, Tensor],
        directory: Path,
        files: Files,
        *,
        number: int,
        base_number: int,
        progress: Callable[[SparseStats], None] | None = None,
    ) -> EncodedDelta:
        """Write what turns the base into ``tensors`` as a delta directory, and move the base there.

        Raises DeltaError, naming the tensor, when the layout differs from the base's; after any error the
        base is as it was. ``number`` and ``base_number`` are only what the index says. Sparse encoding calls
        ``progress`` as it goes.
        """
        if self.encoding == "sparse":
            sources = self._sources(tensors)
            prepare_directory(directory, files)

            def finish(names: Sequence[str]) -> None:
                write_sparse_index(directory, files, names, number=number, base_number=base_number)

            encoded = self._write_sparse(sources, directory, files, "model", finish, progress)
            return replace(encoded, files=(*encoded.files, INDEX_NAME))
        return self.write(
            tensors,
            lambda payloads: write_delta(directory, files, payloads, number=number, base_number=base_number),
        )

    def write(self, tensors: Mapping[str, Tensor], writer: Writer) -> EncodedDelta:
        """As ``encode`` in the encoding "xor", through ``writer``: if it raises, the base is as it was.

        DeltaError when the layout differs from the base's.
        """
        table = self._new_table(tensors)
        frames: dict[str, bytes] = {}
        changed: dict[str, tuple[str, str]] = {}
        changed_elements = changed_bytes = 0
        for name, info in table.items():
            if info.digest == self.table[name].digest:
                continue
            diff = np.bitwise_xor(self._base[name], as_bytes(tensors[name].data))
            frames[name] = wire.compress(diff.data)
            changed[name] = self.table[name].digest, info.digest
            changed_elements += _count_changed(diff, info.dtype)
            changed_bytes += int(np.count_nonzero(diff))
        names = writer({name: (frame, changed[name][1]) for name, frame in frames.items()})
        encoded = EncodedDelta(
            self.state, state_digest(table), "xor", changed, tuple(names),
            changed_elements, self._element_count,
            changed_bytes, self.bytes, sum(len(frame) for frame in frames.values()),
        )  # fmt: skip
        new = {name: as_bytes(tensors[name].data) for name in frames}
        self._move(new, table, encoded.state, _Undo(self.table, self.state, frames))
        return encoded

    def write_sparse(
        self, tensors: Mapping[str, Tensor], directory: Path, files: Files, *, stem: str
    ) -> EncodedDelta:
        """Write one writer's ``<stem>-NNNNN.sparse`` into a directory that is there, and move the base.

        In bounded memory; see ``encode_sparse``. Buffers are read by several threads until this returns.
        """
        return self._write_sparse(self._sources(tensors), directory, files, stem, lambda _: None, None)

    def _write_sparse(
        self,
        sources: Sequence[Source],
        directory: Path,
        files: Files,
        stem: str,
        finish: Callable[[Sequence[str]], None],
        progress: Callable[[SparseStats], None] | None,
    ) -> EncodedDelta:
        """``finish`` gets the names of the files; what it raises leaves the base as it was."""
        kept = directory.with_name(f".{directory.name}.{stem}{_KEPT}")
        if not self._outstanding:
            _remove_kept(directory.parent, f".{stem}{_KEPT}", files)
        paths, changed, stats = encode_sparse(
            sources, lambda i: directory / f"{stem}-{i:05d}{SPARSE_SUFFIX}", files, workers=self._workers,
            progress=progress,
        )  # fmt: skip
        try:
            names = [path.name for path in paths]
            finish(names)
            files.make_dirs(kept)
            _keep(paths, kept, files)
        except BaseException:
            files.remove_tree(kept)
            raise
        table = dict(self.table)
        for name, row in changed.items():
            table[name] = TensorInfo(table[name].dtype, table[name].shape, row.new)
        encoded = EncodedDelta(
            self.state, state_digest(table) if changed else self.state, "sparse",
            {name: (row.old, row.new) for name, row in changed.items()}, tuple(names),
            stats.changed_elements, self._element_count, stats.changed_bytes, self.bytes, stats.encoded_bytes,
        )  # fmt: skip
        new = {source.name: source.new for source in sources if source.name in changed}
        self._move(new, table, encoded.state, _Undo(self.table, self.state, {}, kept, files))
        return encoded

    def _sources(self, tensors: Mapping[str, Tensor]) -> list[Source]:
        sources = []
        for name, info in self.table.items():
            tensor = tensors.get(name)
            if tensor is None or tensor.dtype != info.dtype or tuple(tensor.shape) != info.shape:
                break
            old, new = self._base[name], as_bytes(tensor.data)
            if new.size != old.size:
                _check_size(name, tensor, new)
            packed = ITEM_BITS[info.dtype] == 4
            sources.append(Source(name, old, new, width_of(info.dtype), info.digest, packed))
        if len(sources) != len(self.table) or len(tensors) != len(sources):
            layout = {name: TensorInfo(t.dtype, tuple(t.shape), "") for name, t in tensors.items()}
            difference = layout_difference(self.table, layout)
            raise DeltaError(f"a delta needs the layout of its base: {difference}")
        return sources

    def _move(
        self, new: Mapping[str, ByteArray], table: dict[str, TensorInfo], state: str, undo: _Undo
    ) -> None:
        """Move the base to what was encoded."""
        self._outstanding.append(undo)
        for name, data in new.items():
            np.copyto(self._base[name], data)
        self.table, self.state = table, state

    def commit(self) -> None:
        """The oldest outstanding encode was published: it will not be undone."""
        if not self._outstanding:
            raise DeltaError("nothing to commit: no encode is outstanding")
        self._outstanding.popleft().forget()

    def undo(self) -> None:
        """Take the base back over every outstanding encode, to the state committed last."""
        while self._outstanding:
            step = self._outstanding.pop()
            step.take(self._base)
            self.table, self.state = step.table, step.state

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The base, tensor by tensor; views that the next encode or undo changes."""
        for name, info in self.table.items():
            yield name, Tensor(info.dtype, info.shape, self._base[name].data)

    @property
    def _element_count(self) -> int:
        return sum(data.size * 8 // ITEM_BITS[self.table[name].dtype] for name, data in self._base.items())

    def _read(self, checkpoint: Checkpoint, name: str) -> None:
        ref = checkpoint.tensors[name]
        self._add(name, Tensor(ref.dtype, ref.shape, b""), as_bytes(bytearray(checkpoint.read(name))))

    def _add(self, name: str, tensor: Tensor, data: ByteArray) -> None:
        _check_size(name, tensor, data)
        self._base[name] = data
        self.table[name] = TensorInfo(tensor.dtype, tuple(tensor.shape), tensor_digest(data.data))

    def _new_table(self, tensors: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
        layout = {name: TensorInfo(t.dtype, tuple(t.shape), "") for name, t in tensors.items()}
        difference = layout_difference(self.table, layout)
        if difference is not None:
            raise DeltaError(f"a delta needs the layout of its base: {difference}")
        table = {}
        for name, info in self.table.items():
            data = as_bytes(tensors[name].data)
            _check_size(name, tensors[name], data)
            table[name] = TensorInfo(info.dtype, info.shape, tensor_digest(data.data))
        return table


def check_base(name: str, found: TensorInfo, proven: TensorTable, file: Path) -> None:
    """DeltaError if a tensor of a base is not as it was proven: no reader could apply a delta from it."""
    expected = proven.get(name)
    if found != expected:
        was = "not there" if expected is None else expected.digest
        raise DeltaError(
            f"{file}: tensor {name} is {found.digest}, in the checkpoint that was proven it is {was}: the "
            "file has changed, or another host has another one; put the right one back"
        )


def _keep(paths: Sequence[Path], kept: Path, files: Files) -> None:
    """Give files another name that lasts as long as it is needed; a copy where there are no hard links."""
    for path in paths:
        try:
            files.link(path, kept / path.name)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            copy_files(files, path.parent, kept, [path.name])


def _remove_kept(parent: Path, ending: str, files: Files) -> None:
    """Remove what an encoder of this name that died kept for its undo."""
    for name in files.list(parent) if files.exists(parent) else []:
        if name.startswith(".") and name.endswith(ending):
            files.remove_tree(parent / name)


def _check_size(name: str, tensor: Tensor, data: ByteArray) -> None:
    try:
        expected = tensor_nbytes(tensor.dtype, tuple(tensor.shape))
    except ValueError as error:
        raise DeltaError(f"tensor {name}: {error}") from None
    if data.size != expected:
        raise DeltaError(
            f"tensor {name} has {data.size} bytes, {tensor.dtype} {list(tensor.shape)} takes {expected}"
        )


def _count_changed(diff: ByteArray, dtype: str) -> int:
    bits = ITEM_BITS[dtype]
    if bits >= 8:
        return int(np.count_nonzero(diff.view(f"<u{bits // 8}")))
    return int(np.unpackbits(diff, bitorder="little").reshape(-1, bits).any(axis=1).sum())
