"""Blocking calls on several threads, their results in order and not all at once."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

MOST_WORKERS = 8


def default_workers(shares: int = 1) -> int:
    """Threads for one of so many shares of the CPUs that this process may use: 8 at most, 1 at least."""
    return max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0)) // shares))


def in_order(calls: Iterable[Callable[[], T]], workers: int) -> Generator[T, None, None]:
    """The results of ``calls`` in order; twice ``workers`` are under way or wait to be taken, at most.

    Without threads for one worker. Ends what has not begun when it is closed, or when a call raises.
    """
    if workers == 1:
        for call in calls:
            yield call()
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="stitch-parallel") as pool:
        waiting: deque[Future[T]] = deque()
        try:
            for call in calls:
                if len(waiting) >= 2 * workers:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(call))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
