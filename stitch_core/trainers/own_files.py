"""Where Stitch's own encoder writes, and what one rank writes there of a version.

    <work>/updates/<run>-<store>.e0003/weight_v000007/    what one trainer writes between two claims

Nobody else has that directory: not the trainer that was fenced, nor a run of that name in another store. What
is in a version are the files that its ranks say they have written.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..delta.directory import write_index, write_shards, write_sparse_index
from ..delta.encoder import DeltaEncoder
from ..ports import Files
from ..safetensors import Tensor
from ..state import TensorInfo, TensorTable


@dataclass(frozen=True)
class Written:
    """What one rank has written of a version, in its directory.

    ``files`` are their names, ``weight_map`` the file of each changed tensor (of a sparse file: itself), and
    ``table`` this rank's tensors as its encoder has them now.
    """

    files: tuple[str, ...]
    weight_map: Mapping[str, str]
    table: TensorTable


class OwnFiles:
    """The directory of one trainer between two claims. Every call may raise OSError."""

    def __init__(self, work: Path, run: str, store: str, epoch: int, files: Files) -> None:
        """No I/O yet. ``store`` is its URL."""
        self._files, self._epoch = files, epoch
        self._stem = f"{run}-{hashlib.sha256(store.encode()).hexdigest()[:8]}"
        self.root = work / "updates" / f"{self._stem}.e{epoch:04d}"

    def empty(self, *, keep: bool = False) -> None:
        """Nothing is in the directory afterwards. ``keep``: what was written before earlier claims stays.

        Several ranks may do it at once, and none may write before all have.
        """
        self._files.remove_tree(self.root)
        self._files.make_dirs(self.root)
        if keep:
            return
        earlier = re.compile(rf"{re.escape(self._stem)}\.e([0-9]{{4,18}})\Z")
        for name in self._files.list(self.root.parent):
            match = earlier.match(name)
            if match and int(match[1]) < self._epoch:
                with contextlib.suppress(OSError):  # only room on a disk
                    self._files.remove_tree(self.root.parent / name)


def write_part(
    encoder: DeltaEncoder, own: Mapping[str, Tensor], directory: Path, files: Files, rank: int
) -> Written:
    """Encode a rank's tensors into a version's directory; the encoder's base moves.

    Raises DeltaError when the layout differs from the base's; after any error the base is as it was.
    """
    files.make_dirs(directory)
    stem = f"model-rank{rank:05d}"
    for name in files.list(directory):
        if name.startswith((stem, f".{stem}")):  # of this rank's own attempt before this one
            files.remove(directory / name)
    if encoder.encoding == "sparse":
        names = encoder.write_sparse(own, directory, files, stem=stem).files
        files.sync(directory)
        return Written(names, {name: name for name in names}, dict(encoder.table))
    weight_map: dict[str, str] = {}

    def writer(payloads: Mapping[str, tuple[bytes, str]]) -> list[str]:
        weight_map.update(write_shards(directory, files, payloads, stem=stem))
        return sorted(set(weight_map.values()))

    names = encoder.write(own, writer).files
    return Written(names, weight_map, dict(encoder.table))


def write_whole_index(
    parts: Sequence[Written], encoding: str, directory: Path, files: Files, *, number: int, base_number: int
) -> None:
    """The index of what all ranks have written."""
    weight_map = {name: file for part in parts for name, file in part.weight_map.items()}
    if encoding == "sparse":
        write_sparse_index(directory, files, list(weight_map), number=number, base_number=base_number)
    else:
        write_index(directory, files, weight_map, number=number, base_number=base_number, encoding=encoding)


def whole_table(parts: Sequence[Written]) -> dict[str, TensorInfo]:
    """The tensors of the whole policy, as the encoders of all ranks have them now."""
    return {name: info for part in parts for name, info in part.table.items()}
