"""How far long work has come, said in the event loop's thread; and its end where it does not get on."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from ..checkpoint import Progress
from ..ports import Clock
from .room import gib

T = TypeVar("T")

EVERY = 1.0
"""Seconds between two reports, and before the first. What is complete is none: its activity ends."""
LOOKS = 16
"""In the time after which what stands still is given up."""
SAY_EVERY = 10.0
"""Seconds between two lines of a log about it."""


@contextlib.contextmanager
def reported(activity: Callable[[str], None], what: str, clock: Clock) -> Iterator[Progress]:
    """Tell ``activity`` that ``what`` is done now, and, until this ends, how far it is: ``what: hashed ...``.

    What this yields may be called from any one thread, also when this has ended: who gives up waiting for a
    call does not end it, and it must not speak over what is done then. ``activity`` is called in the loop.
    """
    loop, going, last = asyncio.get_running_loop(), True, clock.monotonic()

    def tell(text: str) -> None:
        if going:
            activity(f"{what}: {text}")

    def progress(step: str, done: int, total: int) -> None:
        nonlocal last
        now = clock.monotonic()
        if going and done < total and now - last >= EVERY:
            last = now
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(tell, f"{step} {gib(done)} of {gib(total)}")

    activity(what)
    try:
        yield progress
    finally:
        going = False


def now_and_then(say: Callable[[str], None], clock: Clock) -> Callable[[str], None]:
    """A listener for activities that lets ``say`` have what tells how far one is, not all of it."""
    last = -math.inf

    def listen(activity: str) -> None:
        nonlocal last
        if ": " in activity and clock.monotonic() - last >= SAY_EVERY:
            last = clock.monotonic()
            say(activity)

    return listen


async def unless_still(work: Awaitable[T], progress: Callable[[], object], seconds: float) -> T:
    """The result of ``work``, however long it takes. Raises TimeoutError, and ends it, once ``progress`` has
    said the same for ``seconds``.
    """
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    seen, since = progress(), loop.time()
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=seconds / LOOKS)
            now = progress()
            if now != seen:
                seen, since = now, loop.time()
            elif not task.done() and loop.time() - since >= seconds:
                raise TimeoutError
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
