"""Several calls at a time that succeed or fail together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def all_of(calls: Sequence[Callable[[], Awaitable[T]]], limit: int) -> list[T]:
    """The results in order, of at most ``limit`` calls at a time.

    After the first failure the others are cancelled and waited for, and then it is raised.
    """
    room = asyncio.Semaphore(limit)

    async def one(call: Callable[[], Awaitable[T]]) -> T:
        async with room:
            return await call()

    tasks = [asyncio.ensure_future(one(call)) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
