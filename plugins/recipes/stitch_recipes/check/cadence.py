"""How often versions are made, saved and uploaded whole, against the time of a join and samples' age."""

from __future__ import annotations

from collections.abc import Iterator

from .. import footprint
from ..schema import Recipe

CHAIN = 1.0
"""A chain of deltas that is longer than this part of the model costs a joiner more than the model."""

FETCH = 1e9
"""Bytes a second that a replica is assumed to fetch and verify; an assumption, not a measurement."""


def problems(recipe: Recipe) -> Iterator[str]:
    """Settings that contradict each other."""
    versions, trainer = recipe.versions, recipe.trainer
    if trainer is None:
        return
    fully_async = trainer.flags.get("fully-async") is True
    if versions.max_staleness is not None and not fully_async:
        yield "versions.max_staleness: only Miles' --fully-async has a buffer that bounds it"
    if versions.max_staleness is not None and versions.max_staleness < versions.lag + 1:
        yield (
            f"versions.max_staleness: {versions.max_staleness}, but answers may start {versions.lag} behind "
            "and batches are collected one step ahead: all would be left out"
        )
    if fully_async and versions.lag == 0:
        yield "versions.lag: 0 with --fully-async makes each request wait until a version is staged"
    if versions.save_every is None:
        yield "versions.save_every: nothing is saved, so that no restart could resume"
    if versions.anchor_every is None:
        yield "versions.anchor_every: without fulls nothing is ever deleted (stitch gc)"
    else:
        yield from _anchors(recipe, versions.anchor_every)


def _anchors(recipe: Recipe, every: int) -> Iterator[str]:
    versions = recipe.versions
    changed = max(recipe.delta_density.values(), default=0.0)
    if not versions.compact and every * changed > CHAIN:
        yield (
            f"versions.anchor_every: {every} deltas of {changed:.2%} are longer than the model and nothing "
            "merges them: set compact, or anchor more often"
        )
    size = footprint.size(recipe) if recipe.serve in recipe.checkpoints else 0.0
    if (
        versions.step_seconds is not None
        and size / FETCH > every * versions.publish_every * versions.step_seconds
    ):
        yield (
            f"versions.anchor_every: a replica joins in {size / FETCH:,.0f} s at {FETCH / 1e9:.0f} GB/s "
            f"or more, longer than {every} versions take: each anchor would be old before it is there"
        )
