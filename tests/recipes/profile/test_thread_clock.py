"""Threads that give way to their process are told from the others, and their CPU seconds read."""

from __future__ import annotations

import asyncio
import os
import threading
import time

from stitch_recipes.profile.thread_clock import ThreadClock


def compute(seconds: float, lower: int, said: list[int]) -> None:
    if lower:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + lower)
    said.append(threading.get_native_id())
    while time.thread_time() < seconds:
        sum(range(1000))


async def test_only_threads_of_lower_priority_are_seen_with_what_they_computed() -> None:
    lower: list[int] = []
    other: list[int] = []
    clock = ThreadClock((os.getpid(),))
    threads = [threading.Thread(target=compute, args=args) for args in ((0.5, 1, lower), (0.3, 0, other))]
    async with clock.watching():
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
    assert set(clock.seconds) == {(os.getpid(), lower[0])}
    assert clock.longest is not None
    assert 0.1 < clock.longest <= 0.6


def test_processes_that_are_gone_are_no_error() -> None:
    clock = ThreadClock((2**22 + 1,))
    clock.look()
    assert clock.longest is None
