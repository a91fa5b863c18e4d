"""The public kit on a real server: one gateway, two on the same objects, one that ignores conditions."""

import contextlib
import inspect
import itertools
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import settings

from stitch_core.ports import Conflict, Store
from stitch_core.testing.store_machine import store_machine
from stitch_core.testing.stores import StoreTests, contents, one_wins
from stitch_s3.store import S3Store
from stitch_s3.testing.proxy import FaultProxy, ignore_conditions
from stitch_s3.testing.server import ACCESS_KEY, SECRET_KEY, SeaweedServer

pytestmark = pytest.mark.real


class TestS3Store(StoreTests):
    # Contended conditional writes wait for each other in steps of a second.
    writers = 3
    rounds = 2

    @pytest.fixture
    async def store(self, server: SeaweedServer, prefix: str) -> AsyncIterator[S3Store]:
        store = server.store(prefix)
        yield store
        await store.close()

    @pytest.fixture
    async def second_store(self, store: S3Store, server: SeaweedServer) -> AsyncIterator[S3Store]:
        second = server.store(store.location.prefix, page=2)
        yield second
        await second.close()


class TestTwoGateways(StoreTests):
    """Two gateway processes on the same objects; only what depends on both."""

    writers = 4
    rounds = 2

    @pytest.fixture
    async def store(self, server: SeaweedServer, prefix: str) -> AsyncIterator[S3Store]:
        store = server.store(prefix)
        yield store
        await store.close()

    @pytest.fixture
    async def second_store(
        self, store: S3Store, second_gateway: str, server: SeaweedServer
    ) -> AsyncIterator[S3Store]:
        second = server.store(store.location.prefix, second_gateway)
        yield second
        await second.close()


for _name, _test in inspect.getmembers(StoreTests, inspect.isfunction):
    if _name.startswith("test_") and "second_store" not in inspect.signature(_test).parameters:
        setattr(TestTwoGateways, _name, None)


_started: list[SeaweedServer] = []


@pytest.fixture(scope="module", autouse=True)
def started(server: SeaweedServer) -> Iterator[None]:
    """For the machine, which gets no fixtures."""
    _started.append(server)
    yield
    _started.clear()


@contextlib.contextmanager
def s3_store() -> Iterator[Store]:
    yield _started[0].store(f"machine/{next(_numbers)}/", page=3)


_numbers = itertools.count()
TestS3Machine = store_machine(s3_store).TestCase
TestS3Machine.settings = settings(max_examples=3, stateful_step_count=12)
TestS3Machine.pytestmark = [pytest.mark.real]


@pytest.mark.parametrize(
    "test",
    [
        "test_create_meets_an_object",
        "test_conflict_writes_nothing",
        "test_swap_race_has_one_winner",
        "test_create_race_has_one_winner",
    ],
)
async def test_the_kit_catches_a_server_that_ignores_conditions(
    server: SeaweedServer, prefix: str, test: str
) -> None:
    change = ignore_conditions(ACCESS_KEY, SECRET_KEY)
    async with FaultProxy(server.endpoint, change=change) as proxy:
        store = server.store(prefix, proxy.endpoint)
        kit = StoreTests()
        given = {"store": store, "second_store": store}
        method = getattr(kit, test)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            await method(**{name: given[name] for name in inspect.signature(method).parameters})
        await store.close()


async def test_the_same_through_a_proxy_that_changes_nothing(server: SeaweedServer, prefix: str) -> None:
    """It is the conditions that the test above is about."""
    async with FaultProxy(server.endpoint) as proxy:
        store = server.store(prefix, proxy.endpoint)
        await StoreTests().test_conflict_writes_nothing(store)
        await store.close()


async def test_twenty_writers_of_two_gateways(
    server: SeaweedServer, second_gateway: str, prefix: str
) -> None:
    """One round: contended writes wait for each other in steps of a second."""
    stores = [server.store(prefix), server.store(prefix, second_gateway)]

    async def swap(writer: int) -> str:
        return await stores[writer % 2].swap("head", None, contents("round", writer))

    await one_wins(swap, 20, Conflict, stores[0], "head", contents_of="round")
    for store in stores:
        await store.close()
