"""C79 at the rollout: which versions a lag allows. None that was there before the trainer began, nor before a
rollback: their weights are others than the trainer's, however near their numbers are.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from stitch_core.ports import SystemClock
from stitch_core.rollback import Rollback
from stitch_core.trainers import hooks
from stitch_core.trainers.group import Solo
from stitch_core.trainers.head_reader import HeadReader
from stitch_core.trainers.rollout import Demand
from tests.small_run import FILES, inline
from tests.trainers.ranks import World, own
from tests.trainers.test_hooks import updater
from tests.trainers.test_resume import publisher


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(hooks, "_TRAINER", None)
    return World(tmp_path)


def lowest(world: World, lag: int) -> int | None:
    """What a rollout request demands now."""
    reader = HeadReader(world.store, "r")
    return Demand(world.settings(lag=lag), reader.oldest).constraint(evaluation=False).min_version


def test_c79_the_first_rollout_runs_on_the_trainers_weights_whatever_the_lag(world: World) -> None:
    trainer = updater(world, "updates")
    trainer.tensors = world.learn()  # of another checkpoint than the boot one
    trainer.update_weights()
    assert [lowest(world, lag) for lag in (0, 1, 2, 100)] == [1, 1, 1, 1]
    for _ in range(3):
        trainer.tensors = world.learn()
        trainer.update_weights()
    assert [lowest(world, lag) for lag in (0, 1, 2, 3, 100)] == [4, 3, 2, 1, 1]


def test_c79_after_a_resume_nothing_of_the_trainer_before_is_rolled_out(world: World) -> None:
    first = own(world, Solo())
    for _ in range(4):
        first.publish(world.learn())
    second = own(world, Solo())
    assert lowest(world, 2) == 2, "it has claimed and published nothing"
    second.publish(world.history[2])
    assert [lowest(world, lag) for lag in (0, 1, 3)] == [5, 5, 5]
    second.publish(world.learn())
    assert [lowest(world, lag) for lag in (0, 1, 3)] == [6, 5, 5]


def test_c79_after_a_rollback_nothing_that_it_gave_up_is_rolled_out(world: World) -> None:
    delta = own(world, Solo())
    for _ in range(3):
        delta.publish(world.learn())

    async def back() -> None:
        store = world.store()
        await Rollback(
            store, publisher(world), world.root / "rollback", FILES, SystemClock(), random.Random(0), inline
        ).to(1)
        await store.close()

    asyncio.run(back())
    assert [lowest(world, lag) for lag in (0, 1, 3)] == [4, 4, 4]


def test_a_lag_longer_than_a_manifest_remembers(world: World) -> None:
    delta = own(world, Solo())
    for _ in range(70):
        delta.publish(world.tensors)
    assert [lowest(world, lag) for lag in (1, 66, 69, 500)] == [69, 4, 1, 1]


def test_evaluation_asks_for_the_head_and_a_run_without_one_for_nothing(world: World) -> None:
    assert lowest(world, 2) == 0
    own(world, Solo()).publish(world.learn())
    own(world, Solo()).publish(world.learn())
    reader = HeadReader(world.store, "r")
    wanted = Demand(world.settings(lag=5), reader.oldest).constraint(evaluation=True)
    assert wanted.min_version == 2
