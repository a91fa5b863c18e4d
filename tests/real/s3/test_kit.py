"""The public kit on a real server."""

from collections.abc import AsyncIterator

import pytest

from stitch_core.testing.stores import StoreTests
from stitch_s3.store import S3Store
from stitch_s3.testing.server import SeaweedServer

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
