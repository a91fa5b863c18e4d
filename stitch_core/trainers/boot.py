"""The tensor table of a checkpoint, hashed by all ranks together: each takes its share of the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xxhash

from ..checkpoint import Checkpoint
from ..ports import Files, TrainerGroup
from ..safetensors import TensorRef
from ..state import TensorInfo
from .group import together


def shares(tensors: dict[str, TensorRef], size: int) -> list[list[str]]:
    """Names for each of ``size`` ranks, of about equal bytes: largest first, to whom has least."""
    loads = [0] * size
    result: list[list[str]] = [[] for _ in range(size)]
    for name, ref in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
        rank = loads.index(min(loads))
        result[rank].append(name)
        loads[rank] += ref.nbytes
    return result


def boot_table(directory: Path, files: Files, group: TrainerGroup) -> dict[str, TensorInfo]:
    """The table of the checkpoint in ``directory``, which every rank can read.

    Raises RanksFailed, with CheckpointError's message, when a rank cannot, or when hosts see different
    checkpoints there.
    """

    def mine() -> tuple[Sequence[tuple[str, str, tuple[int, ...]]], dict[str, TensorInfo]]:
        checkpoint = Checkpoint.open(directory, files)
        layout = [(name, ref.dtype, ref.shape) for name, ref in sorted(checkpoint.tensors.items())]
        table = {}
        for name in shares(dict(checkpoint.tensors), group.size)[group.rank]:
            digest = xxhash.xxh3_128()
            for chunk in checkpoint.chunks(name):
                digest.update(chunk)
            ref = checkpoint.tensors[name]
            table[name] = TensorInfo(ref.dtype, ref.shape, digest.hexdigest())
        return layout, table

    results = together(group, f"reading the boot checkpoint {directory}", mine)

    def merge() -> dict[str, TensorInfo]:
        for rank, (layout, _) in enumerate(results):
            if layout != results[0][0]:
                raise ValueError(f"{directory} is another checkpoint on rank {rank} than on rank 0")
        return {name: info for _, table in results for name, info in table.items()}

    return together(group, f"reading the boot checkpoint {directory}", merge)[group.rank]
