"""The boot checkpoint as a replica hashed it, with what says whether the engine loaded those very bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..checkpoint import Checkpoint, Progress, marks_of, untold
from ..ports import FileMarks, Files
from ..state import TensorTable


@dataclass(frozen=True)
class BootCheckpoint:
    """``table``: its tensors. ``marks``: of its files, taken after they were hashed.

    An engine whose ``EngineIdentity.boot_marks`` are equal loaded the tensors of ``table``: no file was
    changed from before the load until after the hash.
    """

    table: TensorTable = field(repr=False)
    marks: FileMarks = field(repr=False)

    @classmethod
    def read(
        cls, directory: Path, files: Files, workers: int = 1, progress: Progress = untold
    ) -> BootCheckpoint:
        """Hash it. Raises CheckpointError, OSError."""
        table = Checkpoint.open(directory, files).table(workers, progress)
        return cls(table, marks_of(directory, files))
