"""Stitch's own encoder in a group: each source rank encodes the tensors that it gathers.

For frameworks that publish no deltas of their own. The base moves when a version is encoded and goes back
when its publishing fails, so the next publish repairs what a failed one left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..checkpoint import Checkpoint
from ..delta.directory import write_index, write_shards
from ..delta.encoder import DeltaEncoder
from ..delta.wire import DeltaError
from ..ports import Files
from ..safetensors import Tensor
from ..state import TensorInfo
from ..versions import directory_name
from .group import together
from .publication import GroupPublisher


class OwnDelta:
    """Encodes and publishes a policy that lies on several ranks, none of it twice."""

    def __init__(self, publisher: GroupPublisher, files: Files) -> None:
        """``publisher`` has claimed the run."""
        self._publisher, self._files, self._group = publisher, files, publisher.group
        self._work = publisher.settings.work / "updates"
        self._boot = Checkpoint.open(publisher.settings.boot, files)
        self._encoder: DeltaEncoder | None = None
        self._started_at = publisher.number

    def publish(self, tensors: Mapping[str, Tensor], *, step: int | None = None) -> int | None:
        """Publish the policy; its number, or None when the trainer starts with the head's own weights.

        ``tensors`` are this rank's, under the names and in the layout of the boot checkpoint; a rank that
        is no source passes none. A tensor that several ranks pass is taken from the first. Raises
        RanksFailed, and then the next publish encodes against what the head last took.
        """
        names = together(self._group, "gathering the policy", lambda: sorted(tensors))
        mine = self._share(names)
        number = self._publisher.reserve()
        what = f"encoding {directory_name(number)}"
        if self._encoder is None:
            together(self._group, what, lambda: self._check(names))
            encoders: list[DeltaEncoder] = []  # not gathered: it holds the weights
            together(self._group, what, lambda: encoders.append(self._base(mine)))
            self._encoder = encoders[0]
        encoder = self._encoder
        directory = self._work / directory_name(number)
        try:
            own = {name: tensors[name] for name in mine}
            parts = together(self._group, what, lambda: self._encode(encoder, own, directory))
            weight_map = {name: file for part, _ in parts for name, file in part.items()}
            if self._publisher.number == self._started_at:
                table = {name: info for _, part in parts for name, info in part.items()}
                if self._publisher.adopt(table):
                    encoder.commit()
                    self._files.remove_tree(directory)
                    return None
            together(self._group, what, lambda: self._index(directory, weight_map, number))
            self._publisher.publish(directory, number, step=step)
        except BaseException:
            encoder.undo()
            raise
        encoder.commit()
        return number

    def _share(self, names: list[list[str]]) -> list[str]:
        """The names of this rank that no rank before it has."""
        before = {name for other in names[: self._group.rank] for name in other}
        return [name for name in names[self._group.rank] if name not in before]

    def _check(self, names: list[list[str]]) -> None:
        found = {name for other in names for name in other}
        for name in sorted(found ^ set(self._boot.tensors)):
            word = "extra in" if name in found else "missing from"
            raise DeltaError(f"tensor {name} is {word} what the trainer gathered, compared with version 0")

    def _base(self, mine: list[str]) -> DeltaEncoder:
        """An encoder of this rank's tensors, as they are in the boot checkpoint."""
        refs = self._boot.tensors
        return DeltaEncoder({n: Tensor(refs[n].dtype, refs[n].shape, self._boot.read(n)) for n in mine})

    def _encode(
        self, encoder: DeltaEncoder, own: Mapping[str, Tensor], directory: Path
    ) -> tuple[dict[str, str], dict[str, TensorInfo]]:
        """The file of each changed tensor, and this rank's part of the table that results."""
        self._files.make_dirs(directory)
        stem = f"model-rank{self._group.rank:05d}"
        for name in self._files.list(directory):
            if name.startswith((stem, f".{stem}")):  # of a trainer that died here
                self._files.remove(directory / name)
        written: dict[str, str] = {}

        def writer(payloads: Mapping[str, tuple[bytes, str]]) -> list[str]:
            written.update(write_shards(directory, self._files, payloads, stem=stem))
            return sorted(set(written.values()))

        encoder.write(own, writer)
        return written, dict(encoder.table)

    def _index(self, directory: Path, weight_map: Mapping[str, str], number: int) -> None:
        if self._group.rank == 0:
            write_index(directory, self._files, weight_map, number=number, base_number=number - 1)
