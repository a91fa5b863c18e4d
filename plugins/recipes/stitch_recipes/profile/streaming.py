"""A delta from a checkpoint on disk to its changed successor, which is never there as a whole.

Memory is that of a few groups of tensors for each thread, or of the largest ones, whatever the model's size.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from stitch_core.checkpoint import Checkpoint
from stitch_core.delta.directory import prepare_directory, write_index, write_shards, write_sparse_index
from stitch_core.delta.encoder import DeltaEncoder, EncodedDelta
from stitch_core.dialects import INDEX_NAME
from stitch_core.files import PosixFiles
from stitch_core.parallel import default_workers, in_order
from stitch_core.payload import Payload
from stitch_core.safetensors import Tensor
from stitch_core.state import TensorInfo, state_digest

from ..layout import spec
from .changes import Change

GROUP_BYTES = 256 << 20


@dataclass(frozen=True)
class Streamed:
    """A delta directory and what it stands for. ``encode``: seconds in encoders, of all threads together."""

    payload: Payload
    tensors: int
    bytes: int
    changed_elements: int
    elements: int
    delta_bytes: int
    encode: float

    @property
    def changed_fraction(self) -> float:
        return self.changed_elements / max(1, self.elements)

    @property
    def ratio(self) -> float:
        """Bytes of the delta over those of the checkpoint."""
        return self.delta_bytes / self.bytes


def stream_delta(
    base: Path,
    change: Change,
    directory: Path,
    *,
    encoding: str,
    base_number: int,
    group_bytes: int = GROUP_BYTES,
    workers: int | None = None,
) -> Streamed:
    """Write the delta from the checkpoint in ``base`` to what ``change`` makes of it into ``directory``.

    Version ``base_number`` + 1, in ``encoding`` "xor" or "sparse"; each of ``workers`` threads (by default
    one for each CPU, at most 8) has a group of tensors in hand. Raises CheckpointError, DeltaError, OSError.
    """
    files = PosixFiles()
    checkpoint = Checkpoint.open(base, files)
    prepare_directory(directory, files)
    calls = (
        partial(_encoded, checkpoint, names, change, directory, encoding, f"model-{index:05d}")
        for index, names in enumerate(_groups(checkpoint, group_bytes))
    )
    whole = _Group()
    for group in in_order(calls, workers or default_workers()):
        whole.add(group)
    names = [name for one in whole.done for name in one.files]
    number = base_number + 1
    if encoding == "sparse":
        write_sparse_index(directory, files, names, number=number, base_number=base_number)
    else:
        write_index(
            directory, files, whole.weight_map, number=number, base_number=base_number, encoding=encoding
        )
    return _streamed(whole, directory, (*names, INDEX_NAME), encoding)


@dataclass
class _Group:
    """Tensors that were encoded, and the files that hold what changed of them."""

    before: dict[str, TensorInfo] = field(default_factory=dict)
    after: dict[str, TensorInfo] = field(default_factory=dict)
    weight_map: dict[str, str] = field(default_factory=dict)
    done: list[EncodedDelta] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, other: _Group) -> None:
        self.before |= other.before
        self.after |= other.after
        self.weight_map |= other.weight_map
        self.done += other.done
        self.seconds += other.seconds


def _encoded(
    checkpoint: Checkpoint, names: list[str], change: Change, directory: Path, encoding: str, stem: str
) -> _Group:
    """One group, into files of its own whose names begin with ``stem``."""
    old, new = {}, {}
    for name in names:
        ref, data = checkpoint.tensors[name], checkpoint.read(name)
        after = change(spec.Tensor(name, ref.dtype, ref.shape), np.frombuffer(data, np.uint8))
        old[name], new[name] = (Tensor(ref.dtype, ref.shape, part) for part in (data, after.data))
    encoder, group = DeltaEncoder(old, encoding), _Group()
    group.before = encoder.table
    began = time.perf_counter()
    if encoding == "sparse":
        group.done = [encoder.write_sparse(new, directory, checkpoint.files, stem=stem)]
    else:

        def write(payloads: Mapping[str, tuple[bytes, str]]) -> list[str]:
            if payloads:
                group.weight_map = write_shards(directory, checkpoint.files, payloads, stem=stem)
            return sorted(set(group.weight_map.values()))

        group.done = [encoder.write(new, write)]
    group.seconds = time.perf_counter() - began
    encoder.commit()
    group.after = encoder.table
    return group


def _streamed(whole: _Group, directory: Path, names: tuple[str, ...], encoding: str) -> Streamed:
    changed = {name: pair for one in whole.done for name, pair in one.changed.items()}
    payload = Payload(
        "delta", state_digest(whole.after), directory, names, state_digest(whole.before), encoding, changed
    )
    return Streamed(
        payload,
        tensors=len(whole.before),
        bytes=sum(one.bytes for one in whole.done),
        changed_elements=sum(one.changed_elements for one in whole.done),
        elements=sum(one.elements for one in whole.done),
        delta_bytes=sum((directory / name).stat().st_size for name in names),
        encode=whole.seconds,
    )


def _groups(checkpoint: Checkpoint, bound: int) -> Iterator[list[str]]:
    """Names in the order of the files, of at most ``bound`` bytes together unless one alone has more."""
    refs = checkpoint.tensors
    group: list[str] = []
    size = 0
    for name in sorted(refs, key=lambda name: (refs[name].file, refs[name].offset)):
        if group and size + refs[name].nbytes > bound:
            yield group
            group, size = [], 0
        group.append(name)
        size += refs[name].nbytes
    if group:
        yield group
