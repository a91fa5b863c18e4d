"""The public kit on the stores of the core, and the proof that it catches stores that break promises."""

import contextlib
import inspect
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from stitch_core.ports import Blob, Buffer, Conflict, Entry, FileSource, NotFound, Store
from stitch_core.stores.bounded import BoundedStore
from stitch_core.stores.local import LocalStore
from stitch_core.stores.memory import MemoryObjects, MemoryStore
from stitch_core.testing.store_machine import store_machine
from stitch_core.testing.stores import StoreTests


class TestMemoryStore(StoreTests):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()

    @pytest.fixture
    def second_store(self, store: MemoryStore) -> MemoryStore:
        return MemoryStore(store.state)


class TestLocalStore(StoreTests):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> Iterator[LocalStore]:
        root = tmp_path / "not" / "begun"
        root.mkdir(parents=True)
        store = LocalStore(root)
        yield store
        await store.close()

    @pytest.fixture
    async def second_store(self, store: LocalStore) -> Iterator[LocalStore]:
        second = LocalStore(store.root)
        yield second
        await second.close()


class TestBoundedStore(StoreTests):
    @pytest.fixture
    def store(self) -> BoundedStore:
        return BoundedStore(MemoryStore(), 60.0)


@contextlib.contextmanager
def local_store() -> Iterator[LocalStore]:
    with tempfile.TemporaryDirectory() as directory:
        yield LocalStore(Path(directory))


TestMemoryMachine = store_machine(lambda: contextlib.nullcontext(MemoryStore())).TestCase
TestLocalMachine = store_machine(local_store).TestCase
TestMemoryMachine.settings = settings(max_examples=settings.default.max_examples // 3)
# Each step syncs a file and two directories.
TestLocalMachine.settings = settings(max_examples=settings.default.max_examples // 10, stateful_step_count=25)


# ------------------------------------------------------------------------------------- negative controls


class Overwrites(MemoryStore):
    """Ignores If-None-Match, as some S3 servers do."""

    async def create(self, key: str, source: Buffer | FileSource) -> None:
        with contextlib.suppress(NotFound):
            await self.load(key)
            await self.delete(key)
        await super().create(key, source)


class IgnoresTags(MemoryStore):
    """Ignores If-Match, as some S3 servers do."""

    async def swap(self, key: str, expected: str | None, data: bytes) -> str:
        await self.replace(key, data)
        return (await self.load(key)).tag


class CreatesWithAnyTag(MemoryStore):
    async def swap(self, key: str, expected: str | None, data: bytes) -> str:
        if key not in self.state.objects:
            expected = None
        return await super().swap(key, expected, data)


class WritesThenConflicts(MemoryStore):
    async def swap(self, key: str, expected: str | None, data: bytes) -> str:
        try:
            return await super().swap(key, expected, data)
        except Conflict:
            await self.replace(key, data)
            raise


class TagsByLength(MemoryStore):
    """Tags that do not tell objects of one size apart."""

    async def load(self, key: str) -> Blob:
        blob = await super().load(key)
        return Blob(blob.data, str(len(blob.data)))

    async def swap(self, key: str, expected: str | None, data: bytes) -> str:
        current = self.state.objects.get(key)
        if expected != (None if current is None else str(len(current))):
            raise Conflict(key)
        await self.replace(key, data)
        return str(len(data))


class ListsDirectories(MemoryStore):
    """Takes a prefix for a directory."""

    async def list(self, prefix: str) -> list[Entry]:
        entries = await super().list(prefix)
        folder = prefix.rstrip("/") + "/" if prefix else ""
        return [entry for entry in entries if entry.key.startswith(folder)]


class ForgetsTheEnd(MemoryStore):
    async def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return await super().read(key, start, 10**9 if length is None else max(1, length))


class DeletesOnce(MemoryStore):
    async def delete(self, key: str) -> None:
        await self.load(key)
        await super().delete(key)


class AliasesItsSource(MemoryStore):
    async def create(self, key: str, source: Buffer | FileSource) -> None:
        await super().create(key, source)
        if isinstance(source, bytearray):
            self.state.objects[key] = source  # type: ignore[assignment]


class KeepsPartsOfFiles(MemoryStore):
    async def create(self, key: str, source: Buffer | FileSource) -> None:
        try:
            await super().create(key, source)
        except Exception:
            await super().create(key, b"a part")
            raise


class SeesOnlyItsOwn(MemoryStore):
    """Each handle has a cache that it believes in."""

    def __init__(self, state: MemoryObjects | None = None) -> None:
        super().__init__(MemoryObjects())


CONTROLS = [
    (Overwrites, "test_create_race_has_one_winner"),
    (Overwrites, "test_create_meets_an_object"),
    (IgnoresTags, "test_swap_race_has_one_winner"),
    (IgnoresTags, "test_conflict_writes_nothing"),
    (CreatesWithAnyTag, "test_swap_after_a_deletion"),
    (WritesThenConflicts, "test_conflict_writes_nothing"),
    (TagsByLength, "test_swap_from_a_to_b_and_back"),
    (TagsByLength, "test_replace"),
    (ListsDirectories, "test_list"),
    (ForgetsTheEnd, "test_ranges"),
    (DeletesOnce, "test_delete_is_idempotent"),
    (AliasesItsSource, "test_create_takes_every_buffer_and_keeps_its_bytes"),
    (KeepsPartsOfFiles, "test_create_is_all_or_nothing"),
    (SeesOnlyItsOwn, "test_what_is_written_is_read_by_all"),
]


@pytest.mark.parametrize(("broken", "test"), CONTROLS, ids=lambda value: getattr(value, "__name__", value))
async def test_kit_catches(broken: type[MemoryStore], test: str, tmp_path: Path) -> None:
    store = broken()
    given: dict[str, object] = {"store": store, "second_store": broken(store.state), "tmp_path": tmp_path}
    method = getattr(StoreTests(), test)
    with pytest.raises((AssertionError, pytest.fail.Exception, NotFound)):
        await method(**{name: given[name] for name in inspect.signature(method).parameters})


@pytest.mark.parametrize("broken", [Overwrites, IgnoresTags, DeletesOnce, ListsDirectories])
def test_machine_catches(broken: Callable[[], Store]) -> None:
    case = store_machine(lambda: contextlib.nullcontext(broken())).TestCase
    # Found is enough: shrinking takes most of the time.
    case.settings = settings(case.settings, database=None, print_blob=False, phases=[Phase.generate])
    with pytest.raises((AssertionError, NotFound)):
        case("runTest").runTest()
