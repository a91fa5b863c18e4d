"""Retries are bounded in number and in time, and spread out."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from stitch_core.ports import NotFound, Unavailable
from stitch_core.retry import Retry, retrying


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The delays that were asked for, none of which is waited for."""
    delays: list[float] = []

    async def sleep(seconds: float) -> None:
        delays.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return delays


def failing(times: int, error: type[Exception] = Unavailable) -> Callable[[], Awaitable[int]]:
    calls = 0

    async def call() -> int:
        nonlocal calls
        calls += 1
        if calls <= times:
            raise error(f"failure {calls}")
        return calls

    return call


async def test_succeeds_after_failures(slept: list[float]) -> None:
    policy = Retry(attempts=5, first=1.0, cap=3.0, deadline=None)
    assert await retrying(failing(4), policy, random.Random(1)) == 5
    for delay, full in zip(slept, (1.0, 2.0, 3.0, 3.0), strict=True):
        assert full / 2 <= delay <= full


async def test_gives_up_with_the_last_error(slept: list[float]) -> None:
    with pytest.raises(Unavailable, match="failure 3"):
        await retrying(failing(9), Retry(attempts=3), random.Random(1))
    assert len(slept) == 2


async def test_other_errors_pass(slept: list[float]) -> None:
    with pytest.raises(NotFound):
        await retrying(failing(1, NotFound), Retry(), random.Random(1))
    assert not slept
    assert await retrying(failing(1, NotFound), Retry(), random.Random(1), (NotFound,)) == 2


@pytest.mark.virtual_time
async def test_deadline_bounds_unlimited_attempts() -> None:
    policy = Retry(attempts=None, first=0.01, cap=0.02, deadline=0.1)
    start = asyncio.get_running_loop().time()
    with pytest.raises(Unavailable):
        await retrying(failing(10**9), policy, random.Random(1))
    assert asyncio.get_running_loop().time() - start < 1


def test_delays_are_spread_and_never_overflow() -> None:
    rng = random.Random(1)
    assert len({Retry().delay(3, rng) for _ in range(50)}) == 50
    assert Retry().delay(10**6, rng) <= Retry().cap
