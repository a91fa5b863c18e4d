"""C04, C06, C07, C31 on several ranks: whatever call of any rank fails, one outcome, and a base that fits.

A rank's store loses calls and answers; the trainer claims again when its claim is gone, as a restart does.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from stitch_core.state import state_digest
from stitch_core.testing.checkpoints import table_of
from stitch_core.trainers.group import RanksFailed, together
from stitch_core.trainers.own_delta import OwnDelta
from stitch_core.trainers.publication import GroupPublisher
from tests.small_run import FILES, FaultyStore
from tests.trainers.ranks import ThreadGroup, World, on_ranks, same
from tests.trainers.test_publication import plain, rebuilt, versions

STEPS = 6
RANKS = 2
ATTEMPTS = 40
GONE = ("nothing says whether", "another writer has claimed", "has not been claimed")


def faulty(world: World, seed: int, rank: int, rate: float) -> FaultyStore:
    rng = random.Random(f"{seed} {rank}")
    kinds = ["before", "after", "late"]
    return FaultyStore(world.store(), lambda *_: rng.choice(kinds) if rng.random() < rate else None)


@pytest.mark.parametrize("async_", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_faults_at_any_call_of_any_rank(tmp_path: Path, seed: int, async_: bool) -> None:
    world = World(tmp_path, seed)
    todo = [world.learn() for _ in range(STEPS)]
    # Patience of none: every call is made once, so that every fault is felt.
    settings = world.settings(async_=async_, patience=0.0, keep_files=True)

    def train(group: ThreadGroup) -> list[int]:
        published: list[int] = []
        delta: OwnDelta | None = None
        at = 0
        for start in range(ATTEMPTS):
            store = faulty(world, seed * ATTEMPTS + start, group.rank, 0.03 if start < ATTEMPTS - 1 else 0.0)
            try:
                publisher = GroupPublisher(settings, group, files=FILES, store=lambda store=store: store)
                publisher.claim()
                delta = OwnDelta(publisher, FILES)
            except RanksFailed:
                continue
            while True:
                try:
                    number = delta.publish(world.share(todo[at], group.rank, RANKS), step=at)
                    published += [] if number is None else [number]
                    at = min(at + 1, STEPS - 1)
                    if at == STEPS - 1:
                        delta.flush()
                        delta.publish(world.share(todo[at], group.rank, RANKS), step=at, wait=True)
                        return published
                except RanksFailed as error:
                    if any(word in str(error) for word in GONE):
                        break
            together(group, "landing", lambda store=store: asyncio.run(store.land()))
        raise AssertionError("it never got through")

    published = same(on_ranks(RANKS, train))
    chain = versions(world)
    states = {state_digest(table_of(tensors)) for tensors in world.history}
    numbers = [manifest.number for manifest in chain]
    assert numbers == sorted(set(numbers))
    assert {manifest.state for manifest in chain} <= states, "a version is no step's policy"
    if not async_:
        assert set(published) <= set(numbers), "a version that was acknowledged is gone"
    assert rebuilt(world, numbers[-1]) == plain(todo[-1])
