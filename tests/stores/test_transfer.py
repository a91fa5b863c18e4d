"""Transfers end with the right bytes, durable, under the right name, or with an error and nothing there."""

import asyncio
import hashlib
import random
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from stitch_core.files import PosixFiles
from stitch_core.ports import AlreadyExists, Buffer, Capabilities, FileSource, NotFound, Unavailable
from stitch_core.retry import Retry
from stitch_core.stores import transfer
from stitch_core.stores.memory import MemoryStore
from stitch_core.stores.room import Room
from stitch_core.stores.transfer import DigestMismatch, download, upload, verify

DATA = random.Random(7).randbytes(10_000)
CHUNK = 999
QUICK = {"chunk": CHUNK, "policy": Retry(attempts=4, first=0.001), "rng": random.Random(1)}


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


class Flaky(MemoryStore):
    """Raises what ``failures`` yields, one a call; "after" does the call first: its answer was lost."""

    def __init__(self, failures: Iterable[str | None] = ()) -> None:
        super().__init__()
        self.failures = iter(failures)
        self.reads: list[tuple[int, int | None]] = []

    async def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self.reads.append((start, length))
        if next(self.failures, None):
            raise Unavailable("lost")
        return await super().read(key, start, length)

    async def create(self, key: str, source: Buffer | FileSource) -> None:
        failure = next(self.failures, None)
        if failure != "before":
            await super().create(key, source)
        if failure:
            raise Unavailable("lost")


async def fetch(store: MemoryStore, path: Path, data: bytes = DATA, **options: Any) -> None:
    await download(store, "k", PosixFiles(), path, len(data), digest(data), **(QUICK | options))


# ------------------------------------------------------------------------------------------ download


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, len(DATA)])
async def test_download(size: int, tmp_path: Path) -> None:
    store, path, steps = Flaky(), tmp_path / "new" / "file", []
    await store.create("k", DATA[:size])
    await fetch(store, path, DATA[:size], progress=steps.append)
    assert path.read_bytes() == DATA[:size]
    assert sum(steps) == size
    assert all(length is not None and length <= CHUNK for _, length in store.reads)
    assert [p.name for p in path.parent.iterdir()] == ["file"]


async def test_download_rides_out_failures(tmp_path: Path) -> None:
    store = Flaky([None, None, *["lost"] * 3, None, "lost"])
    await store.create("k", DATA)
    await fetch(store, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA


async def test_download_gives_up(tmp_path: Path) -> None:
    store = Flaky([None, None, *["lost"] * 1000])
    await store.create("k", DATA)
    with pytest.raises(Unavailable):
        await fetch(store, tmp_path / "f")
    assert not (tmp_path / "f").exists()
    store.failures = iter(())
    await fetch(store, tmp_path / "f")
    with pytest.raises(NotFound):
        await fetch(MemoryStore(), tmp_path / "g")


async def test_download_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    class Cut(Flaky):
        """Has nothing to say about the second half."""

        async def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            self.reads.append((start, length))
            if start > 5000:
                raise Unavailable("lost")
            return await MemoryStore.read(self, key, start, length)

    cut, steps = Cut(), []
    await cut.create("k", DATA)
    with pytest.raises(Unavailable):
        await fetch(cut, tmp_path / "f")
    whole = (tmp_path / "f.part").stat().st_size // CHUNK * CHUNK
    assert whole >= 4 * CHUNK
    store = Flaky()
    await store.create("k", DATA)
    await fetch(store, tmp_path / "f", progress=steps.append)
    assert (tmp_path / "f").read_bytes() == DATA
    assert min(start for start, _ in store.reads) == whole
    assert sum(steps) == len(DATA)


@pytest.mark.parametrize("size", [CHUNK, 5 * CHUNK + 3, len(DATA)])
async def test_a_part_with_wrong_bytes_costs_time_only(size: int, tmp_path: Path) -> None:
    """What a machine that lost power leaves under a name may be anything."""
    store = Flaky()
    await store.create("k", DATA)
    (tmp_path / "f.part").write_bytes(bytes(size))
    await fetch(store, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA
    await store.delete("k")
    await store.create("k", flipped(DATA))
    (tmp_path / "g.part").write_bytes(bytes(size))
    with pytest.raises(DigestMismatch):
        await fetch(store, tmp_path / "g")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


async def test_reads_ahead_are_many_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty downloads at once never hold more than the room that a process has."""
    room = Room(10 * CHUNK)
    monkeypatch.setattr(transfer, "transfer_room", lambda: room)
    now = most = 0

    class Counts(MemoryStore):
        async def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            nonlocal now, most
            now += length or 0
            most = max(most, now)
            await asyncio.sleep(0.001)
            now -= length or 0
            return await super().read(key, start, length)

    store = Counts()
    await store.create("k", DATA)
    await fetch(store, tmp_path / "alone")
    assert most == transfer.READ_AHEAD * CHUNK
    most = 0
    await asyncio.gather(*(fetch(store, tmp_path / f"f{n}") for n in range(20)))
    assert all((tmp_path / f"f{n}").read_bytes() == DATA for n in range(20))
    assert 8 * CHUNK < most <= 10 * CHUNK
    tasks = [asyncio.ensure_future(fetch(store, tmp_path / f"g{n}")) for n in range(20)]
    await asyncio.sleep(0.01)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(path.name.startswith("g") and path.suffix != ".part" for path in tmp_path.iterdir()) == 10
    assert await room.acquire(10 * CHUNK) == 10 * CHUNK  # nothing of it was lost


def flipped(data: bytes) -> bytes:
    return data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]


WRONG: dict[str, Callable[[bytes], bytes]] = {
    "one bit flipped (C09)": flipped,
    "truncated by one byte": lambda data: data[:-1],
    "truncated to nothing": lambda data: b"",
    "one byte more": lambda data: data + b"x",
    "same size, other bytes (C08)": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_download_refuses_wrong_bytes(wrong: str, tmp_path: Path) -> None:
    store = MemoryStore()
    await store.create("k", WRONG[wrong](DATA))
    with pytest.raises(DigestMismatch, match=r"^k is not what was announced: expected .*, got ") as error:
        await fetch(store, tmp_path / "f")
    assert error.value.key == "k"
    assert error.value.expected != error.value.got
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DigestMismatch):
        await verify(store, "k", len(DATA), digest(DATA), **QUICK)


BAD_READS: dict[str, Callable[[bytes], bytes]] = {
    "flipped": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "short": lambda data: data[:-1],
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("wrong", BAD_READS)
async def test_c73_one_bad_read_is_read_again(wrong: str, tmp_path: Path) -> None:
    """The object is sound: neither a download nor a read-back takes it for damaged."""

    class OnceBad(MemoryStore):
        bad = True

        async def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            data = await super().read(key, start, length)
            if self.bad and start == 0:
                self.bad = False
                return BAD_READS[wrong](data)
            return data

    store = OnceBad()
    await store.create("k", DATA)
    await fetch(store, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA
    store.bad = True
    await verify(store, "k", len(DATA), digest(DATA), **QUICK)


async def test_download_notices_an_object_that_shrinks(tmp_path: Path) -> None:
    class Shrinks(MemoryStore):
        async def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            return (await super().read(key, start, length))[: 3000 - start if start < 3000 else 0]

    store = Shrinks()
    await store.create("k", DATA)
    with pytest.raises(DigestMismatch):
        await fetch(store, tmp_path / "f")


async def test_download_reuses_only_the_very_file(tmp_path: Path) -> None:
    store, path, steps = Flaky(), tmp_path / "f", []
    await store.create("k", DATA)
    path.write_bytes(DATA)
    await fetch(store, path, progress=steps.append)
    assert store.reads == []
    assert steps == [len(DATA)]
    for there in (flipped(DATA), DATA[:-1], DATA + b"x", b""):
        path.write_bytes(there)
        (tmp_path / "f.part").write_bytes(b"left by a process that died")
        await fetch(store, path)
        assert path.read_bytes() == DATA
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


async def test_a_wrong_file_is_gone_even_if_the_download_fails(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(flipped(DATA))
    with pytest.raises(NotFound):
        await fetch(MemoryStore(), tmp_path / "f")
    assert not (tmp_path / "f").exists()


async def test_download_syncs_before_it_names(tmp_path: Path) -> None:
    calls = []

    class Noted(PosixFiles):
        def sync(self, path: Path) -> None:
            calls.append(("sync", path.name))

        def rename(self, source: Path, target: Path) -> None:
            calls.append(("rename", target.name))
            super().rename(source, target)

    store = MemoryStore()
    await store.create("k", DATA)
    await download(store, "k", Noted(), tmp_path / "d" / "f", len(DATA), digest(DATA))
    assert calls == [("sync", "f.part"), ("rename", "f"), ("sync", "d")]


async def test_a_cancelled_download_leaves_no_writer_behind(tmp_path: Path) -> None:
    """A late write would land in the .part of the next download, after its bytes were hashed."""
    writing, ended = threading.Event(), threading.Event()

    class Slow(PosixFiles):
        def write_at(self, path: Path, offset: int, data: Buffer) -> None:
            writing.set()
            ended.wait(0.1)
            super().write_at(path, offset, data)
            ended.set()

    store = MemoryStore()
    await store.create("k", DATA)
    task = asyncio.ensure_future(download(store, "k", Slow(), tmp_path / "f", len(DATA), digest(DATA)))
    await asyncio.to_thread(writing.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    await fetch(store, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA


# -------------------------------------------------------------------------------------------- upload


@pytest.mark.parametrize(
    "failures",
    [
        [],
        ["after"],
        ["before"],
        ["before", "lost", "before"],
        ["after", "lost"],
        ["after", *[None] * 3, "lost"],
    ],
    ids=str,
)
async def test_upload_settles_unknown_outcomes(failures: list[str | None], tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(DATA)
    for source in (DATA, FileSource(PosixFiles(), tmp_path / "f", len(DATA))):
        store = Flaky(failures)
        await upload(store, "k", source, digest(DATA), **QUICK)
        assert store.state.objects == {"k": DATA}
        await upload(store, "k", source, digest(DATA), **QUICK)  # repeating is harmless
        await verify(store, "k", len(DATA), digest(DATA), **QUICK)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("failures", [[], ["before"]], ids=["answered", "lost"])
async def test_upload_refuses_other_bytes(wrong: str, failures: list[str]) -> None:
    """C08: the same version retried with other bytes of the same size."""
    store = Flaky([None, *failures])
    there = WRONG[wrong](DATA)
    await store.create("k", there)
    with pytest.raises(AlreadyExists, match="other bytes"):
        await upload(store, "k", DATA, digest(DATA), **QUICK)
    assert store.state.objects == {"k": there}


async def test_upload_says_how_far_it_is(tmp_path: Path) -> None:
    """Each byte once, also when an attempt is repeated, and to a store that says nothing itself."""

    class Says(Flaky):
        async def create(self, key: str, source: Buffer | FileSource) -> None:
            if isinstance(source, FileSource) and source.progress:
                assert source.sha256 == digest(DATA)
                for count in (3000, 3000):
                    source.progress(count)
            await super().create(key, source)

    (tmp_path / "f").write_bytes(DATA)
    for source in (DATA, FileSource(PosixFiles(), tmp_path / "f", len(DATA))):
        for store in (Says(["before", "after", *["lost"] * 3]), Flaky()):
            steps: list[int] = []
            await upload(store, "k", source, digest(DATA), progress=steps.append, **QUICK)
            assert sum(steps) == len(DATA)
            assert min(steps) > 0


async def test_a_store_that_digests_is_asked_and_not_read() -> None:
    class Digests(Flaky):
        known: str | None = digest(DATA)
        capabilities = Capabilities(digests=True)

        async def digest(self, key: str) -> tuple[int, str | None]:
            return await self.size(key), self.known

    store = Digests()
    await store.create("k", DATA)
    await verify(store, "k", len(DATA), digest(DATA), **QUICK)
    assert store.reads == []
    for size, sha256 in ((len(DATA), digest(b"")), (len(DATA) - 1, digest(DATA))):
        with pytest.raises(DigestMismatch):
            await verify(store, "k", size, sha256, **QUICK)
    with pytest.raises(NotFound):
        await verify(store, "missing", len(DATA), digest(DATA), **QUICK)
    assert store.reads == []
    store.known = None  # of this object the store does not know it
    await verify(store, "k", len(DATA), digest(DATA), **QUICK)
    assert store.reads


async def test_upload_gives_up_on_a_dead_store() -> None:
    store = Flaky(iter(["before"] * 1000))
    with pytest.raises(Unavailable):
        await upload(store, "k", DATA, digest(DATA), **QUICK)


async def test_verify_rides_out_failures_and_names_absence() -> None:
    store = Flaky([None, "lost", "lost"])
    await store.create("k", DATA)
    await verify(store, "k", len(DATA), digest(DATA), **QUICK)
    with pytest.raises(NotFound):
        await verify(store, "missing", len(DATA), digest(DATA), **QUICK)
