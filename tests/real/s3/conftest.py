"""One SeaweedFS for all tests here, each below a prefix of its own."""

import itertools
from collections.abc import Iterator

import pytest

from stitch_s3.testing.server import SeaweedServer

_numbers = itertools.count()


@pytest.fixture(scope="package")
def server() -> Iterator[SeaweedServer]:
    with SeaweedServer() as server:
        yield server


@pytest.fixture(scope="package")
def second_gateway(server: SeaweedServer) -> str:
    """The endpoint of another gateway process on the same objects."""
    return server.add_gateway()


@pytest.fixture
def prefix() -> str:
    return f"t{next(_numbers)}/x/"
