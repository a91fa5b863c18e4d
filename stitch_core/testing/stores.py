"""StoreTests: every promise of ``ports.Store``, for the author of a store to inherit.

    class TestMyStore(StoreTests):
        @pytest.fixture
        def store(self): ...           # an empty store

        @pytest.fixture
        def second_store(self, store): ...   # optional: another handle to the same objects

Needs pytest and pytest-asyncio. ``store_machine`` has the companion that compares a store with a dict.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from ..files import PosixFiles
from ..ports import AlreadyExists, Conflict, Entry, FileSource, NotFound, Store, StoreError, Unavailable
from ..stores.keys import MAX_SEGMENT, BadKey

BAD_KEYS = (
    "", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/..", "a/../b", "a/./b", ".hidden", "a/.b", "a b",
    "a\\b", "a\x00b", "a\nb", "a\n", "caf\u00e9", "a:b", "a%2fb", "a" * (MAX_SEGMENT + 1), "a/" * 500 + "a",
)  # fmt: skip
GOOD_KEYS = ("a", "A-Z_0.9~x", "~/-/_", "a..b", "a.", "x" * MAX_SEGMENT, "/".join(["d" * 40] * 19))


@pytest.mark.asyncio
class StoreTests:
    """Inherit, and give a fixture ``store``. The numbers below may be lowered for slow stores."""

    writers = 8
    """Tasks that race for one key."""

    rounds = 4
    """Races, or increments of each task."""

    @pytest.fixture
    def store(self) -> Any:
        """An empty store."""
        raise NotImplementedError("give a fixture `store`: an empty store")

    @pytest.fixture
    def second_store(self, store: Store) -> Any:
        """Another handle to the objects of ``store``, as another process would have."""
        return store

    # ---------------------------------------------------------------------------------------- reading

    async def test_nothing_is_not_found(self, store: Store) -> None:
        for call in (store.load("a/b"), store.read("a/b"), store.read("a/b", 5, 0), store.size("a/b")):
            with pytest.raises(NotFound):
                await call
        assert await store.list("") == []

    async def test_what_is_written_is_read_by_all(self, store: Store, second_store: Store) -> None:
        for number, data in enumerate((b"", b"x", bytes(range(256)) * 5)):
            await store.create(f"k/{number}", data)
            await settle(store)
            for reader in (store, second_store):
                assert (await reader.load(f"k/{number}")).data == data
                assert await reader.read(f"k/{number}") == data
                assert await reader.size(f"k/{number}") == len(data)

    async def test_ranges(self, store: Store) -> None:
        data = bytes(range(100))
        await store.create("k", data)
        await store.create("empty", b"")
        await settle(store)
        for start in (0, 1, 99, 100, 101, 5000):
            for length in (None, 0, 1, 50, 100, 10**9):
                expected = data[start:] if length is None else data[start : start + length]
                assert await store.read("k", start, length) == expected, (start, length)
                assert await store.read("empty", start, length) == b""

    async def test_ranges_that_count_backwards_are_refused(self, store: Store) -> None:
        await store.create("k", b"data")
        await settle(store)
        for start, length in ((-1, None), (-1, 2), (0, -1)):
            with pytest.raises(BadKey):
                await store.read("k", start, length)

    # --------------------------------------------------------------------------------------- creating

    async def test_create_takes_every_buffer_and_keeps_its_bytes(self, store: Store) -> None:
        array = bytearray(b"abcd")
        for key, source in (("a", array), ("m", memoryview(b"abcd")), ("s", memoryview(b"abcd").cast("I"))):
            await store.create(key, source)
        array[:] = b"zzzz"
        await settle(store)
        for key in "ams":
            assert await store.read(key) == b"abcd"

    async def test_create_from_a_file(self, store: Store, tmp_path: Path) -> None:
        for number, size in enumerate((0, 1, 3 * 2**20 + 17)):
            data = random.Random(number).randbytes(size)
            path = tmp_path / f"source{number}"
            path.write_bytes(data)
            await store.create(f"file/{number}", FileSource(PosixFiles(), path, size))
            path.unlink()
            await settle(store)
            assert await store.size(f"file/{number}") == size
            assert await store.read(f"file/{number}") == data
            assert await store.read(f"file/{number}", size // 2, 100) == data[size // 2 :][:100]

    async def test_create_is_all_or_nothing(self, store: Store, tmp_path: Path) -> None:
        path = tmp_path / "source"
        path.write_bytes(bytes(1000))
        for size in (999, 1001):
            with pytest.raises(StoreError):
                await store.create("k", FileSource(PosixFiles(), path, size))
        with pytest.raises(StoreError):
            await store.create("k", FileSource(PosixFiles(), tmp_path / "missing", 10))
        await settle(store)
        assert await store.list("") == []
        await store.create("k", b"whole")

    async def test_create_is_never_seen_half(self, store: Store, second_store: Store) -> None:
        data = bytes(2**20)
        writing = asyncio.ensure_future(store.create("k", data))
        while not writing.done():
            try:
                assert len(await second_store.read("k")) == len(data)
                assert await second_store.list("") == [Entry("k", len(data))]
            except NotFound:
                await asyncio.sleep(0)
        await writing

    async def test_create_meets_an_object(self, store: Store, second_store: Store) -> None:
        await store.create("k", b"first")
        await settle(store)
        for writer in (store, second_store):
            for data in (b"first", b"other", b""):  # the same bytes are no excuse
                with pytest.raises(AlreadyExists):
                    await writer.create("k", data)
        assert await store.read("k") == b"first"

    async def test_create_race_has_one_winner(self, store: Store, second_store: Store) -> None:
        needs_conditions(store)
        for number in range(self.rounds):
            key = f"race/{number}"

            def create(writer: int, key: str = key) -> Coroutine[Any, Any, None]:
                return (store, second_store)[writer % 2].create(key, contents(key, writer))

            await one_wins(create, self.writers, AlreadyExists, store, key, contents_of=key)

    # --------------------------------------------------------------------------------------- swapping

    async def test_swap_replaces_what_was_read(self, store: Store, second_store: Store) -> None:
        tag = await store.swap("k", None, b"one")
        await settle(store)
        blob = await second_store.load("k")
        assert blob.data == b"one"
        assert blob.tag == tag
        new = await second_store.swap("k", blob.tag, b"two")
        await settle(store)
        assert new != tag
        assert (await store.load("k")).tag == new
        assert await store.read("k") == b"two"

    async def test_swap_of_a_created_object(self, store: Store) -> None:
        await store.create("k", b"one")
        await settle(store)
        await store.swap("k", (await store.load("k")).tag, b"")
        await settle(store)
        assert await store.read("k") == b""

    async def test_conflict_writes_nothing(self, store: Store) -> None:
        old = await store.swap("k", None, b"one")
        new = await store.swap("k", old, b"two")
        await settle(store)
        for expected in (old, None, "", "no tag"):
            with pytest.raises(Conflict):
                await store.swap("k", expected, b"three")
        with pytest.raises(Conflict):
            await store.swap("missing", new, b"three")
        await settle(store)
        assert await store.load("k") == await store.load("k")
        assert (await store.load("k")).tag == new
        assert await store.list("") == [Entry("k", 3)]

    async def test_swap_from_a_to_b_and_back(self, store: Store) -> None:
        """A's first tag may hold again or not; B's must not."""
        tag = await store.swap("k", None, b"A")
        middle = await store.swap("k", tag, b"B")
        last = await store.swap("k", middle, b"A")
        with pytest.raises(Conflict):
            await store.swap("k", middle, b"C")
        await settle(store)
        assert await store.read("k") == b"A"
        await store.swap("k", last, b"C")

    async def test_swap_after_a_deletion(self, store: Store) -> None:
        tag = await store.swap("k", None, b"one")
        await store.delete("k")
        await settle(store)
        with pytest.raises(Conflict):
            await store.swap("k", tag, b"two")
        with pytest.raises(NotFound):
            await store.load("k")
        await store.swap("k", None, b"three")

    async def test_swap_race_has_one_winner(self, store: Store, second_store: Store) -> None:
        needs_conditions(store)
        tag: str | None = None
        for number in range(self.rounds):
            # Bytes of their own in each round: equal ones may have equal tags.
            text = f"round {number}"

            def swap(writer: int, tag: str | None = tag, text: str = text) -> Coroutine[Any, Any, str]:
                return (store, second_store)[writer % 2].swap("k", tag, contents(text, writer))

            tag = await one_wins(swap, self.writers, Conflict, store, "k", contents_of=text)

    async def test_swap_loses_no_update(self, store: Store, second_store: Store) -> None:
        """A list that all tasks append to: each entry is there once, even where an outcome was unknown."""
        needs_conditions(store)

        async def append(writer: int) -> None:
            own = (store, second_store)[writer % 2]
            for number in range(self.rounds):
                entry = b"%d.%d " % (writer, number)
                while True:
                    try:
                        blob = await own.load("k")
                        if entry in blob.data:
                            break
                        await own.swap("k", blob.tag, blob.data + entry)
                        break
                    except (Conflict, Unavailable):
                        await settle(store)

        await store.create("k", b" ")
        await settle(store)
        await asyncio.gather(*(append(writer) for writer in range(self.writers)))
        await settle(store)
        entries = (await store.load("k")).data.split()
        assert sorted(entries) == sorted(
            b"%d.%d" % (w, n) for w in range(self.writers) for n in range(self.rounds)
        )

    # -------------------------------------------------------------------------- replacing and deleting

    async def test_replace(self, store: Store, second_store: Store) -> None:
        await store.replace("hints/r", b"one")
        await settle(store)
        tag = (await second_store.load("hints/r")).tag
        await second_store.replace("hints/r", b"two")
        await settle(store)
        assert await store.read("hints/r") == b"two"
        with pytest.raises(Conflict):
            await store.swap("hints/r", tag, b"three")
        with pytest.raises(AlreadyExists):
            await store.create("hints/r", b"three")

    async def test_delete_is_idempotent(self, store: Store, second_store: Store) -> None:
        await store.delete("a/missing")
        for data in (b"one", b"two"):
            await store.create("a/k", data)
            await settle(store)
            assert await second_store.read("a/k") == data
            await second_store.delete("a/k")
            await store.delete("a/k")
            await settle(store)
            with pytest.raises(NotFound):
                await store.load("a/k")
        assert await second_store.list("") == []

    # ------------------------------------------------------------------------------ listing and keys

    async def test_list(self, store: Store, second_store: Store) -> None:
        keys = ["a/1", "a/10/x", "a/11", "a/2/y", "a-b", "a.b/c", "b", "a/2/y.z/w", "~"]
        for number, key in enumerate(keys):
            await store.create(key, bytes(number))
        await settle(store)
        entries = sorted((Entry(key, number) for number, key in enumerate(keys)), key=lambda entry: entry.key)
        prefixes = (
            "",
            "a",
            "a/",
            "a/1",
            "a/1/",
            "a/10",
            "a/10/",
            "a/2/y",
            "a/2/y.",
            "a.",
            "b",
            "b/",
            "c",
            "c/d",
        )
        for prefix in prefixes:
            expected = [entry for entry in entries if entry.key.startswith(prefix)]
            assert await second_store.list(prefix) == expected, prefix
        for prefix in ("/", "/a", "..", "a//", ".h", "a/.", "a b", "\u00e9"):
            with pytest.raises(BadKey):
                await store.list(prefix)

    @pytest.mark.parametrize("key", GOOD_KEYS, ids=lambda key: key[:12])
    async def test_good_keys(self, store: Store, key: str) -> None:
        await store.create(key, b"data")
        await settle(store)
        assert (await store.load(key)).data == b"data"
        assert await store.list("") == [Entry(key, 4)]
        await store.delete(key)

    @pytest.mark.parametrize("key", BAD_KEYS, ids=lambda key: ascii(key[:12]))
    async def test_bad_keys_are_refused(self, store: Store, key: str) -> None:
        calls = (
            store.load(key), store.read(key), store.size(key), store.create(key, b""),
            store.swap(key, None, b""), store.swap(key, "tag", b""), store.replace(key, b""),
            store.delete(key),
        )  # fmt: skip
        for call in calls:
            with pytest.raises(BadKey):
                await call

    async def test_a_key_above_another(self, store: Store) -> None:
        """A store may refuse the second, or have both; it never harms the first."""
        for first, second in (("a/b/c", "a/b"), ("x", "x/y")):
            await store.create(first, b"first")
            await settle(store)
            with pytest.raises(NotFound):
                await store.load(second)
            await store.delete(second)
            writes = (
                store.create(second, b"second"),
                store.swap(second, None, b"second"),
                store.replace(second, b"second"),
            )
            for write in writes:
                try:
                    await write
                except BadKey:
                    continue
                await settle(store)
                assert await store.read(second) == b"second"
                await store.delete(second)
            await settle(store)
            assert await store.read(first) == b"first"


async def settle(store: Store) -> None:
    """Wait until what was written is seen by all."""
    if store.capabilities.visible_after:
        await asyncio.sleep(store.capabilities.visible_after)


def needs_conditions(store: Store) -> None:
    if not store.capabilities.conditional_writes:
        pytest.skip("platform: this store says that it has no conditional writes")


def contents(text: str, writer: int) -> bytes:
    """A thousand times or so the same, so that a mixture would show."""
    return f"{text} by {writer}\n".encode() * 1000


async def one_wins(
    write: Callable[[int], Coroutine[Any, Any, Any]],
    writers: int,
    refusal: type[StoreError],
    store: Store,
    key: str,
    contents_of: str,
) -> str:
    """Race ``write(0..writers-1)``, which write ``contents(contents_of, writer)``; returns the tag after it.

    One succeeds and the object is that one's; the others are refused. Where a store leaves outcomes
    unknown, the object is of one that was not refused.
    """
    results = await asyncio.gather(*(write(writer) for writer in range(writers)), return_exceptions=True)
    await settle(store)
    blob = await store.load(key)
    owner = next(writer for writer in range(writers) if blob.data == contents(contents_of, writer))
    won = [writer for writer, result in enumerate(results) if not isinstance(result, BaseException)]
    unknown = [writer for writer, result in enumerate(results) if isinstance(result, Unavailable)]
    for result in results:
        assert not isinstance(result, BaseException) or isinstance(result, refusal | Unavailable), repr(
            result
        )
    assert won == [owner] or (not won and owner in unknown), f"{won} succeeded, the object is {owner}'s"
    return blob.tag
