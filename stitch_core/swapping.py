"""A compare-and-swap whose outcome has to be known, in a store that may not say what became of a call."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from .ports import Clock, Conflict, Store, StoreError, Unavailable, WriteRefused
from .retry import Retry


async def swap_until_known(
    store: Store,
    key: str,
    expected: str | None,
    data: bytes,
    *,
    clock: Clock,
    rng: random.Random,
    retry: Retry,
    seconds: float,
    unknown: Callable[[str], Exception],
) -> str:
    """Repeat the identical bytes under the same condition until the store says what became of them; the tag.

    Seeing what was there before would prove nothing, since a lost write may still land. Raises Conflict when
    something else is there, WriteRefused when nothing was written nor will be, and what ``unknown`` makes of
    the reason after ``seconds``.
    """
    deadline = clock.monotonic() + seconds
    attempt = 0
    while True:
        try:
            return await _once(store, key, expected, data)
        except Conflict:
            raise
        except Unavailable as error:
            attempt += 1
            pause = retry.delay(attempt, rng)
            if clock.monotonic() + pause > deadline:
                raise unknown(str(error)) from error
            await asyncio.sleep(pause)
        except StoreError as error:
            if isinstance(error, WriteRefused) and attempt == 0:
                raise  # nothing of it is under way
            raise unknown(str(error)) from error


async def _once(store: Store, key: str, expected: str | None, data: bytes) -> str:
    """Conflict only when what is there is neither ``expected`` nor ``data``."""
    try:
        tag = await store.swap(key, expected, data)
        if store.capabilities.conditional_writes:
            return tag
        await asyncio.sleep(store.capabilities.visible_after)
        raise Conflict(f"{key}: other writers cannot be ruled out before it is read back")
    except Conflict:
        found = await store.load(key)
        if found.data != data:
            raise
        return found.tag
