"""The cache never holds more than it may, never gives wrong bytes, and never stands in a download's way."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stitch_core.files import PosixFiles
from stitch_core.ports import Buffer, NotFound
from stitch_core.replica.fetching import Fetcher, Wanted
from stitch_core.stores.cache import DigestCache
from stitch_core.stores.memory import MemoryStore

SIZE = 1000
LIMIT = 5 * SIZE
FILES = [random.Random(number).randbytes(SIZE) for number in range(12)]
DIGESTS = ["sha256:" + hashlib.sha256(data).hexdigest() for data in FILES]


class Clock:
    now = 0.0

    def time(self) -> float:
        self.now += 1
        return self.now

    monotonic = time


class Host:
    """Caches of several processes on one directory, and a store that counts what is read from it."""

    def __init__(self, root: Path) -> None:
        self.root, self.clock, self.caches, self.reads = root, Clock(), [], 0
        self.said: list[str] = []
        self.held: dict[str, asyncio.Event] = {}
        self.work = root / "work"
        host = self

        class Counted(MemoryStore):
            async def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
                host.reads += 1
                if key in host.held:
                    await host.held[key].wait()
                return await super().read(key, start, length)

        self.store = Counted()
        self.store.state.objects.update({f"k/{number}": data for number, data in enumerate(FILES)})

    def cache(self, files: Any = None, limit: int = LIMIT) -> DigestCache:
        made = DigestCache(
            self.root / "cache", limit, files or PosixFiles(), self.clock, nonce=f"p{len(self.caches)}",
            lock_seconds=0.2,
        )  # fmt: skip
        self.caches.append(made)
        return made

    async def fetch(
        self, cache: DigestCache | None, *numbers: int, into: str = "", patience: float = 60.0
    ) -> int:
        """Fetch some files as a replica does; how many came from the store."""
        into = into or f"d{random.random()}"
        before = self.reads
        wanted = [Wanted(f"k/{n}", self.work / into / str(n), SIZE, DIGESTS[n]) for n in numbers]
        (self.work / into).mkdir(parents=True, exist_ok=True)
        self.said.clear()
        fetcher = Fetcher(
            self.store, PosixFiles(), asyncio.to_thread, random.Random(1), cache=cache, say=self.said.append,
            patience=patience,
        )  # fmt: skip
        await fetcher.fetch(wanted)
        for file, number in zip(wanted, numbers, strict=True):
            assert file.path.read_bytes() == FILES[number]
        assert len(list((self.work / into).iterdir())) == len(numbers)
        return self.reads - before

    def slow(self, numbers: Iterable[int]) -> asyncio.Event:
        """The store does not answer for these before the event."""
        event = asyncio.Event()
        self.held = {f"k/{number}": event for number in numbers}
        return event

    def there(self) -> set[int]:
        folder = self.root / "cache" / "objects"
        assert sum(path.stat().st_size for path in folder.iterdir()) <= LIMIT
        hexes = [digest.removeprefix("sha256:") for digest in DIGESTS]
        return {hexes.index(path.name) for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    for cache in host.caches:
        cache.close()


async def test_what_one_replica_fetched_another_takes(host: Host) -> None:
    first, second = host.cache(), host.cache()
    assert await host.fetch(first, 0, 1, 2) == 3
    assert await host.fetch(second, 0, 1, 2, 3) == 1
    assert (second.hits, second.misses) == (3, 1)
    assert host.there() == {0, 1, 2, 3}
    assert host.said == []


async def test_of_two_that_start_together_one_waits_for_the_other(host: Host) -> None:
    slow = host.slow(range(5))
    both = asyncio.gather(host.fetch(host.cache(), 0, 1, 2, 3), host.fetch(host.cache(), 1, 2, 3, 4))
    await asyncio.sleep(0.1)
    slow.set()
    await both
    assert host.reads == 5
    assert [cache.hits for cache in host.caches] in ([0, 3], [3, 0])
    assert host.said == []


async def test_what_the_other_does_not_bring_is_fetched(host: Host) -> None:
    """It fails in the middle; what it brought is taken, and the rest is there for a third."""
    first, second, third = host.cache(), host.cache(), host.cache()
    first.begin({DIGESTS[n]: SIZE for n in (0, 1, 2)})
    waits = asyncio.ensure_future(host.fetch(second, 0, 1, 2))
    path = host.root / "0"
    path.write_bytes(FILES[0])
    await asyncio.sleep(0.1)
    first.put(DIGESTS[0], path)
    await asyncio.sleep(0.4)
    assert host.reads == 0
    first.done(needed=False)
    assert await waits == 2
    assert await host.fetch(third, 0, 1, 2) == 0


async def test_one_that_brings_nothing_is_waited_for_no_longer_than_patience(host: Host) -> None:
    stuck = host.cache()
    stuck.begin({DIGESTS[n]: SIZE for n in (0, 1)})
    assert await host.fetch(host.cache(), 0, 1, 2, patience=0.5) == 3
    stuck._alive = stuck._alive.close() if stuck._alive else None  # it dies: the kernel unlocks
    assert await host.fetch(host.cache(), 0, 1) == 2, "nobody is waited for"


async def test_one_that_cannot_say_that_it_has_ended_is_not_waited_for(host: Host) -> None:
    files = Failing(10**9, errno.EIO)
    broken = host.cache(files)
    broken.begin({DIGESTS[0]: SIZE})
    files.at = 0
    broken.done(needed=False)
    assert await host.fetch(host.cache(), 0) == 1


async def test_the_least_recently_wanted_goes_first(host: Host) -> None:
    cache = host.cache()
    for number in range(5):
        await host.fetch(cache, number)
    await host.fetch(cache, 0)  # wanted again
    await host.fetch(cache, 5)
    assert host.there() == {0, 2, 3, 4, 5}
    await host.fetch(cache, 6, 7)
    assert host.there() == {0, 4, 5, 6, 7}


async def test_what_a_live_process_has_or_fetches_stays(host: Host) -> None:
    serves, other = host.cache(), host.cache()
    await host.fetch(serves, 0, 1)
    for number in range(4, 10):
        await host.fetch(other, number)
        assert {0, 1} <= host.there()
    fetching = host.cache()
    fetching.begin({DIGESTS[number]: SIZE for number in (2, 3)})  # room is kept for what it is about to add
    await host.fetch(other, 10)
    await host.fetch(other, 11)
    assert host.there() == {0, 1, 11}
    for number in (2, 3):
        path = host.root / str(number)
        path.write_bytes(FILES[number])
        fetching.put(DIGESTS[number], path)
    assert host.there() == {0, 1, 2, 3, 11}
    fetching.done(needed=False)
    await host.fetch(serves, 4, 5)  # now it has these, and while it fetched it had both
    await host.fetch(other, 6, 7)
    assert {4, 5} <= host.there()
    assert not {0, 1} <= host.there()


async def test_more_than_fits_is_fetched_all_the_same(host: Host) -> None:
    cache = host.cache()
    assert await host.fetch(cache, *range(9)) == 9
    assert len(host.there()) == 5
    assert await host.fetch(cache, *range(9)) == 4
    assert await host.fetch(host.cache(limit=10), 0, 11) == 1


async def test_wrong_bytes_are_removed_and_fetched(host: Host) -> None:
    cache = host.cache()
    await host.fetch(cache, 0, 1)
    objects = host.root / "cache" / "objects"
    for number, wrong in ((0, FILES[1]), (1, FILES[1][:-1])):
        (objects / DIGESTS[number].removeprefix("sha256:")).write_bytes(wrong)
    other = host.cache()
    assert await host.fetch(other, 0, 1) == 2
    assert "wrong bytes" in host.said[0]
    assert await host.fetch(host.cache(), 0, 1) == 1  # room for the shorter one is found now
    assert await host.fetch(host.cache(), 0, 1) == 0


def test_a_lease_ends_with_its_process(host: Host) -> None:
    """The kernel unlocks for the dead, whatever they were doing."""
    code = f"""
import sys
from pathlib import Path
from stitch_core.stores.cache import opened_cache
cache = opened_cache(Path({str(host.root / "cache")!r}), {LIMIT})
cache.begin(dict.fromkeys({DIGESTS[:5]!r}, {SIZE}))
for n in range(4):
    path = Path({str(host.root)!r}) / f"source{{n}}"
    cache.put({DIGESTS[:5]!r}[n], path)
(Path({str(host.root / "cache")!r}) / "objects" / f".{{cache._id}}.5").write_bytes(b"half")
print("ready", flush=True)
sys.stdin.read()
"""
    for number in range(4):
        (host.root / f"source{number}").write_bytes(FILES[number])
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        cache = host.cache()
        asyncio.run(host.fetch(cache, 10, 11))
        assert host.there() == {0, 1, 2, 3}  # the last place is kept for what it is writing
    finally:
        child.kill()
        child.communicate()
    asyncio.run(host.fetch(cache, 8, 9))
    assert host.there() >= {8, 9}
    assert not list((host.root / "cache" / "objects").glob(".*"))
    assert {path.stem for path in (host.root / "cache" / "leases").iterdir()} == {"p0"}


class Dies(Exception):
    """The process ends here."""


class Failing(PosixFiles):
    """From the ``at``-th change on: dies (each call raises), or fails with ``error``, half of it written."""

    def __init__(self, at: int, error: int | None = None) -> None:
        self.at, self.error, self.changes = at, error, 0

    def _change(self) -> bool:
        self.changes += 1
        if self.changes <= self.at:
            return False
        if self.error is None:
            raise Dies
        return True

    def _fail(self) -> None:
        assert self.error is not None
        raise OSError(self.error, "as planned")

    def write_new(self, path: Path, data: Buffer) -> None:
        if self._change():
            super().write_new(path, bytes(data)[: len(data) // 2])
            self._fail()
        super().write_new(path, data)

    def write_at(self, path: Path, offset: int, data: Buffer) -> None:
        if self._change():
            super().write_at(path, offset, bytes(data)[: len(data) // 2])
            self._fail()
        super().write_at(path, offset, data)

    def rename(self, source: Path, target: Path) -> None:
        if self._change():
            self._fail()
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        if self.error is None:
            self._change()
        super().remove(path)


@pytest.mark.parametrize(
    "error",
    [None, *(pytest.param(number, marks=pytest.mark.slow) for number in (errno.ENOSPC, errno.EIO))],
    ids=["dies", "full", "io"],
)
async def test_any_change_may_be_the_last(tmp_path: Path, error: int | None) -> None:
    quiet = Failing(10**9)
    host = Host(tmp_path / "quiet")
    await host.fetch(host.cache(), *range(4))
    await host.fetch(host.cache(quiet), *range(2, 8))
    assert quiet.changes > 15
    for at in range(quiet.changes):
        host = Host(tmp_path / f"{at}")
        before, victim = host.cache(), host.cache(Failing(at, error))
        await host.fetch(before, *range(4))
        before.close()
        if error is None:
            with pytest.raises(Dies):
                await host.fetch(victim, *range(2, 8))
            victim._alive = victim._alive.close() if victim._alive else None  # as the kernel does
        else:
            await host.fetch(victim, *range(2, 8))  # a cache that fails is no reason to fail
            assert "as planned" in host.said[0]
        host.there()
        after = host.cache()
        await host.fetch(after, *range(8))
        for _ in range(2):  # in the first, what it has until then is kept
            await host.fetch(after, *range(6, 11))
        assert host.there() == {6, 7, 8, 9, 10} or error is not None
        assert host.said == []
        for cache in host.caches:
            if cache is not victim or error is not None:
                cache.close()


async def test_a_cache_that_cannot_be_is_none(host: Host) -> None:
    (host.root / "cache").write_bytes(b"a file")
    cache = host.cache()
    assert await host.fetch(cache, 0, 1) == 2
    assert "cannot be used" in host.said[0]


async def test_a_lock_that_is_held_costs_seconds_only(host: Host) -> None:
    cache = host.cache()
    await host.fetch(cache, 0)
    with PosixFiles().lock(host.root / "cache" / "lock", 1.0):
        assert await host.fetch(cache, 0, 1) == 1
        assert "locked by another" in host.said[0]
    assert await host.fetch(cache, 0, 1) == 1


async def test_junk_in_its_files_is_no_matter(host: Host) -> None:
    cache = host.cache()
    await host.fetch(cache, 0, 1)
    for junk in (b"", b"{", b"[]", b'{"x": "y"}', bytes(50)):
        (host.root / "cache" / "used.json").write_bytes(junk)
        (host.root / "cache" / "leases" / "p0.json").write_bytes(junk)
        assert await host.fetch(host.cache(), 0, 1) == 0
    assert isinstance(json.loads((host.root / "cache" / "used.json").read_bytes()), dict)


async def test_a_failed_fetch_says_whose_it_is_and_keeps_what_came(host: Host) -> None:
    cache, told = host.cache(), []
    fetcher = Fetcher(host.store, PosixFiles(), asyncio.to_thread, random.Random(1), cache=cache)
    wanted = [Wanted(f"k/{n}", host.work / str(n), SIZE, DIGESTS[n % 12]) for n in (0, 1, 99)]
    with pytest.raises(NotFound):
        await fetcher.fetch(wanted, lambda file, error: told.append((file.key, type(error))))
    assert told == [("k/99", NotFound)]
    assert await host.fetch(cache, 0, 1, into="again") <= 2
    assert host.there() == {0, 1}
