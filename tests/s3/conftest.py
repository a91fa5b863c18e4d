from collections.abc import Iterator

import pytest

from tests.s3.fake import FakeS3


@pytest.fixture(scope="package")
def server() -> Iterator[FakeS3]:
    with FakeS3().serving() as fake:
        yield fake


@pytest.fixture
def fake(server: FakeS3) -> FakeS3:
    """Empty and well-behaved."""
    server.reset()
    return server
