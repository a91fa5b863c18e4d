"""Bounded retries with exponential backoff and jitter: one policy for every caller."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from .ports import Unavailable

T = TypeVar("T")


@dataclass(frozen=True)
class Retry:
    """How often and how long to try; times in seconds, None means without limit.

    The n-th delay is drawn from the upper half of ``min(cap, first * 2**n)``. No attempt starts later
    than ``deadline`` after the first one started.
    """

    attempts: int | None = 6
    first: float = 0.1
    cap: float = 5.0
    deadline: float | None = 60.0

    def delay(self, failures: int, rng: random.Random) -> float:
        """Seconds to wait after ``failures`` failures in a row, 1 or more."""
        full = min(self.cap, self.first * 2 ** min(failures - 1, 60))
        return full * rng.uniform(0.5, 1.0)


async def retrying(
    call: Callable[[], Awaitable[T]],
    policy: Retry,
    rng: random.Random,
    retry_on: tuple[type[Exception], ...] = (Unavailable,),
) -> T:
    """The result of ``call``, tried again after the errors in ``retry_on``; in the end the last error."""
    clock = asyncio.get_running_loop().time
    start, failures = clock(), 0
    while True:
        try:
            return await call()
        except retry_on:
            failures += 1
            delay = policy.delay(failures, rng)
            if policy.attempts is not None and failures >= policy.attempts:
                raise
            if policy.deadline is not None and clock() - start + delay > policy.deadline:
                raise
        await asyncio.sleep(delay)
