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
from stitch_core.ports import AlreadyExists, Buffer, FileSource, NotFound, Unavailable
from stitch_core.retry import Retry
from stitch_core.stores.memory import MemoryStore
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
    store = Flaky([None, None, *["lost"] * 4])
    await store.create("k", DATA)
    with pytest.raises(Unavailable):
        await fetch(store, tmp_path / "f")
    assert not (tmp_path / "f").exists()
    await fetch(store, tmp_path / "f")
    with pytest.raises(NotFound):
        await fetch(MemoryStore(), tmp_path / "g")


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
