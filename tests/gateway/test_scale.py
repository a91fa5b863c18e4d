"""Many held requests and many replicas: on virtual time, with the real gateway, reconcilers and publisher."""

import asyncio
import random
from typing import Any

import pytest

from benchmarks.fleet import rows
from benchmarks.fleet_world import World
from stitch_core.testing.loop import simulated_loop
from stitch_core.versions import PolicyVersion, VersionConstraint
from stitch_gateway import dispatch
from stitch_gateway.routing import Replica
from stitch_gateway.waiting import Waiting


def test_a_held_request_looks_at_the_replicas_a_few_times_and_not_once_for_each_that_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each replica that came to a version woke all that waited for it: 20,000 x 1,000 looks at 1,000."""
    looks, choose = 0, dispatch.choose

    def counted(*arguments: Any, **more: Any) -> Replica | None:
        nonlocal looks
        looks += 1
        return choose(*arguments, **more)

    monkeypatch.setattr(dispatch, "choose", counted)
    with simulated_loop(random.Random(1)) as loop:
        world = World(replicas=24, held=480, gateways=2, seed=1)
        loop.run_until_complete(world.live(versions=2))
    found = {row.id: row.value for row in rows(world, 0.0)}
    assert found["G5"] <= 2.0
    assert found["held"] == 480
    assert len(world.staleness) == 2 * 480
    assert looks <= 4 * 2 * 480


def waits(waiting: Waiting, demands: VersionConstraint, sequences: int) -> asyncio.Task[bool]:
    until = asyncio.get_running_loop().time() + 60.0
    return asyncio.create_task(waiting.wait(demands, sequences, until))


def replicas(*numbers: int) -> list[Replica]:
    made = [Replica(f"host-{at}", "http://x", alive=True, ready=True) for at in range(len(numbers))]
    for replica, number in zip(made, numbers, strict=True):
        replica.serving = PolicyVersion("r", number)
    return made


async def test_a_replica_wakes_as_many_as_it_has_room_for_and_in_time_the_rest() -> None:
    demands, waiting, pool = VersionConstraint(min_version=8), Waiting(), replicas(8, 7, 7, 7)
    tasks = [waits(waiting, demands, 1) for _ in range(80)]
    await asyncio.sleep(0)
    waiting.changed(pool[0], pool, 80, 0.05)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [task.done() for task in tasks] == [True] * 33 + [False] * 47  # 1.25 x 80 / 4 + 8
    assert all(task.result() for task in tasks[:33])
    waiting.changed(pool[1], pool, 47, 0.05)  # one that is behind
    await asyncio.sleep(0.2)
    assert not any(task.result() for task in tasks[33:])  # they need not wait for their share any more


async def test_a_large_request_does_not_keep_small_ones_behind_it_waiting() -> None:
    demands, waiting, pool = VersionConstraint(min_version=8), Waiting(), replicas(8, 7)
    large, small = waits(waiting, demands, 64), waits(waiting, demands, 1)
    await asyncio.sleep(0)
    waiting.changed(pool[0], pool, 2, 0.05)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (large.done(), small.done()) == (False, True)
    assert await large is False


async def test_where_no_other_replica_comes_it_wakes_all() -> None:
    demands, waiting, pool = VersionConstraint(min_version=8), Waiting(), replicas(8, 8)
    tasks = [waits(waiting, demands, 1) for _ in range(500)]
    await asyncio.sleep(0)
    waiting.changed(pool[0], pool, 500, 60.0)
    assert await asyncio.gather(*tasks) == [True] * 500
