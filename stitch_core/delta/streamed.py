"""A delta from a checkpoint on disk to its successor, of which only a few groups of tensors are in memory."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..checkpoint import Checkpoint
from ..dialects import INDEX_NAME
from ..parallel import default_workers, in_order
from ..ports import Buffer
from ..safetensors import ByteArray, Tensor, TensorRef
from ..state import TensorInfo, TensorTable, state_digest
from .directory import prepare_directory, write_index, write_shards, write_sparse_index
from .encoder import DeltaEncoder, EncodedDelta

GROUP_BYTES = 64 << 20

New = Callable[[str, TensorRef, ByteArray], Buffer]
"""A tensor's new bytes, by its name, its dtype and shape, and its old bytes. Called by several threads."""


@dataclass(frozen=True)
class Streamed:
    """What was written. ``tensors`` of the checkpoint; ``seconds`` in encoders, of all threads together."""

    delta: EncodedDelta
    tensors: int
    seconds: float


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


def stream_delta(
    base: Checkpoint,
    new: New,
    directory: Path,
    *,
    encoding: str,
    number: int,
    base_number: int,
    proven: TensorTable | None = None,
    group_bytes: int = GROUP_BYTES,
    workers: int | None = None,
) -> Streamed:
    """Write the delta from ``base`` to what ``new`` makes of it into ``directory``, as DeltaEncoder does.

    ``proven`` is the table that ``base`` has to have; see ``DeltaEncoder.from_checkpoint``.
    Each of ``workers`` threads (by default one for each CPU, at most 8) has two groups of ``group_bytes`` in
    hand, or of one tensor that is larger. Raises CheckpointError, DeltaError, OSError, and what ``new`` does.
    """
    files = base.files
    prepare_directory(directory, files)
    calls = (
        functools.partial(_encoded, base, names, proven, new, directory, encoding, f"model-{index:05d}")
        for index, names in enumerate(_groups(base, group_bytes))
    )
    whole = _Group()
    for group in in_order(calls, workers or default_workers()):
        whole.add(group)
    names = [name for one in whole.done for name in one.files]
    if encoding == "sparse":
        write_sparse_index(directory, files, names, number=number, base_number=base_number)
    else:
        write_index(
            directory, files, whole.weight_map, number=number, base_number=base_number, encoding=encoding
        )
    return Streamed(_joined(whole, (*names, INDEX_NAME), encoding), len(whole.before), whole.seconds)


def _encoded(
    base: Checkpoint,
    names: list[str],
    proven: TensorTable | None,
    new: New,
    directory: Path,
    encoding: str,
    stem: str,
) -> _Group:
    """One group, into files of its own whose names begin with ``stem``."""
    encoder, group = DeltaEncoder.from_checkpoint(base, encoding, names=names, proven=proven), _Group()
    after = {}
    for name, tensor in encoder.tensors():
        old = np.frombuffer(memoryview(tensor.data).toreadonly(), np.uint8)
        after[name] = Tensor(tensor.dtype, tensor.shape, new(name, base.tensors[name], old))
    group.before = encoder.table
    began = time.perf_counter()
    if encoding == "sparse":
        group.done = [encoder.write_sparse(after, directory, base.files, stem=stem)]
    else:

        def write(payloads: Mapping[str, tuple[bytes, str]]) -> list[str]:
            if payloads:
                group.weight_map = write_shards(directory, base.files, payloads, stem=stem)
            return sorted(set(group.weight_map.values()))

        group.done = [encoder.write(after, write)]
    group.seconds = time.perf_counter() - began
    encoder.commit()
    group.after = encoder.table
    return group


def _joined(whole: _Group, names: Sequence[str], encoding: str) -> EncodedDelta:
    done = whole.done
    return EncodedDelta(
        state_digest(whole.before), state_digest(whole.after), encoding,
        {name: pair for one in done for name, pair in one.changed.items()}, tuple(names),
        sum(one.changed_elements for one in done), sum(one.elements for one in done),
        sum(one.changed_bytes for one in done), sum(one.bytes for one in done),
        sum(one.payload_bytes for one in done),
    )  # fmt: skip


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
