"""The version record in a framework's data source, whose ``save`` and ``load`` come at the right times."""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path
from typing import Any

from ..files import PosixFiles
from ..head import Head
from ..stores import open_store
from .head_reader import HeadReader
from .record import RunRecord, check_record, load_record, save_record
from .settings import TrainerSettings, read_settings

logger = logging.getLogger("stitch")
NOTES = "rollout"
NOTE = re.compile(r"global_dataset_state_dict_([0-9]{1,18})\.pt")
"""How far the prompts are: both frameworks write it below ``--save``, after the model's checkpoint."""


@functools.cache
def _head_reader(store: str, run: str, patience: float) -> HeadReader:
    return HeadReader(lambda: open_store(store), run, patience=patience)


class VersionRecord:
    """Mixed in before a framework's data source class, whose constructor takes ``args``."""

    def __init__(self, args: Any) -> None:
        self.stitch: TrainerSettings = read_settings(args)
        self.stitch_files = PosixFiles()
        self.stitch_record: RunRecord | None = None
        super().__init__(args)  # type: ignore[call-arg]

    def _head(self) -> Head | None:
        return _head_reader(self.stitch.store, self.stitch.run, self.stitch.patience).read()

    def save(self, rollout_id: int) -> None:
        super().save(rollout_id)  # type: ignore[misc]
        save: str | None = self.args.save  # type: ignore[attr-defined]
        head = self._head()
        if save is not None and head is not None:
            record = RunRecord(rollout_id, self.stitch.run, head.number, head.epoch)
            save_record(Path(save).absolute(), record, self.stitch_files)

    def load(self, rollout_id: int | None = None) -> None:
        """Raises RecordError when the checkpoint belongs to another run, or to another store."""
        load: str | None = self.args.load  # type: ignore[attr-defined]
        if load is None or rollout_id is None or rollout_id < 0:
            super().load(rollout_id)  # type: ignore[misc]
            return
        where = Path(load).absolute()
        super().load(self._noted(where, rollout_id))  # type: ignore[misc]
        self.stitch_record = load_record(where, rollout_id, self.stitch_files)
        if self.stitch_record is not None:
            head = self._head()
            check_record(self.stitch_record, self.stitch.run, head.number if head else None, where)

    def _noted(self, where: Path, rollout_id: int) -> int:
        """The newest rollout up to ``rollout_id`` after which it was noted how far the prompts are.

        A trainer may end between a model's checkpoint and its note. The frameworks would then begin with the
        first prompt again, and train on all of them twice; so only what was asked since the last note is.
        """
        notes = where / NOTES
        names = self.stitch_files.list(notes) if self.stitch_files.exists(notes) else []
        noted = [int(match[1]) for match in map(NOTE.fullmatch, names) if match]
        newest = max((number for number in noted if number <= rollout_id), default=rollout_id)
        if newest != rollout_id:
            logger.warning(
                "the checkpoint of rollout %d in %s does not say how far the prompts are: the trainer ended "
                "before it was complete; they go on from where they were after rollout %d",
                rollout_id, where, newest,
            )  # fmt: skip
        return newest
