"""Wall clocks jump by hours, here or at replicas: nobody is evicted, forgotten, held or refused for it."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from stitch_core.replica.admission import Gate
from stitch_core.replica.service import Announcer, replica_key
from stitch_core.stores.memory import MemoryStore
from stitch_core.versions import PolicyVersion, VersionConstraint
from stitch_gateway.pools import LONG_GONE, LONGEST_UNREAD, StorePool
from tests.gateway.fleet import Fleet
from tests.gateway.test_affinity import home
from tests.replica.following import Following
from tests.virtual_time import LoopClock

HOURS = 5 * 3600.0
LIFETIME = 15.0


class Clock:
    """Two clocks, as a machine has them; ``wall`` may be set by anyone."""

    def __init__(self) -> None:
        self.wall, self.steady = 1_000_000.0, 50.0

    def time(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.steady

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds


class World:
    """Records in a store, written by replicas with clocks of their own, and a gateway's pool."""

    def __init__(self) -> None:
        self.store, self.clock = MemoryStore(), Clock()
        self.pool = StorePool(self.store, self.clock)

    async def announce(self, id_: str, *, ahead: float = 0.0) -> None:
        """Write the record as a replica does whose clock is so many seconds ahead."""
        now = self.clock.wall + ahead
        record = {"id": id_, "address": f"http://{id_}:1", "time": now, "expires": now + LIFETIME}
        await self.store.replace(f"replicas/{id_}.json", json.dumps(record).encode())

    async def names(self) -> set[str]:
        return {address.id for address in await self.pool.replicas()}

    async def lives(self, seconds: float, *ids: str, ahead: float = 0.0) -> list[set[str]]:
        """What the pool says while these replicas renew their records and others do not."""
        seen = []
        for _ in range(round(seconds / 5)):
            self.clock.passes(5)
            for id_ in ids:
                await self.announce(id_, ahead=ahead)
            seen.append(await self.names())
        return seen


@pytest.mark.parametrize("jump", [HOURS, -HOURS])
async def test_the_gateways_clock_jumps(jump: float) -> None:
    world = World()
    await world.announce("a")
    assert await world.names() == {"a"}
    world.clock.wall += jump
    assert await world.names() == {"a"}
    # The replica's clock jumped with it (a host that both are on), or did not.
    for ahead in (0.0, -jump):
        assert all(names == {"a"} for names in await world.lives(120, "a", ahead=ahead))


@pytest.mark.parametrize("ahead", [HOURS, -HOURS])
async def test_a_replica_whose_clock_is_hours_off_is_found_and_lost_like_any_other(ahead: float) -> None:
    world = World()
    await world.announce("a", ahead=ahead)
    seen = await world.lives(2 * LONGEST_UNREAD, "a", ahead=ahead)
    assert seen[-1] == {"a"}
    assert seen[round(LONGEST_UNREAD / 5)] == {"a"}, "one whose record looks old is believed once it changes"
    assert all(names == {"a"} for names in await world.lives(LONG_GONE * 2, "a", ahead=ahead))
    # It is killed: ten minutes and what its record was good for later it is no more.
    seen = await world.lives(LONG_GONE + 2 * LONGEST_UNREAD)
    assert seen[round(LONG_GONE / 5) - 1] == {"a"}
    assert seen[-1] == set()


@pytest.mark.parametrize("jump", [HOURS, -HOURS])
async def test_a_gateway_that_starts_with_a_wrong_clock_finds_the_living_and_loses_the_dead(
    jump: float,
) -> None:
    world = World()
    await world.announce("dead")
    world.clock.passes(2 * LONG_GONE)
    await world.announce("a")
    world.clock.wall += jump
    seen = await world.lives(2 * LONGEST_UNREAD, "a", ahead=-jump)
    assert "a" in seen[-1]
    assert (await world.lives(LONG_GONE + LONGEST_UNREAD, "a", ahead=-jump))[-1] == {"a"}


async def test_the_records_of_dead_replicas_are_not_read_at_every_look() -> None:
    world, reads = World(), 0
    load = world.store.load

    async def counted(key: str) -> Any:
        nonlocal reads
        reads += 1
        return await load(key)

    world.store.load = counted  # type: ignore[method-assign]
    for number in range(100):
        await world.announce(f"dead-{number}")
    world.clock.passes(2 * LONG_GONE)
    for _ in range(30):
        world.clock.passes(1)
        assert await world.names() == set()
    assert reads <= 300


def jumping(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the wall clock of this process off by so many seconds; the monotonic one goes on."""
    real, off = time.time, 0.0

    def jump(seconds: float) -> None:
        nonlocal off
        off = seconds

    monkeypatch.setattr(time, "time", lambda: real() + off)
    return jump


async def test_requests_are_held_as_long_as_was_said(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    jump = jumping(monkeypatch)
    server = fleet.add(7)
    await fleet.start(hold=1.5)
    began = asyncio.get_running_loop().time()
    asked = {"text": "hi", "weight_version": {"min_version": 8}}
    lost = asyncio.ensure_future(fleet.post(asked))
    await fleet.until(lambda: len(fleet.gateway.dispatcher.held) == 1)
    jump(HOURS)
    await asyncio.sleep(0.1)
    jump(-HOURS)
    assert not lost.done() or asyncio.get_running_loop().time() - began > 1.45
    status, value = await lost
    assert (status, value["error"]["type"]) == (409, "WeightVersionNotReady")
    assert 1.45 < asyncio.get_running_loop().time() - began < 60
    kept = asyncio.ensure_future(fleet.post(asked))
    await fleet.until(lambda: len(fleet.gateway.dispatcher.held) == 1)
    jump(HOURS)
    server.serves(8)
    assert (await kept)[0] == 200
    assert fleet.gateway.fleet.evictions == 0
    assert all(replica.ready for replica in fleet.gateway.fleet.replicas)


async def test_sessions_stay_where_they_are(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    jump = jumping(monkeypatch)
    for _ in range(4):
        fleet.add()
    await fleet.start()
    homes = [await home(fleet, x_stitch_session=f"s{i}") for i in range(12)]
    for seconds in (HOURS, -HOURS):
        jump(seconds)
        await asyncio.sleep(0.05)
        assert [await home(fleet, x_stitch_session=f"s{i}") for i in range(12)] == homes


class Jumping(LoopClock):
    """Whose wall clock is off by so many seconds."""

    off = 0.0

    def time(self) -> float:
        return super().time() + self.off


@pytest.mark.virtual_time
async def test_a_gate_waits_by_the_monotonic_clock() -> None:
    clock = Jumping()
    gate = Gate(clock, hold=0.3)
    gate.open(PolicyVersion("r", 7))
    gate.close("a pause")
    waiting = asyncio.ensure_future(gate.admit(VersionConstraint(), "x"))
    await asyncio.sleep(0)
    for clock.off in (HOURS, -HOURS):
        await asyncio.sleep(0.02)
        assert not waiting.done()
    gate.open(PolicyVersion("r", 7))
    ticket = await waiting
    assert ticket in gate._tickets
    drained = asyncio.ensure_future(gate.drain(clock.monotonic() + 30, pins_only=False))
    clock.off = HOURS
    await asyncio.sleep(0.02)
    assert not drained.done()
    gate.release(ticket)  # type: ignore[arg-type]
    assert await drained == []


@pytest.mark.virtual_time
@pytest.mark.parametrize("jump", [HOURS, -HOURS])
async def test_a_replica_goes_on_announcing_itself_and_gateways_go_on_seeing_it(
    tmp_path: Path, jump: float
) -> None:
    f = Following(tmp_path)
    clock = f.reconciler.clock = Jumping()
    await f.publish()
    announcer = Announcer(f.store, f.reconciler, "one", "http://here:1", lifetime=0.09)
    pool = StorePool(f.store, clock, long_gone=30.0)
    announcing = asyncio.ensure_future(announcer.run())

    async def renewed() -> float:
        """When the replica says that it renewed its record, once it has done so three times more."""
        records: set[float] = set()
        while len(records) < 4:
            records.add(json.loads((await f.store.load(replica_key("one"))).data)["time"])
            assert [address.id for address in await pool.replicas()] == ["one"]
            await asyncio.sleep(0.01)
        return clock.time() - max(records)

    try:
        await asyncio.sleep(0.02)
        for clock.off in (0.0, jump, 0.0):
            await renewed()
            assert abs(await renewed()) < 1.0
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)
