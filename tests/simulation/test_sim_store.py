"""The simulated store: what a caller is told, and what became of its write."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from stitch_core.ports import AlreadyExists, Conflict, FileSource, NotFound, StoreError, Unavailable
from stitch_core.testing.faults import FaultPlan, Faults, Outage
from stitch_core.testing.loop import SimulatedLoop, simulated_loop
from stitch_core.testing.process import Crash, SimulatedProcess
from stitch_core.testing.sim_files import SimulatedMachine
from stitch_core.testing.sim_store import SimulatedBucket, SimulatedStore


class World:
    def __init__(self, loop: SimulatedLoop, plan: FaultPlan) -> None:
        self.loop = loop
        self.faults = Faults(plan, loop.random, loop.time)
        self.bucket = SimulatedBucket(loop, self.faults)
        self.process = SimulatedProcess(loop, "p")
        self.store = self.bucket.store(self.process)
        self.writes: list[tuple[float, str, bytes | None]] = []
        self.bucket.observers.append(lambda key, old, new, who: self.writes.append((loop.time(), key, new)))


def simulate(body: Callable[[World], Awaitable[Any]], plan: FaultPlan | None = None, seed: int = 1) -> Any:
    with simulated_loop(Random(seed)) as loop:
        return loop.run_until_complete(body(World(loop, plan or FaultPlan())))  # type: ignore[arg-type]


def test_without_faults_it_is_a_store() -> None:
    async def body(world: World) -> None:
        store = world.store
        files = SimulatedMachine("m", world.faults).files(world.process)
        files.write_new(Path("/f"), b"from a file")
        await store.create("a/1", b"0123")
        await store.create("a/file", FileSource(files, Path("/f"), 11))
        with pytest.raises(AlreadyExists):
            await store.create("a/1", b"0123")
        assert (await store.read("a/1", 1, 2), await store.read("a/1", 3), await store.size("a/file")) == (
            b"12", b"3", 11,
        )  # fmt: skip
        tag = await store.swap("head", None, b"one")
        assert (await store.load("head")).tag == tag
        for wrong in (None, "other"):
            with pytest.raises(Conflict):
                await store.swap("head", wrong, b"two")
        await store.swap("head", tag, b"two")
        await store.replace("hint", b"x")
        assert [entry.key for entry in await store.list("a/")] == ["a/1", "a/file"]
        await store.delete("a/1")
        await store.delete("a/1")
        with pytest.raises(NotFound):
            await store.load("a/1")
        with pytest.raises(StoreError):
            await store.load("../a")
        with pytest.raises(StoreError):
            await store.create("b", FileSource(files, Path("/f"), 12))
        assert world.loop.time() > 0

    simulate(body)


async def outcomes(world: World) -> list[str]:
    told = []
    for i in range(60):
        try:
            await world.store.create(f"k{i}", b"x")
            told.append("done")
        except Unavailable as error:
            told.append(str(error).split()[-1])
    await asyncio.sleep(1000)
    landed = [f"k{i}" in world.bucket.objects for i in range(60)]
    assert all(ok for word, ok in zip(told, landed, strict=True) if word == "done")
    return [f"{word}:{ok}" for word, ok in zip(told, landed, strict=True)]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("store_lost", {"done:True", "arrive:False"}),
        ("store_unknown", {"done:True", "answered:True"}),
        ("store_late", {"done:True", "late:True"}),
        ("store_twice", {"done:True"}),
    ],
)
def test_what_is_told_and_what_landed(fault: str, expected: set[str]) -> None:
    plan = FaultPlan(**{fault: 0.4})
    runs = [simulate(outcomes, plan, seed) for seed in (1, 1, 2)]
    assert set(runs[0]) == expected
    assert runs[0] == runs[1]
    assert fault == "store_twice" or runs[0] != runs[2]


def test_a_late_swap_lands_after_its_caller_was_told_otherwise_and_keeps_its_condition() -> None:
    async def body(world: World) -> tuple[bool, bool]:
        first = SimulatedBucket.put
        first(world.bucket, "head", b"old")
        store = world.store
        tag = (await store.load("head")).tag
        with pytest.raises(Unavailable):
            await store.swap("head", tag, b"mine")
        told = world.loop.time()
        seen_old = world.bucket.objects["head"] == b"old"
        other = SimulatedStore(world.bucket, SimulatedProcess(world.loop, "other"))
        await asyncio.sleep(10)
        moved = b"mine"
        if world.bucket.objects["head"] == b"old":
            world.bucket.put("head", b"theirs")
            moved = b"theirs"
        await asyncio.sleep(200)
        assert (await other.load("head")).data == moved
        landed = [time for time, _, data in world.writes if data == b"mine"]
        assert all(time >= told for time in landed)
        return seen_old, moved == b"mine"

    found = {
        simulate(body, FaultPlan(store_late=1.0, quiet_after=0.5, late=20.0), seed) for seed in range(20)
    }
    assert found == {(True, True), (True, False)}


def test_a_sent_write_outlives_its_caller() -> None:
    async def body(world: World) -> bool:
        task = world.loop.create_task(
            world.bucket.store(SimulatedProcess(world.loop, "q")).create("cancelled", b"")
        )
        await asyncio.sleep(0.1)
        task.cancel()
        world.process.spawn(world.store.create("killed", b""))
        await asyncio.sleep(0.1)
        world.process.kill()
        with pytest.raises(Crash):
            await world.store.load("x")
        await asyncio.sleep(1000)
        assert "cancelled" in world.bucket.objects
        return "killed" in world.bucket.objects

    assert {simulate(body, FaultPlan(latency=50.0), seed) for seed in range(10)} == {True, False}


def test_outages_end_and_nothing_new_goes_wrong_when_it_is_quiet() -> None:
    async def body(world: World) -> None:
        other = world.bucket.store(SimulatedProcess(world.loop, "other"))
        await world.store.replace("a", b"")
        await asyncio.sleep(10)
        with pytest.raises(Unavailable):
            await world.store.load("a")
        await other.load("a")
        while world.loop.time() < 100:
            with pytest.raises(Unavailable):
                await world.store.load("a")
        await asyncio.sleep(50)
        for _ in range(50):
            await world.store.load("a")

    simulate(body, FaultPlan(outages=(Outage(5, 100, "p"),), timeout=1.0))

    async def quiet(world: World) -> None:
        await asyncio.sleep(10)
        for i in range(50):
            await world.store.create(f"k{i}", b"")

    simulate(quiet, FaultPlan(store_lost=1.0, store_late=1.0, quiet_after=10.0))


def test_an_observer_can_end_the_simulation() -> None:
    async def body(world: World) -> None:
        def observe(key: str, old: bytes | None, new: bytes | None, who: str) -> None:
            assert new != b"bad", f"{who} wrote {key}"

        world.bucket.observers.append(observe)
        await world.store.create("good", b"good")
        await world.store.create("k", b"bad")

    with pytest.raises(AssertionError, match="p wrote k"):
        simulate(body)
