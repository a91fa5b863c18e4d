"""A delta directory as stock slime and Miles write and read it.

``model-NNNNN-of-NNNNN.safetensors`` shards (numbered from 0) hold one U8 tensor for each changed tensor,
its zstd frame, and in ``__metadata__`` the checksum of its new bytes. ``model.safetensors.index.json`` is
written last. No change at all is an index with an empty ``weight_map`` and no shards. With the encoding
``sparse`` there are ``*.sparse`` files instead, which the index lists without their tensors.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..checkpoint import list_directory
from ..dialects import CHECKSUM_HEX, INDEX_NAME, SPARSE_SUFFIX, Index, read_index
from ..ports import Files, write_atomic
from ..safetensors import Header, Tensor, TensorRef, read_header, write_file
from .sparse_file import SparseFile
from .wire import READ_BYTES, DeltaError, FrameFile

ENCODINGS = ("xor", "overwrite", "sparse")
SHARD_BYTES = 1 << 30
STREAM_SHARD_BYTES = 256 << 20
"""Of shards that are written while later ones are made: about so much is in memory."""


@dataclass(frozen=True)
class Payload:
    """One tensor's delta: where its frame lies, and what the shard says of the new bytes (hex, or None).

    For ``sparse`` the frame is the whole file that the tensor is in.
    """

    frame: TensorRef
    checksum: str | None


@dataclass(frozen=True)
class DeltaDirectory:
    """What the shards hold; the index says how it is encoded and never whether there is a payload.

    ``sparse`` maps the tensors of sparse files to their file. ``names`` are the delta's files, the index
    last: what else lies in the directory is no part of it.
    """

    path: Path
    files: Files = field(repr=False)
    index: Index = field(repr=False)
    payloads: Mapping[str, Payload] = field(repr=False)
    sparse: Mapping[str, SparseFile] = field(repr=False, default_factory=dict)
    names: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: Path, files: Files, named: Collection[str] | None = None) -> DeltaDirectory:
        """Read the index and every shard's header.

        ``named`` are the files that a manifest, or receipts, say the delta has: nothing else is looked at,
        and each of them counts, whatever the index says. Without them the index is the record: weights in a
        file that it does not name are refused, unless they are copies of what the delta has.
        Raises CheckpointError for a file that is wrong in itself, DeltaError for files that disagree.
        """
        names = list_directory(path, files)
        if named is not None:
            names = [name for name in names if name in named]
        if INDEX_NAME not in names:
            raise DeltaError(f"{path}: no {INDEX_NAME}, so not a delta")
        index = read_index(files.read(path / INDEX_NAME), str(path / INDEX_NAME))
        if index.kind != "delta":
            raise DeltaError(f"{path}: a full checkpoint, not a delta")
        if index.encoding not in ENCODINGS or index.compression != "zstd":
            raise DeltaError(
                f"{path}: encoding {index.encoding!r} with compression {index.compression!r} is not known: "
                f"known are {', '.join(ENCODINGS)} with zstd"
            )
        if index.encoding == "sparse":
            own = set(index.sparse_files)
        else:
            own = set(index.weight_map.values()) if named is None else {n for n in names if is_shard(n)}
        strays = [name for name in names if is_weights(name) and name not in own]
        for name in sorted(own - set(names)):
            raise DeltaError(f"{path / name}: named by the index, but not there")
        if index.encoding == "sparse":
            delta = cls._open_sparse(path, files, index, sorted(own))
        else:
            delta = cls._open_frames(path, files, index, sorted(own))
        delta._check_strays(strays)
        return delta

    @classmethod
    def _open_frames(cls, path: Path, files: Files, index: Index, shards: list[str]) -> DeltaDirectory:
        payloads: dict[str, Payload] = {}
        homes: dict[str, set[str]] = {}
        for shard in shards:
            for name, payload in _payloads(path / shard, files, index).items():
                _check_copy(files, path / shard, name, payloads.setdefault(name, payload), payload)
                homes.setdefault(name, set()).add(shard)
        for name, shard in index.weight_map.items():
            if shard not in homes.get(name, ()):
                raise DeltaError(f"{path / shard}: tensor {name} is missing, the index names it there")
        return cls(path, files, index, payloads, names=(*shards, INDEX_NAME))

    @classmethod
    def _open_sparse(cls, path: Path, files: Files, index: Index, shards: list[str]) -> DeltaDirectory:
        payloads: dict[str, Payload] = {}
        sparse: dict[str, SparseFile] = {}
        for shard in shards:
            file = SparseFile(path / shard, files)
            where = TensorRef("U8", (files.size(path / shard),), path / shard, 0, files.size(path / shard))
            for name, row in file.tensors.items():
                if name in sparse:
                    raise DeltaError(f"{path / shard}: tensor {name} is also in {sparse[name].path.name}")
                sparse[name], payloads[name] = file, Payload(where, row.new)
        return cls(path, files, index, payloads, sparse, (*shards, INDEX_NAME))

    def _check_strays(self, strays: Sequence[str]) -> None:
        """Files that the index does not name: where they have more than copies of the payload, DeltaError.

        A pipeline's stage that changed nothing but tensors which it shares writes such copies.
        """
        unknown, copies = [], {}
        for stray in strays:
            alike = is_shard(stray) and self.index.encoding != "sparse"
            copies[stray] = _payloads(self.path / stray, self.files, self.index) if alike else {}
            if not alike or not copies[stray].keys() <= self.payloads.keys():
                unknown.append(stray)
        if unknown:
            raise DeltaError(stray_problem(self.path, unknown))
        for stray, payloads in copies.items():
            for name, payload in payloads.items():
                _check_copy(self.files, self.path / stray, name, self.payloads[name], payload)

    @property
    def changed(self) -> dict[str, tuple[str, str]]:
        """Old and new xxh3-128 of the tensors in sparse files; other encodings do not know the old."""
        rows = ((name, file.tensors[name]) for name, file in self.sparse.items())
        return {name: (row.old, row.new) for name, row in rows}

    def read(self, name: str) -> bytes:
        """A tensor's zstd frame; not for sparse files, which have none."""
        return _read(self.files, self.payloads[name])

    def frame(self, name: str) -> bytes | FrameFile:
        """As ``read``, but a large frame is read as it is needed."""
        frame = self.payloads[name].frame
        if frame.nbytes <= READ_BYTES:
            return self.read(name)

        def read(offset: int, count: int) -> bytes:
            return self.files.read(frame.file, frame.offset + offset, count)

        return FrameFile(read, frame.nbytes)


def is_shard(name: str) -> bool:
    """Whether a file of that name holds tensors; hidden ones are another writer's, half done."""
    return name.endswith(".safetensors") and not name.startswith(".")


def is_weights(name: str) -> bool:
    """Whether a file of that name is a shard, or a sparse file."""
    return is_shard(name) or (name.endswith(SPARSE_SUFFIX) and not name.startswith("."))


def stray_problem(where: Path | str, names: Sequence[str]) -> str:
    """What is wrong where files with weights lie beside a delta that they are no part of."""
    verb = "are" if len(names) > 1 else "is"
    return (
        f"{where}: {', '.join(names)} {verb} not named by {INDEX_NAME}: another attempt, or another writer, "
        "has left such files; remove them if they are no part of this version"
    )


def write_delta(
    path: Path,
    files: Files,
    payloads: Mapping[str, tuple[bytes, str]],
    *,
    number: int,
    base_number: int,
    encoding: str = "xor",
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Write a delta directory, durable; returns the files' names, the index last.

    ``payloads`` maps each changed tensor to its frame and the xxh3-128 of its new bytes. What a writer
    that died left without an index is removed; a directory with an index is never written again.
    """
    prepare_directory(path, files)
    weight_map = write_shards(path, files, payloads, shard_bytes=shard_bytes)
    write_index(path, files, weight_map, number=number, base_number=base_number, encoding=encoding)
    return [*sorted(set(weight_map.values())), INDEX_NAME]


def prepare_directory(path: Path, files: Files) -> None:
    """Make ``path``, and remove what a writer that died left there. DeltaError if there is a whole delta."""
    files.make_dirs(path)
    for name in files.list(path):
        if name == INDEX_NAME:
            raise DeltaError(f"{path}: there is a delta already")
        if name.endswith((".safetensors", SPARSE_SUFFIX, ".tmp")):
            files.remove(path / name)


def write_shards(
    path: Path,
    files: Files,
    payloads: Mapping[str, tuple[bytes, str]],
    *,
    stem: str = "model",
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, str]:
    """Write one writer's shards into a directory that is there; the file of each tensor.

    Writers that share a directory need ``stem``s of their own.
    """
    shards = list(_shards(payloads, shard_bytes))
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors"
        frames = {name: Tensor("U8", (len(payloads[name][0]),), payloads[name][0]) for name in shard}
        write_file(path / file, files, frames, {name: payloads[name][1] for name in shard})
        weight_map |= dict.fromkeys(shard, file)
    files.sync(path)
    return weight_map


def write_stream(
    path: Path, files: Files, payloads: Iterable[tuple[str, bytes, str]], *, shard_bytes: int
) -> dict[str, str]:
    """As ``write_shards``, of payloads (name, frame, checksum) that come one by one: a shard is in memory.

    The number of shards is not known before the last is made, so each is named as one of one.
    """
    weight_map: dict[str, str] = {}
    shard: dict[str, tuple[bytes, str]] = {}
    count = size = 0

    def end_shard() -> None:
        nonlocal count, size
        stem = f"model-{count:05d}"
        weight_map.update(write_shards(path, files, shard, stem=stem, shard_bytes=1 << 62))
        count, size = count + 1, 0
        shard.clear()

    for name, frame, checksum in payloads:
        shard[name] = frame, checksum
        size += len(frame)
        if size >= shard_bytes:
            end_shard()
    if shard:
        end_shard()
    return weight_map


def write_index(
    path: Path,
    files: Files,
    weight_map: Mapping[str, str],
    *,
    number: int,
    base_number: int,
    encoding: str = "xor",
) -> None:
    """Write the index of shards of frames, durable; every shard is there already."""
    _write_index(path, files, weight_map, number, base_number, encoding, {})


def write_sparse_index(
    path: Path, files: Files, names: Sequence[str], *, number: int, base_number: int
) -> None:
    """Write the index of sparse files, durable; their bytes are already, their names may not be."""
    files.sync(path)
    _write_index(path, files, {}, number, base_number, "sparse", {"sparse_files": sorted(names)})


def _write_index(
    path: Path,
    files: Files,
    weight_map: Mapping[str, str],
    number: int,
    base_number: int,
    encoding: str,
    more: Mapping[str, list[str]],
) -> None:
    metadata: dict[str, str | list[str]] = {
        "version": f"{number:06d}",
        "base_version": f"{base_number:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
        **more,
    }
    index = json.dumps({"metadata": metadata, "weight_map": dict(weight_map)})
    write_atomic(files, path / INDEX_NAME, index.encode())
    files.sync(path.parent)


def _shards(payloads: Mapping[str, tuple[bytes, str]], bound: int) -> Iterator[list[str]]:
    shard: list[str] = []
    size = 0
    for name in sorted(payloads):
        if shard and size + len(payloads[name][0]) > bound:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += len(payloads[name][0])
    if shard:
        yield shard


def _payloads(shard: Path, files: Files, index: Index) -> dict[str, Payload]:
    header = read_header(shard, files)
    return {name: _payload(shard, name, frame, header, index) for name, frame in header.tensors.items()}


def _check_copy(files: Files, shard: Path, name: str, first: Payload, other: Payload) -> None:
    """DeltaError unless two payloads of a tensor are one, or equal."""
    if other is not first and not _equal(files, first, other):
        raise DeltaError(f"{shard}: tensor {name} is also in {first.frame.file.name}, with another payload")


def _payload(shard: Path, name: str, frame: TensorRef, header: Header, index: Index) -> Payload:
    if frame.dtype != "U8" or len(frame.shape) != 1:
        raise DeltaError(
            f"{shard}: payload of tensor {name} is {frame.dtype} {list(frame.shape)}, not flat U8"
        )
    checksum = header.metadata.get(name)
    if index.checksum is not None:
        digits = CHECKSUM_HEX[index.checksum]
        if checksum is None:
            raise DeltaError(f"{shard}: tensor {name} has no {index.checksum} checksum")
        if len(checksum) != digits or not set(checksum) <= set("0123456789abcdef"):
            raise DeltaError(f"{shard}: tensor {name} has checksum {checksum!r}, not {digits} hex digits")
    return Payload(frame, checksum)


def _equal(files: Files, a: Payload, b: Payload) -> bool:
    return (
        a.checksum == b.checksum and a.frame.nbytes == b.frame.nbytes and _read(files, a) == _read(files, b)
    )


def _read(files: Files, payload: Payload) -> bytes:
    frame = payload.frame
    data = files.read(frame.file, frame.offset, frame.nbytes)
    if len(data) != frame.nbytes:
        raise DeltaError(f"{frame.file}: cut short, {len(data)} bytes of {frame.nbytes} at {frame.offset}")
    return data
