"""Runs blocking calls in threads: the ``ports.RunBlocking`` of backends that have no async face."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """A ``RunBlocking`` with threads of its own, so that a hung mount starves nobody else's calls.

    Cancelling a call gives up waiting for it; a function that has started runs to its end.
    """

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def __call__(self, function: Callable[..., T], /, *args: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, functools.partial(function, *args))

    def close(self) -> None:
        """Take no more calls; those that run end in their own time."""
        self._pool.shutdown(wait=False)
