"""Anchors: when a full is due, who uploads it, and that a replica which moves on never leaves half of one."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stitch_core.anchors import LEASE_SECONDS, Abandoned, Anchors, GuardedFiles, Lease
from stitch_core.checkpoint import Checkpoint
from stitch_core.ports import Capabilities, StoreError, SystemClock, Unavailable
from stitch_core.records import list_records, read_record
from stitch_core.replica.anchoring import ReplicaAnchors
from stitch_core.retry import Retry
from stitch_core.stores.local import LocalStore
from stitch_core.stores.memory import MemoryStore
from tests.anchored_run import HandClock, Run
from tests.replica.following import Following
from tests.small_run import FILES, inline

ONCE = Retry(attempts=1)


def anchors(run: Run, name: str = "job", every: int = 3) -> Anchors:
    return Anchors(
        run.store, name, every=every, clock=run.clock, rng=random.Random(0), run_blocking=inline, policy=ONCE
    )


@pytest.fixture
async def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    await run.claim()
    await run.publish(4)
    return run


async def test_a_full_is_due_every_so_many_versions(run: Run) -> None:
    job = anchors(run)
    assert not await job.due(run.versions[2])
    assert "list" not in [name for name, _ in run.store.calls[-1:]]
    assert await job.due(run.versions[3])
    await run.anchor(2)
    assert not await job.due(run.versions[4])
    await run.publish(1)
    assert await job.due(run.versions[5])
    assert not await anchors(run, every=6).due(run.versions[5])


async def test_one_of_many_uploads_it(run: Run) -> None:
    jobs = [anchors(run, f"job{i}") for i in range(6)]
    path = run.directory(4)
    done = await asyncio.gather(*(job.anchor(run.versions[4], path, FILES) for job in jobs))
    assert [one.new for one in done].count(True) == 1
    creates = [key for name, key in run.store.calls if name == "create" and "/fulls/" in key]
    assert len(creates) == len(set(creates)), "no byte was sent twice"
    assert len(await list_records(run.memory, "r")) == 1
    again = await anchors(run, "late").anchor(run.versions[4], path, FILES)
    assert (again.new, again.record is not None) == (False, True)


async def test_a_lease_expires_with_its_holder(run: Run) -> None:
    dead, other = (Lease(run.memory, "r", name, run.clock) for name in ("dead", "other"))
    assert await dead.take()
    assert not await other.take()
    assert await dead.take(), "its own is renewed"
    run.clock.now += LEASE_SECONDS + 1
    assert await other.take()
    assert not await dead.take()


async def test_a_lease_of_a_clock_far_ahead_or_one_that_cannot_be_read_holds_nobody(run: Run) -> None:
    ahead = HandClock()
    ahead.now = run.clock.now + 100 * LEASE_SECONDS
    assert await Lease(run.memory, "r", "ahead", ahead).take()
    assert await Lease(run.memory, "r", "a", run.clock).take()
    run.memory.state.objects["runs/r/fulls/lease"] = b"[]"
    assert await Lease(run.memory, "r", "b", run.clock).take()


@pytest.mark.parametrize("set_by", [-300.0, 0.0, 7200.0])
async def test_c88_a_lease_ends_by_the_stores_time_whatever_clocks_are_set_to(
    run: Run, tmp_path: Path, set_by: float
) -> None:
    """A clock that was set back by five minutes left a dead job's lease in force for six."""
    clock = HandClock()
    clock.now = time.time() + set_by
    store = LocalStore(tmp_path / "store", run_blocking=inline)
    dead, other = Lease(store, "r", "dead", SystemClock()), Lease(store, "r", "other", clock)
    assert await dead.take()
    assert not await other.take()
    key = tmp_path / "store" / "runs" / "r" / "fulls" / "lease"
    os.utime(key, (time.time() - LEASE_SECONDS - 1,) * 2)
    assert await other.take()
    await other.give_back()
    assert await dead.take(), "given back"


async def test_without_compare_and_swap_there_is_no_lease(run: Run) -> None:
    class NoSwap(MemoryStore):
        capabilities = Capabilities(conditional_writes=False)

        async def swap(self, key: str, expected: str | None, data: bytes) -> str:
            raise StoreError("cannot compare and swap")

    store = NoSwap()
    for name in ("a", "b"):
        assert await Lease(store, "r", name, run.clock).take()


# --------------------------------------------------------------------------------------------- the guard


def test_a_revoked_guard_reads_nothing(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"data")
    guard = GuardedFiles(FILES)
    assert guard.read(tmp_path / "x") == b"data"
    assert guard.exists(tmp_path / "x")
    guard.check()
    guard.revoke()
    for call in (guard.check, lambda: guard.read(tmp_path / "x"), lambda: guard.size(tmp_path / "x")):
        with pytest.raises(Abandoned):
            call()


class Replica(Following):
    """A replica that uploads a full every two versions."""

    def __init__(self, root: Path, scratch: Path | None = None) -> None:
        self.told: list[str] = []
        self.scratch = scratch
        super().__init__(root)

    def start(self) -> None:
        job = Anchors(
            self.store, "replica", every=2, clock=HandClock(), rng=random.Random(0), run_blocking=inline,
            policy=ONCE,
        )  # fmt: skip
        self.anchors = ReplicaAnchors(
            job, files=FILES, run_blocking=inline, scratch=self.scratch, say=self.told.append
        )
        self.options["anchors"] = self.anchors
        super().start()

    async def settled(self) -> None:
        if self.anchors._task is not None:
            await asyncio.gather(self.anchors._task, return_exceptions=True)

    async def fulls(self) -> list[int]:
        """Versions that have a full, each checked to its bytes."""
        found = []
        for place in await list_records(self.memory, "r"):
            if place.key is None:
                continue
            record = await read_record(self.memory, place)
            target = self.root / "check" / place.digest[7:]
            target.mkdir(parents=True, exist_ok=True)
            for file in record.representation.files:
                data = self.memory.state.objects[record.file_key(file.name)]
                (target / file.name).write_bytes(data)
            assert Checkpoint.open(target, FILES).state() == record.state
            found.append(record.number)
        return sorted(found)


async def test_a_replica_uploads_what_it_staged_while_it_serves(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    for _ in range(5):
        await replica.publish()
        await replica.catch_up()
        await replica.settled()
    assert await replica.fulls() == [2, 4]
    assert len([text for text in replica.told if text.startswith("uploaded a full")]) == 2


@pytest.mark.parametrize("at", range(16))
async def test_the_next_version_ends_an_upload_and_waits_for_nothing(tmp_path: Path, at: int) -> None:
    """At whichever call it is: what was uploaded is the version, or there is no record of it at all."""
    replica = Replica(tmp_path)
    await replica.publish()
    await replica.publish()
    do, gate, calls = replica.store._do, asyncio.Event(), []

    async def held(name: str, key: str, call: Callable[[], Any]) -> Any:
        if "/fulls" in key:
            calls.append(name)
            if len(calls) == at + 1:
                await gate.wait()
        return await do(name, key, call)

    replica.store._do = held  # type: ignore[method-assign]
    await replica.catch_up()
    while len(calls) <= at and not replica.anchors._task.done():  # type: ignore[union-attr]  # noqa: ASYNC110
        await asyncio.sleep(0)
    third = await replica.publish()
    async with asyncio.timeout(60):
        await replica.catch_up()
    replica.check(third)
    gate.set()
    await replica.settled()
    documents = [
        key
        for key in replica.memory.state.objects
        if key.startswith("runs/r/fulls/0") and key.count("/") == 3
    ]
    assert await replica.fulls() == ([2] if documents else [])
    assert documents or at < 12
    assert not documents or at > 8
    # Given up, it is not begun again at each version.
    fourth = await replica.publish()
    await replica.catch_up()
    await replica.settled()
    replica.check(fourth)
    assert 4 in await replica.fulls()


async def test_bytes_that_change_under_the_upload_are_never_in_the_store(tmp_path: Path) -> None:
    """The write that the store carries out late still reads the files: the guard stops it."""
    replica = Replica(tmp_path)
    await replica.publish()
    await replica.publish()
    create, sources = replica.memory.create, []

    async def late(key: str, source: Any) -> None:
        if "/fulls/" in key:
            sources.append(source)
            await asyncio.sleep(3600)
        await create(key, source)

    replica.memory.create = late  # type: ignore[method-assign]
    await replica.catch_up()
    async with asyncio.timeout(60):
        while not sources:  # noqa: ASYNC110
            await asyncio.sleep(0)
    third = await replica.publish()
    await replica.catch_up()
    replica.check(third)
    await replica.settled()
    source = sources[0]
    with pytest.raises(OSError, match="moves on"):
        source.files.read(source.path)
    assert await replica.fulls() == []


async def test_from_scratch_space_only_the_copy_can_be_ended(tmp_path: Path) -> None:
    replica = Replica(tmp_path, tmp_path / "scratch")
    await replica.publish()
    await replica.publish()
    gate, create = asyncio.Event(), replica.memory.create

    async def held(key: str, source: Any) -> None:
        if "/fulls/" in key:
            await gate.wait()
        await create(key, source)

    replica.memory.create = held  # type: ignore[method-assign]
    await replica.catch_up()
    for _ in range(50):
        await asyncio.sleep(0)
    for _ in range(3):
        await replica.publish()
        await replica.catch_up()
    gate.set()
    await replica.settled()
    assert await replica.fulls() == [2]
    assert not (tmp_path / "scratch" / "anchor").exists()


async def test_a_store_that_fails_costs_the_replica_nothing(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    await replica.publish()
    newest = await replica.publish()

    def fail(index: int, name: str, key: str) -> Exception | None:
        return Unavailable("no") if "/fulls" in key else None

    replica.store.fail = fail
    await replica.catch_up()
    await replica.settled()
    replica.check(newest)
    assert replica.told == ["no full of r/weight_v000002 was uploaded: no"]
    await replica.anchors.close()
