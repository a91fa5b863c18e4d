import asyncio
import types
from collections.abc import AsyncIterator

import pytest

from tests.gateway.fleet import Fleet


@pytest.fixture(autouse=True)
def quick_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn looks ten times a second whether it should end, twice in each of hundreds of tests."""
    ticking = types.SimpleNamespace(**vars(asyncio))
    ticking.sleep = lambda seconds: asyncio.sleep(seconds / 20)
    monkeypatch.setattr("uvicorn.server.asyncio", ticking)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    """No replica yet, and no gateway: a test starts what it needs."""
    made = Fleet()
    try:
        yield made
    finally:
        await asyncio.wait_for(made.close(), 10)
