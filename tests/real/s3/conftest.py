"""One SeaweedFS for all tests here, each below a prefix of its own."""

import itertools
from collections.abc import Iterator

import pytest

from stitch_s3.testing.server import SeaweedServer

NO_LIST, READ_ONLY = "STITCHTESTNOLIST0001", "STITCHTESTREADONLY01"
_numbers = itertools.count()


@pytest.fixture(scope="package")
def server() -> Iterator[SeaweedServer]:
    others = {NO_LIST: ["Read", "Write"], READ_ONLY: ["Read", "List"]}
    with SeaweedServer(others=others) as server:
        yield server


@pytest.fixture(scope="package")
def second_gateway(server: SeaweedServer) -> str:
    """The endpoint of another gateway process on the same objects."""
    return server.add_gateway()


@pytest.fixture
def prefix() -> str:
    return f"t{next(_numbers)}/x/"
