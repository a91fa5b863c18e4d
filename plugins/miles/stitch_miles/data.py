"""``--data-source-path stitch_miles.data.StitchDataSource``: Miles' source and a version record."""

from __future__ import annotations

from miles.rollout.data_source import RolloutDataSourceWithBuffer

from stitch_core.trainers.data import VersionRecord


class StitchDataSource(VersionRecord, RolloutDataSourceWithBuffer):
    """Saves and checks ``{rollout_id, run, version, epoch}`` beside Miles' own state."""
