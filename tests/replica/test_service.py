"""A replica's life around the reconciler: announced while it lives, gone in order, never silently dead."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from stitch_core.ports import EngineUncertain, StoreError, Unavailable, WriteRefused
from stitch_core.replica.activation import ReplicaFailed
from stitch_core.replica.server import ServerEnded
from stitch_core.replica.service import Announcer, live, replica_key
from stitch_core.replica.staging import WrongBase
from stitch_core.testing.loop import simulated_loop
from stitch_core.versions import Refusal, VersionConstraint
from tests.replica.following import Following
from tests.small_run import Trainer
from tests.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time

KEY = "replicas/one.json"


@pytest.fixture
async def f(tmp_path: Path) -> Following:
    following = Following(tmp_path)
    await following.publish()
    return following


class Life:
    """``live`` with a server that only notes what becomes of it."""

    def __init__(
        self, f: Following, *, drain: float = 5.0, announced: bool = True, lifetime: float = 0.06
    ) -> None:
        self.f = f
        self.stop = asyncio.Event()
        self.events: list[str] = []
        self.announcer = (
            Announcer(f.store, f.reconciler, "one", "http://here:1", lifetime=lifetime) if announced else None
        )
        gate, clock = f.gate, LoopClock()
        self.task = asyncio.ensure_future(
            live(f.reconciler, self.announcer, self.stop, self.serve, gate=gate, clock=clock, drain=drain)
        )

    async def serve(self, end: asyncio.Event) -> None:
        self.events.append("serving")
        await end.wait()
        self.events.append("ended")

    @property
    def record(self) -> dict[str, Any] | None:
        data = self.f.memory.state.objects.get(KEY)
        return None if data is None else json.loads(data)


async def test_announced_while_it_lives(f: Following) -> None:
    life = Life(f)
    await f.serves(f.versions[1])
    await f.until(lambda: life.record is not None and life.record["applied"] == 1)
    assert life.record is not None
    assert (life.record["id"], life.record["address"]) == ("one", "http://here:1")
    first = life.record["expires"]
    await f.until(lambda: life.record is not None and life.record["expires"] > first)
    newest = await f.publish()
    f.reconciler.wake()
    await f.serves(newest)
    await f.until(lambda: life.record is not None and life.record["applied"] == 2)
    life.stop.set()
    await life.task
    assert life.record is None
    assert life.events == ["serving", "ended"]


async def test_stops_in_order(f: Following) -> None:
    """Out of rotation, record gone, what runs ends, and only then the server."""
    life = Life(f)
    await f.serves(f.versions[1])
    ticket = await f.admit()
    life.stop.set()
    await f.until(lambda: life.record is None)
    assert not f.gate.ready
    refusal = await f.gate.admit(VersionConstraint(), "late")
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.retry) == (503, "elsewhere")
    await asyncio.sleep(0.02)
    assert life.events == ["serving"]
    f.gate.release(ticket)
    await life.task
    assert ticket.revoked is None
    assert life.events == ["serving", "ended"]


async def test_a_request_that_outlives_the_drain_is_given_up(f: Following) -> None:
    life = Life(f, drain=0.02)
    await f.serves(f.versions[1])
    ticket = await f.admit()
    life.stop.set()
    await life.task
    assert ticket.revoked is not None


async def test_a_failed_replica_ends_and_says_why(f: Following) -> None:
    async def fail() -> None:
        raise EngineUncertain("half copied")

    f.engine.before["activate"] = fail
    life = Life(f)
    with pytest.raises(ReplicaFailed, match="half copied"):
        await life.task
    assert life.record is None
    assert life.events == ["serving", "ended"]


async def test_a_wrong_base_ends_it(tmp_path: Path) -> None:
    f = Following(tmp_path)
    other = Trainer(tmp_path / "other", seed=9)
    await other.publisher(f.memory).claim(other.version0)
    with pytest.raises(WrongBase, match="is not version 0 of run r"):
        await Life(f).task


async def test_a_server_that_ends_takes_the_replica_along(f: Following) -> None:
    async def broken(end: asyncio.Event) -> None:
        raise ServerEnded("it ended by itself")

    with pytest.raises(ServerEnded):
        await live(f.reconciler, None, asyncio.Event(), broken, gate=f.gate, clock=LoopClock())
    assert not f.gate.ready


async def test_a_store_that_is_down_only_ages_the_record(f: Following) -> None:
    life = Life(f)
    await f.serves(f.versions[1])
    await f.until(lambda: life.record is not None)
    f.store.fail = lambda *_: "before"
    await asyncio.sleep(0.1)
    assert not life.task.done()
    f.check(f.versions[1])
    life.stop.set()
    await life.task


async def test_without_an_announcer(f: Following) -> None:
    life = Life(f, announced=False)
    await f.serves(f.versions[1])
    life.stop.set()
    await life.task
    assert life.record is None


async def test_a_record_that_is_being_written_does_not_come_back(f: Following) -> None:
    """A write in a thread cannot be cancelled: it must have landed before the record is removed."""
    go, writing = asyncio.Event(), asyncio.Event()
    original: Callable[..., Awaitable[None]] = f.store.replace

    async def slow(key: str, data: bytes) -> None:
        writing.set()
        landing = asyncio.ensure_future(go.wait())
        landing.add_done_callback(lambda _: f.memory.state.objects.__setitem__(key, data))
        await asyncio.shield(landing)

    f.store.replace = slow  # type: ignore[method-assign]
    life = Life(f)
    await writing.wait()
    life.stop.set()
    await asyncio.sleep(0.01)
    go.set()
    await life.task
    assert original is not None
    assert life.record is None


def fetches_of(f: Following, life: Life) -> list[list[str]]:
    """What the record said that is being fetched, whenever the store was asked for a byte of payload."""
    said: list[list[str]] = []

    def asked(index: int, name: str, key: str) -> None:
        if name == "read" and "/weight_v" in key:
            said.append(life.record["fetching"] if life.record else [])

    f.store.fail = asked
    return said


async def test_c81_a_fetch_began_before_the_record_said_so(f: Following) -> None:
    """A collector that looked meanwhile found nothing of it, for up to 5 s, and deleted what was fetched."""
    life = Life(f, lifetime=15.0)
    said = fetches_of(f, life)
    await f.serves(f.versions[1])
    newest = await f.publish()
    f.reconciler.wake()
    await f.serves(newest)
    assert said
    assert {digest for fetching in said for digest in fetching} == {m.digest() for m in f.versions[1:]}
    assert [] not in said
    life.stop.set()
    await life.task


@pytest.mark.parametrize(
    "error", [Unavailable("for a moment"), WriteRefused("by credentials that only read")]
)
async def test_c81_where_the_record_cannot_be_written_it_fetches_all_the_same(
    f: Following, error: StoreError
) -> None:
    """After a failure of the store that may pass it is tried again first; the collector's grace protects."""
    life = Life(f, lifetime=15.0)
    said = fetches_of(f, life)
    watched, tries = f.store.fail, 0

    def refuses(index: int, name: str, key: str) -> StoreError | None:
        nonlocal tries
        if name == "replace":
            tries += 1
            if tries <= 3 or isinstance(error, WriteRefused):
                return error
        return watched(index, name, key)

    f.store.fail = refuses
    await f.serves(f.versions[1])
    assert ([] in said) == isinstance(error, WriteRefused)
    life.stop.set()
    await life.task


async def test_c81_a_record_whose_write_hangs_keeps_no_replica_from_fetching(f: Following) -> None:
    async def hang(key: str, data: bytes) -> None:
        await asyncio.Event().wait()

    f.store.replace = hang  # type: ignore[method-assign]
    life = Life(f, lifetime=15.0)
    began = asyncio.get_running_loop().time()
    await f.serves(f.versions[1])
    assert asyncio.get_running_loop().time() - began >= 15.0
    life.stop.set()
    await life.task


async def test_withdrawing_does_not_wait_for_ever(f: Following) -> None:
    announcer = Announcer(f.store, f.reconciler, "one", "http://x", lifetime=0.02)

    async def hang(key: str, data: bytes) -> None:
        await asyncio.sleep(3600)

    f.store.replace = hang  # type: ignore[method-assign]
    running = asyncio.ensure_future(announcer.run())
    await asyncio.sleep(0)
    await announcer.withdraw()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_withdrawing_from_a_store_that_is_down(f: Following) -> None:
    f.store.fail = lambda *_: Unavailable("down")
    await Announcer(f.store, f.reconciler, "one", "http://x").withdraw()


async def test_a_record_that_a_collector_took_is_written_anew(f: Following) -> None:
    """Its replica stood still for longer than the grace, say, and nothing tells it what is gone."""
    life = Life(f)
    await f.serves(f.versions[1])
    for _ in range(3):
        await f.until(lambda: life.record is not None)
        await f.memory.delete(KEY)
        assert life.record is None
    await f.until(lambda: life.record is not None and life.record["applied"] == 1)
    life.stop.set()
    await life.task


def test_a_fleet_that_was_started_at_once_does_not_renew_its_records_in_the_same_second(f: Following) -> None:
    seconds: Counter[int] = Counter()

    async def count(key: str, data: bytes) -> None:
        seconds[int(asyncio.get_running_loop().time())] += 1

    f.store.replace = count  # type: ignore[method-assign]

    async def announce() -> None:
        fleet = [Announcer(f.store, f.reconciler, f"replica-{n}", "http://x").run() for n in range(100)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(120):
                await asyncio.gather(*fleet)

    with simulated_loop(random.Random(1)) as loop:
        loop.run_until_complete(announce())
    assert seconds[0] == 100
    later = [seconds[at] for at in range(30, 120)]
    assert sum(later) / len(later) >= 100 / 5  # each well before its record expires, after 15 s
    assert max(later) < 2 * sum(later) / len(later)


def test_replica_ids_are_checked() -> None:
    assert replica_key("a-1") == "replicas/a-1.json"
    for bad in ("", "../x", "a/b", ".a"):
        with pytest.raises(ValueError, match="run id"):
            replica_key(bad)
