"""The tensor table of a checkpoint of which every host may have a copy of its own, hashed by all ranks.

Each copy is hashed whole, its bytes shared out to the ranks that see it: what an encoder on one host reads
would otherwise be proven by what another host has. Files that hosts share are one copy.
"""

from __future__ import annotations

import hashlib
import socket
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint import Checkpoint, first_change, list_directory
from ..delta.directory import is_weights
from ..delta.encoder import check_base
from ..delta.wire import DeltaError
from ..dialects import INDEX_NAME
from ..parallel import default_workers
from ..ports import FileMarks, Files, TrainerGroup
from ..safetensors import TensorRef
from ..state import TensorInfo, TensorTable, layout_difference
from .group import together
from .hosts import mark_of, naming_host


@dataclass(frozen=True)
class Proven:
    """A checkpoint of which every host's copy has this ``table``.

    ``marks`` are those of the files of this rank's copy, from before they were hashed.
    """

    directory: Path
    table: dict[str, TensorInfo]
    marks: FileMarks

    def check_unchanged(self, files: Files) -> None:
        """DeltaError, naming the file, where one of this copy is not what it was when it was hashed.

        What another program has read of the copy between the two is then what was hashed, but for what no
        mark shows.
        """
        now = {name: files.mark(path) for name in self.marks if files.exists(path := self.directory / name)}
        changed = first_change(self.marks, now)
        if changed is not None:
            raise DeltaError(
                f"{self.directory / changed} was changed or replaced while the trainer read it, so that its "
                "deltas may be made from other weights: start the trainer again once nothing changes it"
            )


@dataclass(frozen=True)
class _Seen:
    """What one rank sees: its host's name, what tells its copy from others, and on rank 0 the layout."""

    host: str
    copy: str
    layout: TensorTable | None


def shares(tensors: dict[str, TensorRef], size: int) -> list[list[str]]:
    """Names for each of ``size`` ranks, of about equal bytes: largest first, to whom has least."""
    loads = [0] * size
    result: list[list[str]] = [[] for _ in range(size)]
    for name, ref in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
        rank = loads.index(min(loads))
        result[rank].append(name)
        loads[rank] += ref.nbytes
    return result


def prove_copies(directory: Path, files: Files, group: TrainerGroup) -> Proven:
    """Hash every host's copy of the checkpoint in ``directory``, and compare them.

    Raises RanksFailed, with CheckpointError's message, when a rank cannot read it; and when hosts have
    different checkpoints there, naming tensor, file and host.
    """
    what, rank = f"reading the boot checkpoint {directory}", group.rank
    opened: list[Checkpoint] = []
    marks: dict[str, tuple[int, ...]] = {}
    table: dict[str, TensorInfo] = {}

    def look() -> _Seen:
        there = [name for name in list_directory(directory, files) if is_weights(name) or name == INDEX_NAME]
        before = {name: files.mark(directory / name) for name in there}
        checkpoint = Checkpoint.open(directory, files)
        index = () if checkpoint.index is None else (INDEX_NAME,)
        names = (*checkpoint.weight_files, *index)
        marks.update((name, before[name]) for name in names)
        opened.append(checkpoint)
        copy = repr([(name, mark_of(directory / name)) for name in names])
        digest = hashlib.sha256(copy.encode("utf-8", "surrogateescape")).hexdigest()
        return _Seen(socket.gethostname(), digest, None if rank else _layout(checkpoint))

    seen = together(group, what, look)

    @naming_host()
    def hashed() -> dict[str, TensorInfo]:
        mine, checkpoint = seen[rank], opened[0]
        difference = layout_difference(seen[0].layout or {}, _layout(checkpoint))
        if difference is not None:
            raise DeltaError(f"{directory} is another checkpoint than on {seen[0].host}: {difference}")
        peers = [other for other, look in enumerate(seen) if look.copy == mine.copy]
        share = shares(dict(checkpoint.tensors), len(peers))[peers.index(rank)]
        workers = default_workers(sum(look.host == mine.host for look in seen))
        table.update(checkpoint.table(workers, names=share))
        return table if mine.copy == seen[0].copy else {}

    whole = {name: info for part in together(group, what, hashed) for name, info in part.items()}

    @naming_host()
    def compare() -> None:
        for name in sorted(name for name, info in table.items() if info != whole.get(name)):
            again = opened[0].table(names=[name])  # one bad read is no other file
            check_base(name, again[name], whole, opened[0].tensors[name].file)

    together(group, what, compare)
    return Proven(directory, whole, marks)


def _layout(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    return {name: TensorInfo(ref.dtype, ref.shape, "") for name, ref in checkpoint.tensors.items()}
