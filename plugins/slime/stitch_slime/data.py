"""``--data-source-path stitch_slime.data.StitchDataSource``: slime's source and a version record."""

from __future__ import annotations

from typing import Any

from slime.rollout.data_source import RolloutDataSourceWithBuffer

from stitch_core.trainers.data import VersionRecord
from stitch_core.trainers.settings import read_settings

from .hooks import launch_command


class StitchDataSource(VersionRecord, RolloutDataSourceWithBuffer):
    """Saves and checks ``{rollout_id, run, version, epoch}`` beside slime's own state."""

    def __init__(self, args: Any) -> None:
        """Raises SettingsError, also for flags that slime dropped: this is made before the trainer starts."""
        read_settings(args, launch_command())
        super().__init__(args)
