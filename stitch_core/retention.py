"""The collector: deletes the payload of one run that nobody can need any more.

What may go, of what is listed below the run and below ``replicas/``:

- payload, fulls and spans below the **cutoff**: the floor of a version that has been the head's, or before
  it, for longer than the grace period, and never less than two floors down;
- payload that no version of the head's chain refers to, of epochs below the head's. A publisher of such an
  epoch that wakes up can swap nothing: its swap names the head as it was before the claim;
- records of replicas that expired longer than the grace ago. Should one be renewed after all, its replica
  writes it anew within seconds.

Of that it keeps what channels and pins name, with all that is needed to reach it, and what replicas say they
are fetching, by records that expired less than the grace period ago. Any host's clock may be wrong, this
one's too: the store tells what time it is, and dates are their writers' or the store's, whichever are later.
Manifests are all kept, and so is every key that it does not know. Two collectors are harmless: both only
delete what will never be needed, whoever is first.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .chain import ChainReader
from .head import Channel, Head, head_key
from .hints import abandoned, fetched
from .manifest import (
    FormatError,
    Manifest,
    Row,
    floor_number,
    read_payload_key,
    run_prefix,
)
from .pins import PREFIX as PINS
from .pins import Pin
from .ports import Clock, Entry, NotFound, Store, StoreError, stamp_of, time_of
from .records import place_of
from .retry import Retry, retrying

T = TypeVar("T")

GRACE = 24 * 3600.0
PARALLEL = 16
BATCH = 256
LOOK_AGAIN = 30.0
"""Seconds after which what is protected is read again before more is deleted."""


@dataclass(frozen=True)
class Protected:
    """What others need: version ranges, and digests of manifests and records."""

    ranges: tuple[tuple[int, int], ...] = ()
    versions: frozenset[tuple[int, int]] = frozenset()
    digests: frozenset[str] = frozenset()

    def number(self, number: int) -> bool:
        return any(low <= number <= high for low, high in self.ranges)


@dataclass
class Sweep:
    """What one run of the collector found and did. ``floor`` is the cutoff: from there on age is no reason.

    ``doomed`` are the objects that may go, ``deleted`` and ``freed`` how many did, with their bytes;
    ``failed`` maps keys to what went wrong, ``kept`` counts objects that only a protection keeps. ``records``
    are those of replicas that may go, ``forgotten`` how many did.
    """

    run: str
    floor: int
    head: int
    listed: int
    doomed: list[Entry]
    kept: int = 0
    deleted: int = 0
    freed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    records: dict[str, bytes] = field(default_factory=dict)
    forgotten: int = 0

    @property
    def bytes(self) -> int:
        return sum(entry.size for entry in self.doomed)


class Collector:
    """Collects one run. ``progress`` is told (objects done, bytes freed) after every batch."""

    def __init__(
        self,
        store: Store,
        run: str,
        *,
        clock: Clock,
        rng: random.Random,
        grace: float = GRACE,
        policy: Retry | None = None,
        progress: Callable[[int, int], None] = lambda done, freed: None,
    ) -> None:
        self._store, self._run, self._clock, self._rng = store, run, clock, rng
        self._grace, self._policy, self._progress = grace, policy or Retry(), progress
        self._chain = ChainReader(store, keep=64)
        self._records: set[str] = set()
        self._now = 0.0
        """When this sweep began, by the store: what is old enough by then is so to its end."""

    async def survey(self) -> Sweep:
        """What may go now. Raises NoHead, FormatError where a channel or pin cannot be read, StoreError."""
        head, _ = await self._call(lambda: self._chain.head(self._run))
        self._now = await self._call(lambda: time_of(self._store, head_key(self._run), self._clock))
        newest = await self._manifest(head)
        cutoff = await self._cutoff(head, newest)
        rows = await self._rows(newest, cutoff)
        on_chain = {(row.number, row.epoch) for row in rows}
        listed = await self._list()
        names = (place_of(entry.key.removeprefix(run_prefix(self._run))) for entry in listed)
        self._records = {f"sha256:{name[2]}" for name in names if name is not None}
        protected = await self._protected(newest)
        doomed, kept = [], 0
        for entry in listed:
            if not self._may_go(entry.key, head.epoch, cutoff, on_chain):
                continue
            if self._is_protected(entry.key, protected):
                kept += 1
            else:
                doomed.append(entry)
        records = await abandoned(self._store, self._run, **self._hints)
        return Sweep(self._run, cutoff, head.number, len(listed), doomed, kept, records=records)

    async def collect(self) -> Sweep:
        """Survey, and delete. A delete that fails is noted, and the rest goes on."""
        sweep = await self.survey()
        looked, protected, done = self._clock.monotonic(), Protected(), 0
        for batch in _batches(sweep.doomed):
            if self._clock.monotonic() - looked > LOOK_AGAIN:
                head, _ = await self._call(lambda: self._chain.head(self._run))
                protected = await self._protected(await self._manifest(head))
                looked = self._clock.monotonic()
            batch = [entry for entry in batch if not self._is_protected(entry.key, protected)]
            await self._delete(batch, sweep)
            done += len(batch)
            self._progress(done, sweep.freed)
        await self._forget(sweep)
        return sweep

    # ------------------------------------------------------------------------------------- what may go

    def _may_go(self, key: str, epoch: int, cutoff: int, on_chain: Collection[tuple[int, int]]) -> bool:
        relative = key.removeprefix(run_prefix(self._run))
        if (payload := read_payload_key(relative)) is not None:
            number, written = payload
            return number < cutoff or (written < epoch and payload not in on_chain)
        place = place_of(relative)
        return place is not None and place[1] < cutoff

    def _is_protected(self, key: str, protected: Protected) -> bool:
        relative = key.removeprefix(run_prefix(self._run))
        if (payload := read_payload_key(relative)) is not None:
            return protected.number(payload[0]) or payload in protected.versions
        place = place_of(relative)
        return place is not None and (protected.number(place[1]) or f"sha256:{place[2]}" in protected.digests)

    async def _cutoff(self, head: Head, newest: Manifest) -> int:
        """The newest floor but one that was in force longer than the grace period ago.

        A version was the head at the latest when the one after it was being written, whatever became of
        that writer since: a version's own time proves nothing of when the head came to name it.
        """
        floor = await self._at(newest, floor_number(newest))
        while True:
            before = await self._floor_before(floor)
            if before is None:
                return 0
            key, since = head_key(self._run), head.time
            if floor.number < newest.number:
                after = await self._after(newest, floor.number)
                key, since = run_prefix(self._run) + after.key, after.time
            if await self._age(key, since) > self._grace:
                return before
            floor = await self._at(newest, before)

    async def _age(self, key: str, time: float) -> float:
        """Seconds since what its writer dated ``time`` was written; by the store's date where that is later.

        A writer's clock that is behind would shorten the grace period.
        """
        if self._now - time > self._grace:
            stored = await self._call(lambda: stamp_of(self._store, key))
            time = time if stored is None else max(time, stored.written)
        return self._now - time

    async def _floor_before(self, floor: Manifest) -> int | None:
        if floor.floor is not None or floor.parent is None:
            return floor.floor.number if floor.floor else None
        return floor_number(await self._manifest(floor.parent))

    async def _at(self, newest: Manifest, number: int) -> Manifest:
        for row in await self._rows(newest, number):
            if row.number == number:
                return await self._manifest(row)
        raise FormatError(f"run {self._run} has no version {number}, which its chain calls a floor")

    async def _after(self, newest: Manifest, number: int) -> Manifest:
        rows = [row for row in await self._rows(newest, number) if row.number > number]
        return await self._manifest(rows[-1])

    # ------------------------------------------------------------------------------------- what others need

    async def _protected(self, newest: Manifest) -> Protected:
        """What channels, pins and replicas name. FormatError for a channel or a pin that cannot be read."""
        ranges: list[tuple[int, int]] = []
        for number in {number async for number in self._named()}:
            if number <= newest.number:
                rows = await self._rows(newest, number)
                row = next((row for row in rows if row.number == number), None)
                if row is not None:
                    ranges.append((floor_number(await self._manifest(row)), number))
        fetching = await self._fetching()
        rows = await self._rows(newest, newest.number)
        # What is neither a record nor a recent version is looked for further down, which takes longer.
        if fetching - self._records - {row.digest for row in rows}:
            rows = await self._rows(newest, 0)
        versions = frozenset((row.number, row.epoch) for row in rows if row.digest in fetching)
        return Protected(tuple(ranges), versions, frozenset(fetching))

    async def _named(self) -> Any:
        """Numbers of this run's versions that a channel or a pin names."""
        for prefix, read in (("channels/", _of_channel), (PINS, _of_pin)):
            for key, data in await self._load_all(prefix):
                run, number = read(data, key)
                if run == self._run and number is not None:
                    yield number

    async def _fetching(self) -> set[str]:
        return await fetched(self._store, self._run, **self._hints)

    @property
    def _hints(self) -> Any:
        return {"now": self._now, "grace": self._grace, "policy": self._policy, "rng": self._rng}

    async def _load_all(self, prefix: str) -> list[tuple[str, bytes]]:
        limit = asyncio.Semaphore(PARALLEL)

        async def load(key: str) -> tuple[str, bytes] | None:
            async with limit:
                try:
                    return key, (await self._call(functools.partial(self._store.load, key))).data
                except NotFound:
                    return None  # taken away since it was listed

        entries = await self._call(functools.partial(self._store.list, prefix))
        found = await asyncio.gather(*(load(e.key) for e in entries if e.key.startswith(prefix)))
        return [one for one in found if one is not None]

    # --------------------------------------------------------------------------------------------- store

    async def _list(self) -> list[Entry]:
        """Every key of the run that may be payload or a record."""
        prefix, found = run_prefix(self._run), []
        for kind in ("e", "fulls/", "spans/"):
            found += await self._call(functools.partial(self._store.list, prefix + kind))
        return [entry for entry in found if entry.key.startswith(prefix)]

    async def _rows(self, newest: Manifest, number: int) -> list[Row]:
        return await self._call(lambda: self._chain.rows(newest, number=number))

    async def _manifest(self, reference: Head | Row) -> Manifest:
        return await self._call(lambda: self._chain.manifest(self._run, reference))

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        return await retrying(call, self._policy, self._rng)

    async def _delete(self, entries: Iterable[Entry], sweep: Sweep) -> None:
        async def delete(entry: Entry) -> None:
            await self._call(functools.partial(self._store.delete, entry.key))
            sweep.deleted += 1
            sweep.freed += entry.size

        await self._each({entry.key: functools.partial(delete, entry) for entry in entries}, sweep)

    async def _forget(self, sweep: Sweep) -> None:
        """Delete the records, but one that was renewed since it was read."""

        async def forget(key: str, data: bytes) -> None:
            try:
                if (await self._call(functools.partial(self._store.load, key))).data != data:
                    return
            except NotFound:
                return
            await self._call(functools.partial(self._store.delete, key))
            sweep.forgotten += 1

        calls = {key: functools.partial(forget, key, data) for key, data in sweep.records.items()}
        await self._each(calls, sweep)

    async def _each(self, calls: Mapping[str, Callable[[], Awaitable[None]]], sweep: Sweep) -> None:
        """Make the calls, each for a key; what fails is noted."""
        limit = asyncio.Semaphore(PARALLEL)

        async def one(key: str, call: Callable[[], Awaitable[None]]) -> None:
            async with limit:
                try:
                    await call()
                except (StoreError, OSError) as error:
                    sweep.failed[key] = str(error)

        await asyncio.gather(*(one(key, call) for key, call in calls.items()))


def _batches(entries: list[Entry]) -> Iterator[list[Entry]]:
    """The documents of records before all files: no reader is to find a record without its files."""
    names = [place_of(entry.key.split("/", 2)[2]) for entry in entries]
    documents = [e for e, name in zip(entries, names, strict=True) if name is not None and name[3] is None]
    files = [e for e, name in zip(entries, names, strict=True) if name is None or name[3] is not None]
    for part in (documents, files):
        for at in range(0, len(part), BATCH):
            yield part[at : at + BATCH]


def _of_channel(data: bytes, key: str) -> tuple[str, int | None]:
    channel = Channel.decode(data, key)
    return channel.run, channel.exact


def _of_pin(data: bytes, key: str) -> tuple[str, int | None]:
    pin = Pin.decode(data, key)
    return pin.run, pin.number
