"""Between blocking and async code: ``Threads`` for blocking backends, ``LoopThread`` for blocking callers."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

T = TypeVar("T")


class Pool(ThreadPoolExecutor):
    """Goes on with the threads that it has where no more can be started, of which one is there at once.

    From Python 3.12 on that is so as soon as the main thread has ended, while what it left is still awaited.
    """

    def __init__(self, count: int | None, name: str) -> None:
        super().__init__(count, thread_name_prefix=name)
        self.submit(lambda: None)

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                raise


class Threads:
    """A ``RunBlocking`` with threads of its own, so that a hung mount starves nobody else's calls.

    Cancelling a call gives up waiting for it; a function that has started runs to its end.
    """

    def __init__(self, count: int, name: str) -> None:
        self._pool = Pool(count, name)

    async def __call__(self, function: Callable[..., T], /, *args: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, functools.partial(function, *args))

    def close(self) -> None:
        """Take no more calls; those that run end in their own time."""
        self._pool.shutdown(wait=False)


class LoopThread:
    """An event loop in a thread of its own: how synchronous code calls async ports. Used by any thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._pool = Pool(None, name)
        self._loop.set_default_executor(self._pool)
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def start(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a call and return at once."""
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def run(self, call: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """The call's result. TimeoutError after ``timeout`` seconds, and then it is cancelled."""
        future = self.start(call)
        try:
            return future.result(timeout)
        except FutureTimeout:
            if not future.done():
                future.cancel()
            raise

    def close(self) -> None:
        """End the thread; nothing may be running."""
        if self.closed:
            return
        self._pool.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
