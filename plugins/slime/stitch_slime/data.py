"""``--data-source-path stitch_slime.data.StitchDataSource``: slime's source and a version record."""

from __future__ import annotations

from slime.rollout.data_source import RolloutDataSourceWithBuffer

from stitch_core.trainers.data import VersionRecord


class StitchDataSource(VersionRecord, RolloutDataSourceWithBuffer):
    """Saves and checks ``{rollout_id, run, version, epoch}`` beside slime's own state."""
