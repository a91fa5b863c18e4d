"""Turns a delta of one XOR encoding into the other, without the weights that it applies to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import zstandard

from ..dialects import INDEX_NAME, SPARSE_SUFFIX
from ..lineage import Source, Undo
from ..manifest import PayloadFile, Representation
from ..ports import Files
from ..safetensors import ByteArray
from ..versions import PolicyVersion
from .directory import (
    STREAM_SHARD_BYTES,
    DeltaDirectory,
    prepare_directory,
    write_index,
    write_sparse_index,
    write_stream,
)
from .fold import open_delta
from .scan import scan
from .sparse_block import encode_block
from .sparse_encode import BLOCK_BYTES, FILE_BYTES
from .sparse_file import SparseFile
from .sparse_layout import Block, Changed, order
from .sparse_merge import cut_blocks, split_files
from .sparse_writer import SparseWriter
from .wire import LEVEL, DeltaError, FrameReader, content_size


@dataclass(frozen=True)
class Transcoded:
    """A delta whose files lie here in the other encoding; all else of it is as it was.

    Its files never leave this host, so the representation has no digests of them.
    """

    source: Source
    representation: Representation

    @property
    def version(self) -> PolicyVersion:
        return self.source.version

    @property
    def state(self) -> str:
        return self.source.state

    def digest(self) -> str:
        return self.source.digest()

    def file_key(self, name: str) -> str:
        return self.source.file_key(name)


def in_encoding(
    encoding: str,
    deltas: Sequence[Source],
    directories: Mapping[str, Path],
    files: Files,
    widths: Mapping[str, int],
) -> tuple[list[Source], dict[str, Path]]:
    """``deltas`` in one ``encoding``, "xor" or "sparse", and where each lies; ``directories``: where it did.

    Both by the digest of the source. What has to be written lies below the delta's own directory. XOR needs
    no ``widths``; for sparse see ``xor_to_sparse``. Raises RepresentationInvalid, DeltaError.
    """
    done, where = [], dict(directories)
    for delta in deltas:
        if delta.representation.encoding == encoding:
            done.append(delta)
            continue
        source = delta.source if isinstance(delta, Undo) else delta
        path = directories[source.digest()] / encoding
        other = _transcoded(source, directories[source.digest()], path, files, encoding, widths)
        done.append(Undo(other) if isinstance(delta, Undo) else other)
        where[source.digest()] = path
    return done, where


def _transcoded(
    source: Source, directory: Path, path: Path, files: Files, encoding: str, widths: Mapping[str, int]
) -> Transcoded:
    files.remove_tree(path)
    delta, number, how = open_delta(source, directory, files), source.version.number, source.representation
    changed: Mapping[str, tuple[str, str]] = {}
    if encoding == "xor":
        names, changed = sparse_to_xor(delta, path, files, number=number, base_number=number), delta.changed
    else:
        names = xor_to_sparse(delta, how.changed, widths, path, files, number=number, base_number=number)
    listed = tuple(PayloadFile(name, files.size(path / name), "") for name in names)
    return Transcoded(source, replace(how, encoding=encoding, changed=changed, files=listed))


def xor_to_sparse(
    delta: DeltaDirectory,
    changed: Mapping[str, tuple[str, str]],
    widths: Mapping[str, int],
    path: Path,
    files: Files,
    *,
    number: int,
    base_number: int,
    file_bytes: int = FILE_BYTES,
) -> tuple[str, ...]:
    """Write what ``delta`` does into ``path`` as sparse files; their names, the index last.

    ``changed`` are the old and new xxh3-128 of its tensors, ``widths`` those of their elements (``width_of``
    a dtype; 1 fits all and is larger). Raises DeltaError for a damaged frame, or a delta that is not XOR.
    """
    _check(delta, "xor")
    rows = {}
    for name in delta.payloads:
        size, width = content_size(delta.read(name)), widths.get(name, 1)
        if size % width:
            raise DeltaError(f"{delta.path}: tensor {name} of {size} bytes has no elements of {width} bytes")
        rows[name] = Changed(size, width, *changed[name])
    rows = {n: r for n, r in rows.items() if r.old != r.new}
    rows = dict(sorted(rows.items(), key=lambda item: order(item[0], item[1].nbytes, item[1].width)))
    prepare_directory(path, files)
    names: list[str] = []
    stored = sum(delta.payloads[name].frame.nbytes for name in rows)
    for part in split_files(rows, stored, file_bytes):
        names.append(f"model-{len(names):05d}{SPARSE_SUFFIX}")
        writer = SparseWriter(path / names[-1], files)
        stream = _Stream(delta, part)
        zeros = np.zeros(BLOCK_BYTES, np.uint8)
        for start, end, width in cut_blocks(part):
            positions, values = scan(zeros[: end - start], stream.take(end - start), width)
            writer.add_block(Block(encode_block(positions, values), end - start, width, positions.size))
        writer.finish(part)
    write_sparse_index(path, files, names, number=number, base_number=base_number)
    return (*names, INDEX_NAME)


def sparse_to_xor(
    delta: DeltaDirectory,
    path: Path,
    files: Files,
    *,
    number: int,
    base_number: int,
    shard_bytes: int = STREAM_SHARD_BYTES,
) -> tuple[str, ...]:
    """Write what ``delta`` does into ``path`` as stock slime and Miles read it; the names, the index last."""
    _check(delta, "sparse")
    prepare_directory(path, files)
    frames = (
        (name, _frame(file, name), file.tensors[name].new) for name, file in sorted(delta.sparse.items())
    )
    weight_map = write_stream(path, files, frames, shard_bytes=shard_bytes)
    write_index(path, files, weight_map, number=number, base_number=base_number)
    return (*sorted(set(weight_map.values())), INDEX_NAME)


class _Stream:
    """The XOR bytes of tensors end to end; each frame must hold as many as its tensor has."""

    def __init__(self, delta: DeltaDirectory, rows: Mapping[str, Changed]) -> None:
        self._delta, self._rows = delta, iter(rows.items())
        self._reader: FrameReader | None = None
        self._left = 0
        self._buffer = np.empty(BLOCK_BYTES, np.uint8)

    def take(self, size: int) -> ByteArray:
        """The next ``size`` bytes, valid until the next call."""
        done = 0
        while done < size:
            if self._reader is None:
                name, row = next(self._rows)
                self._reader, self._left = FrameReader(self._delta.read(name)), row.nbytes
            count = min(self._left, size - done)
            self._reader.read_into(self._buffer[done : done + count])
            done, self._left = done + count, self._left - count
            if self._left == 0:
                self._reader.finish()
                self._reader = None
        return self._buffer[:size]


def _frame(file: SparseFile, name: str) -> bytes:
    """One tensor's changes as one zstd frame of old XOR new."""
    row = file.tensors[name]
    compressor = zstandard.ZstdCompressor(level=LEVEL).compressobj(size=row.nbytes)
    out = []
    for piece in file.pieces(name):
        data = np.zeros(piece.end - piece.start, np.uint8)
        data.view(f"<u{row.width}")[piece.positions - piece.start // row.width] = piece.values
        out.append(compressor.compress(data.data))
    return b"".join([*out, compressor.flush()])


def _check(delta: DeltaDirectory, encoding: str) -> None:
    if delta.index.encoding != encoding:
        raise DeltaError(f"{delta.path}: its encoding is {delta.index.encoding}, not {encoding}")
