"""Waiting until replicas serve a version, by the records that they leave in the store.

Records are hints: they say that the fleet follows, and nothing that has to be true rests on them.
"""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass
from typing import Any

from .digits import decimal, whole
from .hints import RECORDS
from .manifest import read_time
from .ports import Clock, Store, StoreError
from .versions import directory_name

PAUSE = 1.0
PARALLEL_READS = 16


@dataclass(frozen=True)
class Fleet:
    """What the live replicas of a run said last: ``there`` of their version or later, of ``live`` in all."""

    there: int
    live: int

    def enough(self, wanted: int | float) -> bool:
        """Whether as many are there as asked for: a number, or (a float) a fraction of those that live.

        A fraction of no replicas is never enough: a fleet that is still starting is waited for.
        """
        need = wanted if isinstance(wanted, int) else max(1, math.ceil(wanted * self.live - 1e-9))
        return self.there >= need


def read_wanted(text: str) -> int | float:
    """``3`` is three replicas, ``0.5`` half of those that live, ``1.0`` all of them. Raises ValueError."""
    value: int | float = decimal(text) if "." in text else whole(text)
    problem = wanted_problem(value)
    if problem:
        raise ValueError(problem)
    return value


def wanted_problem(value: object) -> str | None:
    """What is wrong with a number or fraction of replicas; None if nothing is."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return None
    if isinstance(value, float) and 0 < value <= 1:
        return None
    return (
        f"expected a number of replicas from 1 on, or a fraction up to 1.0 of those that live, got {value!r}"
    )


@dataclass(frozen=True)
class Seen:
    """A record as it was read last, and until when (wall time here) its replica counts as alive."""

    data: bytes
    until: float


async def fleet(
    store: Store, run: str, number: int, now: float, seen: dict[str, Seen] | None = None
) -> Fleet:
    """The replicas that serve ``run``, or fetch it to serve it. Raises StoreError.

    ``now`` is wall time: a record that has expired is of a replica that is late or gone, and counts for
    nothing. ``seen``: the records of the look before, by key, and then of this one; a replica that was there
    is not read again until its record expires, so that of 1,000 only those are that have yet to come. One
    that changed since the look before is of a living replica, whatever the replica's clock says.
    """
    limit = asyncio.Semaphore(PARALLEL_READS)

    async def one(key: str) -> tuple[str, bytes | None]:
        async with limit:
            try:
                return key, (await store.load(key)).data
            except StoreError:
                return key, None  # it left meanwhile, or it is counted the next time

    keys = [entry.key for entry in await store.list(RECORDS)]
    before = seen or {}
    records = {key: before[key] for key in keys if key in before and _there(before[key], run, number, now)}
    found = await asyncio.gather(*(one(key) for key in keys if key not in records))
    records |= {key: _seen(data, before.get(key), now) for key, data in found if data is not None}
    if seen is not None:
        seen.clear()
        seen.update(records)
    live = [each for record in records.values() if (each := _there(record, run, number, now)) is not None]
    return Fleet(sum(live), len(live))


def _seen(data: bytes, before: Seen | None, now: float) -> Seen:
    if before is not None and before.data == data:
        return before
    try:
        record: Any = json.loads(data)
        expires = read_time(record["expires"], "expires")
        # Both times are of the replica's own clock, so that their difference is right even if it is not.
        lifetime = expires - read_time(record.get("time", now), "time")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Seen(data, now)
    return Seen(data, min(expires, now + lifetime) if before is None else now + lifetime)


def _there(seen: Seen, run: str, number: int, now: float) -> bool | None:
    """Whether the replica of a record serves the version or a later one; None: it counts for nothing."""
    if now >= seen.until:
        return None
    try:
        record: Any = json.loads(seen.data)
        applied = record["applied"] if record["run"] == run else None
        if applied is None and not str(record["target"]).startswith(f"{run}/"):
            return None
        return applied is not None and bool(applied >= number)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


async def wait_for_replicas(
    store: Store, run: str, number: int, wanted: int | float, timeout: float, *, clock: Clock
) -> str | None:
    """Wait until ``wanted`` replicas serve version ``number`` of ``run`` or a later one.

    None when they do; after ``timeout`` seconds what is missing, in words. It never raises for the store:
    what cannot be read now is read again.
    """
    deadline = clock.monotonic() + timeout
    seen, problem = Fleet(0, 0), ""
    records: dict[str, Seen] = {}
    while True:
        try:
            seen = await fleet(store, run, number, clock.time(), records)
            problem = ""
        except StoreError as error:
            problem = f" ({error})"
        if seen.enough(wanted):
            return None
        left = deadline - clock.monotonic()
        if left <= 0:
            asked = f"{wanted} were asked for" if isinstance(wanted, int) else f"{wanted:.0%} were asked for"
            return (
                f"{run}/{directory_name(number)} is published, but after {timeout:g} s {seen.there} of "
                f"{seen.live} live replicas serve it, {asked}{problem}"
            )
        await asyncio.sleep(min(PAUSE, left))
