"""The version record in a framework's data source, whose ``save`` and ``load`` come at the right times."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ..files import PosixFiles
from ..head import Head
from ..stores import open_store
from .head_reader import HeadReader
from .record import RunRecord, check_record, load_record, save_record
from .settings import TrainerSettings, read_settings


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
        super().load(rollout_id)  # type: ignore[misc]
        load: str | None = self.args.load  # type: ignore[attr-defined]
        if load is None or rollout_id is None or rollout_id < 0:
            return
        where = Path(load).absolute()
        self.stitch_record = load_record(where, rollout_id, self.stitch_files)
        if self.stitch_record is not None:
            head = self._head()
            check_record(self.stitch_record, self.stitch.run, head.number if head else None, where)
