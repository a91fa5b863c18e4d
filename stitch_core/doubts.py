"""Sources whose bytes were not what their records say when they were read: used last, and not at once again.

One bad read says nothing about the bytes in the store. So a doubt never excludes a source for good: it comes
after every other way, and when no other way is left, it is tried again after a delay that doubles.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from .lineage import NoPlan, Plan
from .ports import Clock
from .retry import Retry
from .stores.transfer import DigestMismatch

DELAYS = Retry(first=1.0, cap=300.0)
"""Before the third read and later ones: a large source that stays damaged is not fetched all the time."""


@dataclass
class _Doubt:
    error: Exception
    count: int
    until: float


class Doubts:
    """By the digest of each source. Owned by one task."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock, self._rng = clock, rng
        self._doubts: dict[str, _Doubt] = {}

    def add(self, digest: str, error: Exception) -> int:
        """One more bad read of a source; how many there were in a row."""
        count = self._doubts[digest].count + 1 if digest in self._doubts else 1
        delay = DELAYS.delay(count - 1, self._rng) if count > 1 else 0.0
        until = self._clock.monotonic() + delay
        self._doubts[digest] = _Doubt(error, count, until)
        return count

    def settle(self, digests: Iterable[str]) -> None:
        """These sources were read, and are what their records say."""
        for digest in digests:
            self._doubts.pop(digest, None)

    def all(self) -> set[str]:
        return set(self._doubts)

    def damaged(self) -> set[str]:
        """Sources of which the store gave other bytes than recorded, twice or more."""
        return {digest for digest, doubt in self._doubts.items() if isinstance(doubt.error, DigestMismatch)}

    def waiting(self) -> dict[str, Exception]:
        """Sources that are not to be read yet, and what was wrong with each."""
        now = self._clock.monotonic()
        return {digest: doubt.error for digest, doubt in self._doubts.items() if doubt.until > now}

    async def around(self, plan: Callable[[set[str]], Awaitable[Plan]]) -> Plan:
        """``plan`` without the doubted sources; where that is no plan, with those whose delay is over.

        ``plan`` gets the digests to do without. Raises NoPlan, or what was wrong with a doubted source while
        it waits and may be the only way.
        """
        try:
            return await plan(self.all())
        except NoPlan:
            if not self._doubts:
                raise
        waiting = self.waiting()
        try:
            return await plan(set(waiting))
        except NoPlan:
            if not waiting:
                raise
        raise next(reversed(waiting.values()))  # the damage is in the way, not that there is nothing else
