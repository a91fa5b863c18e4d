"""Scenarios of one fault each, named after the case that they replay. Each ends in a world where all is well.

Everything that the judge checks holds in them too; they assert what is special.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from ..claims import Fenced, HeadMoved
from ..delta.encoder import DeltaEncoder
from ..head import Head, head_key
from ..manifest import run_prefix
from ..payload import Boot, Payload
from ..ports import Unavailable
from ..replica.reconciler import Follow
from ..versions import VersionConstraint
from .faults import Lack
from .process import SimulatedProcess
from .sim_http import Response
from .sim_random import all_is_well, point
from .sim_replica import SimulatedReplica
from .sim_trainer import SimulatedTrainer, publisher_of
from .sim_world import BOOT, World

ANY = VersionConstraint()
LONG = 600.0


@asynccontextmanager
async def fleet(
    world: World, trainers: list[SimulatedTrainer], replicas: list[SimulatedReplica], run: str = "a"
) -> AsyncIterator[None]:
    """Everything started; at the end all must be well on ``run``."""
    tasks = [asyncio.ensure_future(trainer.supervise()) for trainer in trainers]
    tasks += [asyncio.ensure_future(replica.supervise()) for replica in replicas]
    yield
    await all_is_well(world, trainers, replicas, tasks, run)
    for task in tasks:
        task.cancel()


async def until(world: World, condition: Callable[[], bool], what: str, seconds: float = LONG) -> None:
    """Wait for something that must come."""
    deadline = world.loop.time() + seconds
    while not condition():
        if world.loop.time() > deadline:
            world.judge.broken("scenario: it goes on", f"not within {seconds:.0f} s: {what}")
        await asyncio.sleep(0.5)


async def serves(world: World, replica: SimulatedReplica, number: int, seconds: float = LONG) -> None:
    """Wait until the replica serves at least version ``number``."""

    def there() -> bool:
        return replica.applied is not None and replica.applied >= number

    await until(world, there, f"{replica.name} serves {number}", seconds)


def error_of(response: Response | None) -> tuple[int, str, str]:
    """(status, type, retry) of a refusal."""
    assert response is not None
    assert response.status != 200, response
    error = response.body["error"]
    return response.status, error["type"], error["retry"]


def kill_at(world: World, trainer: SimulatedTrainer, prefix: str) -> asyncio.Event:
    """Kill the trainer at the instant when its first object under ``prefix`` lands; set when it did."""
    killed = asyncio.Event()

    def observe(key: str, old: bytes | None, new: bytes | None, who: str) -> None:
        if key.startswith(prefix) and not killed.is_set() and trainer.process is not None:
            trainer.process.kill()
            killed.set()

    world.bucket.observers.append(observe)
    return killed


def head_number(world: World, run: str = "a") -> int:
    newest = world.judge.newest(run)
    return -1 if newest is None else newest.number


# ------------------------------------------------------------------------------------- heads and runs


async def c02_a_pointer_that_cannot_be_read(world: World) -> None:
    """Truncated, not UTF-8, with junk, or naming what is not there: an error in status, serving goes on."""
    trainer, replica = (
        SimulatedTrainer(world, "t", "a", versions=2),
        SimulatedReplica(world, "r", Follow("a")),
    )
    async with fleet(world, [trainer], [replica]):
        await serves(world, replica, 2)
        key, good = head_key("a"), world.bucket.objects[head_key("a")]
        head = Head.decode(good)
        missing = Head(9, 1, "manifests/000009.e0001.json", "sha256:" + "1" * 64, head.writer)
        other_bytes = Head(head.number, head.epoch, head.key, "sha256:" + "0" * 64, head.writer)
        for bad in (
            good[:20],
            b"\xff\xfe",
            good + b"{}",
            b"",
            b"a/weight_v000009",
            missing.encode(),
            other_bytes.encode(),
        ):
            world.bucket.objects[key] = bad
            await asyncio.sleep(3 * world.timing.poll + 60)
            assert replica.reconciler is not None
            assert replica.reconciler.status()["problem"], bad
            assert replica.applied == 2
            response = await replica.ask("q", VersionConstraint(exact_version=2), tokens=3)
            assert response is not None
            assert response.status == 200, bad
        del world.bucket.objects[key]
        await asyncio.sleep(3 * world.timing.poll)
        assert replica.applied == 2
        world.bucket.objects[key] = good


async def c03_a_run_switch_with_requests_in_flight(world: World) -> None:
    """All drain; one that does not in time gets a clear error; no answer mixes runs."""
    trainers = [SimulatedTrainer(world, f"t{run}", run, versions=3) for run in "ab"]
    replica = SimulatedReplica(world, "r", Follow(channel="latest"))
    point(world, "a")
    async with fleet(world, trainers, [replica], "b"):
        await serves(world, replica, 3)
        short = [asyncio.ensure_future(replica.ask(f"short{i}", ANY, tokens=40)) for i in range(3)]
        endless = asyncio.ensure_future(replica.ask("endless", ANY, tokens=100_000))
        await asyncio.sleep(5)
        point(world, "b")
        for answer in await asyncio.gather(*short):
            assert answer is not None
            assert answer.status == 200
            assert answer.body["meta_info"]["run"] == "a"
        assert error_of(await endless)[1:] == ("WeightVersionElsewhere", "elsewhere")


async def c30_claim_a_publish_claim_b_claim_a(world: World) -> None:
    """The second life of run a never meets what the first one left."""
    replica = SimulatedReplica(world, "r", Follow(channel="latest"))
    point(world, "a")
    first = SimulatedTrainer(world, "first", "a", versions=1)
    await first.supervise()
    # Its successor dies after writing version 2 and before the head names it.
    crashed = SimulatedTrainer(world, "crashed", "a", versions=2)
    left = run_prefix("a") + world.random.choice(("e0002/weight_v000002/", "manifests/000002.e0002"))
    killed = kill_at(world, crashed, left)
    stopped = asyncio.ensure_future(crashed.supervise())
    await killed.wait()
    crashed.done.set()
    await stopped
    other = SimulatedTrainer(world, "other", "b", versions=2)
    await other.supervise()
    assert head_number(world) == 1
    again = SimulatedTrainer(world, "again", "a", versions=3)
    async with fleet(world, [again], [replica]):
        await serves(world, replica, 3)
    newest = world.judge.newest("a")
    assert newest is not None
    assert [row.number for row in newest.history] == [2, 1, 0]
    assert newest.epoch == 3


async def c36_the_new_run_is_asked_for_before_the_switch_is_seen(world: World) -> None:
    """Told to wait, not never; and never served by the other run."""
    trainers = [SimulatedTrainer(world, f"t{run}", run, versions=2) for run in "ab"]
    replica = SimulatedReplica(world, "r", Follow(channel="latest"))
    point(world, "a")
    async with fleet(world, trainers, [replica], "b"):
        await serves(world, replica, 2)
        point(world, "b")
        demand = VersionConstraint(min_version=0, run="b")
        response = await replica.ask("early", demand, tokens=2)
        assert response is not None
        if response.status != 200:
            assert error_of(response) == (409, "WeightVersionNotReady", "here")
        await until(
            world, lambda: replica.gate is not None and "b/" in str(replica.gate.serving), "the switch"
        )
        response = await replica.ask("late", demand, tokens=2)
        assert response is not None
        assert response.status == 200
        assert error_of(await replica.ask("old", VersionConstraint(run="a"), tokens=2))[2] in (
            "here",
            "elsewhere",
        )


# -------------------------------------------------------------------------------------------- trainers


async def c05_one_shard_is_not_uploaded(world: World) -> None:
    """A part of a version fails and the rest succeeds: the head does not move, the next publish repairs."""
    trainer = SimulatedTrainer(world, "t", "a", versions=4, full_rate=0.5)
    replica = SimulatedReplica(world, "r", Follow("a"))
    refused: list[str] = []
    create = type(world.bucket).create

    def failing(key: str, data: bytes, who: str) -> None:
        if "weight_v000002/" in key and (not refused or key in refused):
            refused.append(key)
            raise Unavailable("this one never lands")
        create(world.bucket, key, data, who)

    world.bucket.create = failing  # type: ignore[method-assign]
    async with fleet(world, [trainer], [replica]):
        await serves(world, replica, 4)
    newest = world.judge.newest("a")
    assert newest is not None
    assert refused
    assert [row.number for row in newest.history] == [3, 1, 0]


async def c06_the_trainer_is_killed_in_the_middle_of_an_upload(world: World) -> None:
    """Numbers go on above the head; the leftover is never readable and in nobody's way."""
    trainer, replica = (
        SimulatedTrainer(world, "t", "a", versions=6),
        SimulatedReplica(world, "r", Follow("a")),
    )
    killed = kill_at(world, trainer, run_prefix("a") + "e0001/weight_v000004/")
    async with fleet(world, [trainer], [replica]):
        await killed.wait()
        assert head_number(world) == 3
        await until(world, lambda: head_number(world) == 6, "the next trainer")
    assert {manifest.epoch for manifest in world.judge.versions.values()} == {1, 2}
    assert sorted(version.number for version in world.judge.versions) == list(range(7))


async def c07_two_trainers_and_a_stalled_one(world: World) -> None:
    """Exactly one publishes; the other gets one clear error and is in nobody's way when it wakes."""
    old, new = (SimulatedTrainer(world, name, "a", versions=9) for name in ("old", "new"))
    replica = SimulatedReplica(world, "r", Follow("a"))
    task = asyncio.ensure_future(old.supervise())
    await until(world, lambda: head_number(world) >= 2, "version 2")
    await asyncio.sleep(world.random.uniform(0, 20))
    assert old.process is not None
    old.process.stall(100.0)
    async with fleet(world, [new], [replica]):
        await until(world, lambda: head_number(world) >= 9, "version 9", 1000.0)
        await until(world, old.done.is_set, "the old trainer ends")
    await task
    assert old.fenced is not None
    assert new.fenced is None
    assert "another writer has claimed run a" in str(old.fenced)


async def c31_a_swap_that_lands_late(world: World) -> None:
    """It times out, the old head is seen, it lands: the next base is right, no number used twice."""
    trainer = SimulatedTrainer(world, "t", "a", versions=6)
    replica = SimulatedReplica(world, "r", Follow("a"))
    swap = type(world.bucket).swap
    late: list[str] = []

    def lands_late(key: str, expected: str | None, data: bytes, who: str) -> str:
        head = Head.decode(data)
        if key == head_key("a") and head.number == 3 and not late:
            late.append(key)
            again = world.random.uniform(0, 60)
            world.loop.call_later(
                again, lambda: quietly(lambda: swap(world.bucket, key, expected, data, who))
            )
            raise Unavailable("no answer")
        return swap(world.bucket, key, expected, data, who)

    world.bucket.swap = lands_late  # type: ignore[method-assign]
    async with fleet(world, [trainer], [replica]):
        if world.random.random() < 0.5:
            await until(world, lambda: bool(late), "the late swap")
            assert trainer.process is not None
            trainer.process.kill()
        await serves(world, replica, 6)
    assert late


async def c81_a_mount_that_lost_a_capability(world: World) -> None:
    """It takes swaps, and no new objects; or nothing. Who claims there is refused, and the writer goes on."""
    random = world.random
    old, new = (SimulatedTrainer(world, name, "a", versions=n) for name, n in (("old", 6), ("new", 9)))
    replica = SimulatedReplica(world, "r", Follow("a"))
    task = asyncio.ensure_future(old.supervise())
    await until(world, lambda: head_number(world) >= 1, "version 1")
    lack = Lack(0.0, float("inf"), "new", random.choice(("create", "write")))
    world.faults.plan = replace(world.faults.plan, lacks=(lack,))
    async with fleet(world, [new], [replica]):
        await until(world, old.done.is_set, "the old trainer ends")
        await task
        assert old.fenced is None
        assert {manifest.epoch for manifest in world.judge.versions.values()} == {1}
        # The mount of a writer loses it, and gets it back, between any two calls.
        world.faults.plan = replace(world.faults.plan, lacks=())
        while head_number(world) < 9:
            await asyncio.sleep(random.uniform(0, 20))
            now = world.loop.time()
            lack = Lack(now, now + random.uniform(0, 20), "new", random.choice(("create", "write")))
            world.faults.plan = replace(world.faults.plan, lacks=(lack,))
        world.faults.plan = replace(world.faults.plan, lacks=())
        await serves(world, replica, 9)


async def c38_a_delta_for_a_head_that_moves_on(world: World) -> None:
    """An operator makes deltas ready while the trainer publishes: only one that still fits fences it, and
    what it was claimed for is then published.
    """
    trainer = SimulatedTrainer(world, "t", "a", versions=12, stubborn=100)
    replica = SimulatedReplica(world, "r", Follow("a"))
    process, machine = SimulatedProcess(world.loop, "operator"), world.machine("operator")
    publisher, files = publisher_of(world, process, machine, "a"), machine.files(process)
    boot = Boot(str(BOOT), world.judge.boot_state)
    fitted: list[bool] = []

    async def publish_one() -> None:
        head = await publisher.look(boot)
        encoder = DeltaEncoder(world.weights[head.state], workers=1)
        weights = world.trained(world.weights[head.state], None)
        directory = Path(f"/var/operator/delta-{len(fitted)}")
        delta = encoder.encode(weights, directory, files, number=head.number + 1, base_number=head.number)
        payload = Payload(
            "delta", delta.state, directory, delta.files, delta.base, delta.encoding, delta.changed
        )
        await publisher.check(payload, head)
        await asyncio.sleep(world.random.uniform(0, 2 * world.timing.train))
        try:
            claimed = await publisher.claim(boot, at=head)
        except HeadMoved:
            fitted.append(False)
            return
        assert (claimed.number, claimed.state) == (head.number, head.state)
        fitted.append(True)
        with contextlib.suppress(Fenced):  # the trainer is started again, and claims
            assert (await publisher.publish(payload)).representation.base == head.state

    async with fleet(world, [trainer], [replica]):
        await until(world, lambda: head_number(world) >= 1, "version 1")
        while head_number(world) < 10:
            await process.spawn(publish_one())
    assert fitted


def quietly(call: Callable[[], object]) -> None:
    """A write that lands late, and may find that another one was faster."""
    try:
        call()
    except Exception as error:
        assert type(error).__name__ == "Conflict", error  # noqa: PT017


CASES = [
    c02_a_pointer_that_cannot_be_read,
    c03_a_run_switch_with_requests_in_flight,
    c05_one_shard_is_not_uploaded,
    c06_the_trainer_is_killed_in_the_middle_of_an_upload,
    c07_two_trainers_and_a_stalled_one,
    c30_claim_a_publish_claim_b_claim_a,
    c31_a_swap_that_lands_late,
    c36_the_new_run_is_asked_for_before_the_switch_is_seen,
    c81_a_mount_that_lost_a_capability,
    c38_a_delta_for_a_head_that_moves_on,
]
