"""Replicas that follow a channel, with a store that goes away, a trainer in a hurry, a switch of runs.

Nobody calls ``/wake`` here: what arrives, arrives by looking (case C17, promise 3).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from .processes import PATIENCE, Fleet, Trainer, caught_up, get, ready
from .traffic import Traffic, ask, failures, proven, stored_away

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

FIRST, SECOND = "first", "second"


@dataclass
class World:
    """``followers`` look often; ``sleeper`` looks once an hour, and when it has refused a request."""

    fleet: Fleet
    trainer: Trainer
    gateway: str
    followers: list[str]
    sleeper: str

    def traffic(self, seed: int, run: str = FIRST) -> Traffic:
        return Traffic(
            self.gateway, lambda rng: {"run": run, "min_version": max(0, self.trainer.head - 3)}, seed=seed
        )


async def claim(fleet: Fleet, run: str) -> None:
    """Make the run and point the channel at it, as a launcher does."""
    claiming = fleet.cli(
        "claim",
        "claim",
        "--store",
        fleet.store_url,
        "--run",
        run,
        "--base",
        str(fleet.boot),
        "--channel",
        "latest",
    )
    assert await claiming.ended() == 0, claiming.stderr()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Any:
    fleet = Fleet(tmp_path_factory.mktemp("follow"))
    yield fleet
    fleet.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(fleet: Fleet) -> AsyncIterator[World]:
    # Before there is a run, or even a store: they wait for it.
    followers = [fleet.replica("f0"), fleet.replica("f1", kv_mode="retract")]
    gateway = fleet.gateway()
    for follower in followers:
        url = await follower.url()
        await until_told(url, "channel latest is not there")
    await claim(fleet, FIRST)
    trainer = fleet.trainer(FIRST)
    sleeper = fleet.replica("sleeper", "--poll", "3600")
    urls = [await child.url() for child in (*followers, sleeper)]
    for url in urls:
        await caught_up(url, trainer)
    await ready(await gateway.url(), lambda said: said["replicas"] == 3)
    yield World(fleet, trainer, await gateway.url(), urls[:2], urls[2])


async def until_told(url: str, reason: str) -> dict[str, Any]:
    """Wait until ``/ready`` names this problem; what it says."""
    end = asyncio.get_running_loop().time() + PATIENCE
    while True:
        _, said = await get(url, "/ready")
        if reason in str((said.get("problem") or {}).get("message")):
            return said
        assert asyncio.get_running_loop().time() < end, said
        await asyncio.sleep(0.05)


async def test_c17_every_wake_is_lost(world: World) -> None:
    """No wake, and no request that could stand for one."""
    for changes in (True, False, True):
        world.trainer.step(changes=changes)
        for url in world.followers:
            await caught_up(url, world.trainer)


async def test_c24_publishing_is_faster_than_staging(world: World) -> None:
    """They activate again and again, leave versions out, and are there in the end."""
    before = world.trainer.head
    world.trainer.start(every=0)
    async with world.traffic(1) as traffic:
        await traffic.more(25)
    world.trainer.stop()
    published = world.trainer.head - before
    for url in world.followers:
        said = await caught_up(url, world.trainer)
        numbers = [int(update["version"].rpartition("v")[2]) for update in said["updates"]]
        assert len([number for number in numbers if number > before]) >= 3, (published, numbers)
    assert not failures(traffic.outcomes)
    starts = {a["meta_info"]["weight_version_start"] for o in traffic.outcomes for a in o.answers}
    assert len(starts) >= 4, (published, starts)
    await proven(world.fleet, FIRST, traffic.outcomes)


@pytest.mark.parametrize("how", ["unreadable", "gone"])
async def test_c18_the_store_is_away(world: World, how: str) -> None:
    """Serving goes on; ``/ready`` says what is wrong and how old the last good look is; then all is well."""
    target = world.fleet.store if how == "unreadable" else world.fleet.root / "nowhere"
    async with world.traffic(2) as traffic:
        await traffic.more(5)
        async with stored_away(world.fleet, target):
            for url in world.followers:
                status, said = await get(url, "/ready")
                while status == 200 and not (said["problem"] and said["last_success_age"] > 1.5):
                    await asyncio.sleep(0.1)
                    status, said = await get(url, "/ready")
                assert status == 200
                assert said["problem"]["message"]
                assert said["problem"]["age"] >= 0
            await traffic.more(10)
        world.trainer.step()
        for url in world.followers:
            await caught_up(url, world.trainer)
            said = await ready(url, lambda said: said["problem"] is None)
            assert said["last_success_age"] < 30
        await traffic.more(5)
    assert not failures(traffic.outcomes)
    await proven(world.fleet, FIRST, traffic.outcomes)


async def test_c03_c36_the_channel_moves_to_another_run(world: World) -> None:
    """All of the old run drain, nothing mixes, and who asks too early for the new run is told to wait."""
    world.trainer.start()
    old = Traffic(world.gateway, lambda _: {"run": FIRST}, seed=3)
    new = Traffic(world.gateway, lambda _: {"run": SECOND}, seed=4)
    anything = Traffic(world.gateway, lambda _: {}, seed=5)
    async with anything:
        async with old:
            await old.more(5)
        async with new:
            late = asyncio.create_task(old_ones(world))
            await asyncio.sleep(0.3)
            await claim(world.fleet, SECOND)
            world.trainer.stop()
            first, said = await asyncio.gather(early(world), late)
            trainer = world.fleet.trainer(SECOND, seed=1)
            trainer.start()
            await new.more(20)
            for url in (*world.followers, world.sleeper):
                await ready(url, lambda said: said["run"] == SECOND)
        trainer.stop()
    assert first.error == "409 WeightVersionNotReady"
    assert first.detail["retry"] == "here"
    assert not failures([*old.outcomes, *new.outcomes, *anything.outcomes])
    both = [*old.outcomes, *new.outcomes, *anything.outcomes, *said]
    runs = {answer["meta_info"]["run"] for outcome in anything.outcomes for answer in outcome.answers}
    assert runs == {FIRST, SECOND}
    for run in (FIRST, SECOND):
        await proven(world.fleet, run, both)


async def old_ones(world: World) -> list[Any]:
    """Requests of the old run that are running when the channel moves: all are let go to their end."""
    rng = random.Random(6)
    asking = [
        ask(url, rng, demand={"run": FIRST}, tokens=50, stream=True)
        for url in (*world.followers, world.sleeper)
    ]
    outcomes = await asyncio.gather(*asking)
    assert not failures(outcomes)
    return outcomes


async def early(world: World) -> Any:
    """Ask the replica that has not seen the switch for the new run, until it serves it; its first answer."""
    rng = random.Random(7)
    first = outcome = await ask(world.sleeper, rng, demand={"run": SECOND})
    end = asyncio.get_running_loop().time() + PATIENCE
    while not outcome.ok:
        assert outcome.error in ("409 WeightVersionNotReady", "503 EngineUnavailable"), outcome
        assert asyncio.get_running_loop().time() < end, outcome
        await asyncio.sleep(0.1)
        outcome = await ask(world.sleeper, rng, demand={"run": SECOND})
    return first
