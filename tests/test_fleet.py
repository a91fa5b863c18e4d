"""Waiting for replicas: expired, foreign and broken records count for nothing; every wait ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from stitch_core.fleet import Fleet, Seen, fleet, read_wanted, wait_for_replicas
from stitch_core.ports import Blob, Entry, Unavailable
from stitch_core.stores.memory import MemoryStore


class Ticking:
    """A clock that goes on by itself: no test waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return 1000.0 + self.now

    def monotonic(self) -> float:
        self.now += 0.25
        return self.now


def record(applied: int | None, run: str | None = "r", target: str | None = None, **more: Any) -> bytes:
    return json.dumps({"run": run, "applied": applied, "target": target, "expires": 1060.0} | more).encode()


def count(records: list[bytes], run: str, number: int, now: float) -> Fleet:
    async def look() -> Fleet:
        store = MemoryStore()
        for i, data in enumerate(records):
            await store.replace(f"replicas/{i}.json", data)
        return await fleet(store, run, number, now)

    return asyncio.run(look())


def test_who_counts() -> None:
    assert count([record(7), record(6), record(8)], "r", 7, 1000.0) == Fleet(2, 3)
    assert count(
        [record(7, "other"), record(7, expires=1000.0), b"{", b"[]", b"{}"], "r", 7, 1000.0
    ) == Fleet(0, 0)
    # One that boots, and one that still serves another run, are of the fleet: they fetch this one.
    booting = record(None, None, "r/weight_v000007")
    leaving = record(90, "other", "r/weight_v000007")
    assert count([booting, leaving, record(None, None, None)], "r", 7, 1000.0) == Fleet(0, 2)
    assert count([record("9"), record(True, expires="x")], "r", 7, 1000.0) == Fleet(0, 0)  # type: ignore[arg-type]
    # A time that no float can hold ended the publisher that waited.
    times: list[Any] = [10**400, float("inf"), float("nan"), True]
    assert count([record(7, expires=time) for time in times], "r", 7, 1000.0) == Fleet(0, 0)
    assert count([record(7, time=time) for time in times], "r", 7, 1000.0) == Fleet(0, 0)


@pytest.mark.parametrize(
    ("wanted", "fleet", "enough"),
    [
        (1, Fleet(1, 9), True),
        (2, Fleet(1, 1), False),
        (0.5, Fleet(1, 2), True),
        (0.5, Fleet(1, 3), False),
        (1.0, Fleet(3, 3), True),
        (0.1, Fleet(1, 10), True),
        (0.3, Fleet(3, 10), True),
        (1.0, Fleet(0, 0), False),
    ],
)
def test_how_many_are_enough(wanted: float, fleet: Fleet, enough: bool) -> None:
    assert fleet.enough(wanted) is enough


def test_numbers_and_fractions_are_told_apart() -> None:
    assert (read_wanted("1"), read_wanted("1.0"), read_wanted("0.25")) == (1, 1.0, 0.25)
    assert isinstance(read_wanted("1"), int)
    for text in ("0", "-1", "1.5", "0.0", "half", "nan."):
        with pytest.raises(ValueError):  # noqa: PT011
            read_wanted(text)


class Store(MemoryStore):
    """Fails its first listings; at the fifth a replica has arrived."""

    listings = 0

    async def list(self, prefix: str) -> list[Entry]:
        self.listings += 1
        if self.listings <= 2:
            raise Unavailable("no answer")
        if self.listings == 5:
            await self.replace("replicas/b.json", record(7))
        return await super().list(prefix)


def test_waits_through_an_outage_until_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stitch_core.fleet.PAUSE", 0.001)

    async def run() -> None:
        store = Store()
        await store.replace("replicas/a.json", record(7))
        assert await wait_for_replicas(store, "r", 7, 2, 60, clock=Ticking()) is None
        assert store.listings == 5

    asyncio.run(run())


def test_a_deadline_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stitch_core.fleet.PAUSE", 0.001)

    async def run() -> None:
        store = MemoryStore()
        await store.replace("replicas/a.json", record(7))
        await store.replace("replicas/b.json", record(6))
        late = await wait_for_replicas(store, "r", 7, 1.0, 5, clock=Ticking())
        assert late == (
            "r/weight_v000007 is published, but after 5 s 1 of 2 live replicas serve it, 100% were asked for"
        )
        away = Store()
        away.listings = -1000
        late = await wait_for_replicas(away, "r", 7, 3, 5, clock=Ticking())
        assert late is not None
        assert late.endswith("0 of 0 live replicas serve it, 3 were asked for (no answer)")

    asyncio.run(run())


def test_who_is_there_is_not_read_again_until_its_record_expires() -> None:
    class Reads(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.keys: list[str] = []

        async def load(self, key: str) -> Blob:
            self.keys.append(key.removeprefix("replicas/").removesuffix(".json"))
            return await super().load(key)

    async def run() -> None:
        store, seen = Reads(), dict[str, Seen]()
        for name, applied in (("a", 7), ("b", 6), ("c", 8)):
            await store.replace(f"replicas/{name}.json", record(applied))
        assert await fleet(store, "r", 7, 1000.0, seen) == Fleet(2, 3)
        assert sorted(store.keys) == ["a", "b", "c"]
        await store.replace("replicas/b.json", record(7))
        await store.delete("replicas/c.json")
        store.keys.clear()
        assert await fleet(store, "r", 7, 1001.0, seen) == Fleet(2, 2)
        assert store.keys == ["b"]
        await store.replace("replicas/a.json", record(7, expires=1120.0))
        store.keys.clear()
        assert await fleet(store, "r", 7, 1060.0, seen) == Fleet(1, 1)
        assert sorted(store.keys) == ["a", "b"]

    asyncio.run(run())


@pytest.mark.parametrize("off", [-7200.0, 7200.0])
def test_a_replica_whose_clock_is_wrong_counts_while_it_renews_its_record(off: float) -> None:
    """One two hours behind was never there, and a trainer that waited for it stopped."""

    async def run() -> None:
        store, seen = MemoryStore(), dict[str, Seen]()

        async def renew(now: float) -> None:
            data = record(7, time=now + off, expires=now + off + 15.0)
            await store.replace("replicas/a.json", data)

        await renew(1000.0)
        found = await fleet(store, "r", 7, 1000.0, seen)
        assert found == (Fleet(0, 0) if off < 0 else Fleet(1, 1))
        for now in (1005.0, 1010.0, 1025.0):
            await renew(now)
            assert await fleet(store, "r", 7, now + 1.0, seen) == Fleet(1, 1)
            assert await fleet(store, "r", 7, now + 4.0, seen) == Fleet(1, 1)
        assert await fleet(store, "r", 7, 1060.0, seen) == Fleet(0, 0), "it ended"

    asyncio.run(run())
