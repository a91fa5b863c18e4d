"""Merging XOR deltas into one without the weights they apply to: what they do one after the other is the XOR
of what each does, in whatever order and direction they are taken.

Memory is bounded by one shard of the result and, of the tensor at hand, its frames and a chunk of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard

from ..checkpoint import Checkpoint
from ..dialects import INDEX_NAME, SPARSE_SUFFIX
from ..lineage import Source, Undo
from ..ports import Files
from ..safetensors import as_bytes
from ..state import TensorTable
from .directory import (
    STREAM_SHARD_BYTES,
    DeltaDirectory,
    prepare_directory,
    write_index,
    write_sparse_index,
    write_stream,
)
from .fold import RepresentationInvalid, open_delta
from .one_pass import apply_in_place
from .sparse_file import SparseFile
from .sparse_merge import merge_sparse
from .wire import CHUNK_BYTES, LEVEL, DeltaError, FrameReader, content_size

Changed = dict[str, tuple[str, str]]


@dataclass(frozen=True)
class MergedDelta:
    """A delta directory that was written: old and new digest of each tensor in it, and its files' names."""

    changed: Changed
    files: tuple[str, ...]


def compose(deltas: Sequence[Source]) -> Changed:
    """Old and new digest of each tensor that differs after ``deltas``, as they say themselves.

    Raises RepresentationInvalid for one that does not start from what those before it lead to.
    """
    now: Changed = {}
    state: str | None = None
    for delta in deltas:
        if state not in (None, delta.representation.base):
            raise RepresentationInvalid(
                delta.digest(), f"{delta.version}: starts from {delta.representation.base}, not from {state}"
            )
        state = delta.state
        for name, (old, new) in delta.representation.changed.items():
            first, before = now.get(name, (old, old))
            if old != before:
                raise RepresentationInvalid(
                    delta.digest(), f"{delta.version}: tensor {name} must be {old} before it, but is {before}"
                )
            now[name] = first, new
    return {name: pair for name, pair in now.items() if pair[0] != pair[1]}


def merge_deltas(
    deltas: Sequence[Source],
    directory_of: Callable[[Source], Path],
    path: Path,
    files: Files,
    *,
    number: int,
    base_number: int,
    shard_bytes: int = STREAM_SHARD_BYTES,
) -> MergedDelta:
    """Write into ``path`` the one XOR delta that does what ``deltas`` do in order; nothing may be there yet.

    Tensors that end as they began are not in it. Of sparse deltas it makes a sparse one; then ``changed`` is
    what its files say. Raises RepresentationInvalid for a delta that is not what its manifest says, or does
    not follow on the one before it, DeltaError for one that is no XOR, or for two encodings.
    """
    if deltas and all(delta.representation.encoding == "sparse" for delta in deltas):
        return _merge_sparse_deltas(deltas, directory_of, path, files, number=number, base_number=base_number)
    for delta in deltas:
        if delta.representation.encoding != "xor":
            raise DeltaError(
                f"{delta.version}: {delta.representation.encoding} is not XOR, so it cannot merge"
            )
    changed = compose(deltas)
    sources = [(delta, open_delta(delta, directory_of(delta), files)) for delta in deltas]
    files.make_dirs(path)
    frames = (
        (name, _merged_frame(name, [source for source in sources if name in source[1].payloads]), new)
        for name, (_, new) in sorted(changed.items())
    )
    weight_map = write_stream(path, files, frames, shard_bytes=shard_bytes)
    write_index(path, files, weight_map, number=number, base_number=base_number)
    return MergedDelta(changed, (*sorted(set(weight_map.values())), INDEX_NAME))


def _merge_sparse_deltas(
    deltas: Sequence[Source],
    directory_of: Callable[[Source], Path],
    path: Path,
    files: Files,
    *,
    number: int,
    base_number: int,
) -> MergedDelta:
    given: list[list[SparseFile]] = []
    for delta in deltas:
        opened = set(open_delta(delta, directory_of(delta), files).sparse.values())
        paths = sorted(file.path for file in opened)
        given.append([SparseFile(p, files, backwards=isinstance(delta, Undo)) for p in paths])
    prepare_directory(path, files)
    written, changed = merge_sparse(given, lambda i: path / f"model-{i:05d}{SPARSE_SUFFIX}", files)
    names = [p.name for p in written]
    write_sparse_index(path, files, names, number=number, base_number=base_number)
    return MergedDelta({name: (row.old, row.new) for name, row in changed.items()}, (*names, INDEX_NAME))


def prove_merged(
    merged: DeltaDirectory, changed: Mapping[str, tuple[str, str]], checkpoint: Checkpoint, table: TensorTable
) -> None:
    """Apply a merged delta to the weights on either side of it, tensor by tensor, writing nothing.

    ``table`` is the checkpoint's. Raises DeltaError for a tensor that does not become what ``changed`` says.
    """
    for name, (old, new) in changed.items():
        digest = table[name].digest
        if digest not in (old, new):
            raise DeltaError(f"{checkpoint.directory}: tensor {name} is {digest}, neither {old} nor {new}")
        wanted = new if digest == old else old
        found = apply_in_place(as_bytes(bytearray(checkpoint.read(name))), name, [merged])
        if found != wanted:
            raise DeltaError(f"{merged.path}: tensor {name} becomes {found} where it must become {wanted}")


def _merged_frame(name: str, sources: Sequence[tuple[Source, DeltaDirectory]]) -> bytes:
    frames = [directory.read(name) for _, directory in sources]
    try:
        return frames[0] if len(frames) == 1 else merge_frames(frames)
    except DeltaError as error:
        versions = ", ".join(str(delta.version) for delta, _ in sources)
        raise DeltaError(f"tensor {name} of {versions}: {error}") from error


def merge_frames(frames: Sequence[bytes]) -> bytes:
    """One frame for the XOR of what ``frames`` hold; DeltaError if they are not of one length."""
    # A decompressor reads one frame at a time, and these take turns.
    readers = [FrameReader(frame, zstandard.ZstdDecompressor()) for frame in frames]
    size = max(zstandard.frame_content_size(frame) for frame in frames)
    if size < 0:  # writers in the field that do not say it
        size = content_size(frames[0])
    compressor = zstandard.ZstdCompressor(level=LEVEL).compressobj(size=size)
    out: list[bytes] = []
    total, chunk = np.empty(CHUNK_BYTES, np.uint8), np.empty(CHUNK_BYTES, np.uint8)
    for at in range(0, size, CHUNK_BYTES):
        length = min(CHUNK_BYTES, size - at)
        readers[0].read_into(total[:length])
        for reader in readers[1:]:
            reader.read_into(chunk[:length])
            np.bitwise_xor(total[:length], chunk[:length], out=total[:length])
        out.append(compressor.compress(total[:length].data))
    for reader in readers:
        reader.finish()
    return b"".join([*out, compressor.flush()])
