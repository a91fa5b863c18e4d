"""Every call on a bounded store ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from stitch_core.files import PosixFiles
from stitch_core.ports import Capabilities, Conflict, FileSource, NotFound, Store, Unavailable
from stitch_core.stores.bounded import BoundedStore
from stitch_core.stores.memory import MemoryStore
from stitch_core.testing.stores import StoreTests


class TestBounded(StoreTests):
    """A store like any other."""

    @pytest.fixture
    def store(self) -> BoundedStore:
        return BoundedStore(MemoryStore(), 60.0)


class Hanging(MemoryStore):
    """Answers nothing, or after ``delay`` seconds."""

    delay = 3600.0

    async def _wait(self, *_: Any, **__: Any) -> Any:
        await asyncio.sleep(self.delay)

    load = read = size = create = swap = replace = list = delete = _wait


CALLS = {
    "reading k": lambda s: s.load("k"),
    "reading j": lambda s: s.read("j", 0, 1),
    "looking at k": lambda s: s.size("k"),
    "writing k": lambda s: s.create("k", b""),
    "swapping k": lambda s: s.swap("k", None, b""),
    "writing j": lambda s: s.replace("j", b""),
    "listing k": lambda s: s.list("k"),
    "deleting k": lambda s: s.delete("k"),
}


@pytest.mark.parametrize("what", CALLS)
async def test_a_call_that_hangs_is_unavailable(what: str) -> None:
    with pytest.raises(Unavailable, match=rf"{what}: no answer from the store in 0\.01 s"):
        await CALLS[what](BoundedStore(Hanging(), 0.01))


async def test_files_get_time_by_their_size(tmp_path: Path) -> None:
    store = Hanging()
    store.delay = 0.05
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    for source in (bytes(100), FileSource(PosixFiles(), path, 100)):
        await BoundedStore(store, 0.01, slowest=100).create("k", source)
        with pytest.raises(Unavailable, match=r"in 0\.02 s"):
            await BoundedStore(store, 0.01, slowest=10_000).create("k", source)


async def test_other_errors_are_passed_on() -> None:
    store: Store = BoundedStore(MemoryStore(), 60.0)
    with pytest.raises(NotFound):
        await store.load("k")
    await store.create("k", b"1")
    with pytest.raises(Conflict):
        await store.swap("k", None, b"2")
    assert store.capabilities == MemoryStore().capabilities


async def test_a_caller_that_gives_up_is_not_told_it_was_the_store() -> None:
    task = asyncio.ensure_future(BoundedStore(Hanging(), 60.0).load("k"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_only_some_stores_tell() -> None:
    store = MemoryStore()
    for key in ("runs/r/head", "runs/s/a/b", "runs/plain", "other/x"):
        await store.create(key, b"")
    assert await BoundedStore(store, 60.0).folders("runs/") == ["r", "s"]
    assert await BoundedStore(store, 60.0).stamp("runs/r/head") is None
    assert await BoundedStore(BoundedStore(store, 60.0), 60.0).folders("none/") == []


async def test_a_store_that_digests_is_asked_in_time() -> None:
    class Digests(MemoryStore):
        capabilities = Capabilities(digests=True)
        delay = 0.0

        async def digest(self, key: str) -> tuple[int, str | None]:
            await asyncio.sleep(self.delay)
            return 3, "sha256:x"

    store = Digests()
    assert BoundedStore(store, 60.0).capabilities.digests
    assert await BoundedStore(store, 60.0).digest("k") == (3, "sha256:x")
    store.delay = 3600.0
    with pytest.raises(Unavailable, match=r"looking at k: no answer from the store in 0\.01 s"):
        await BoundedStore(store, 0.01).digest("k")


async def test_large_reads_get_time_by_their_size() -> None:
    store = Hanging()
    store.delay = 0.05
    with pytest.raises(Unavailable, match=r"in 0\.02 s"):
        await BoundedStore(store, 0.01, slowest=10_000).read("k", 0, 100)
    with pytest.raises(Unavailable, match=r"in 0\.01 s"):
        await BoundedStore(store, 0.01, slowest=10_000).read("k")
