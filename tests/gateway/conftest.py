import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.gateway.fleet import Fleet


@pytest.fixture(autouse=True)
def ends(quick_ends: None) -> None:
    """For all of this folder."""


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    """No replica yet, and no gateway: a test starts what it needs."""
    made = Fleet()
    try:
        yield made
    finally:
        await asyncio.wait_for(made.close(), 60)
