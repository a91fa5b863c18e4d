"""The gateway's own view of a run's head: what bounds staleness, and what a trainer's updates wait for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from stitch_core.chain import ChainReader, NoHead
from stitch_core.head import FormatError
from stitch_core.ports import Store, StoreError

# While a trainer waits for the head it is read this often (seconds).
IMPATIENT = 0.1


class HeadView:
    """Follows the head of ``run``. ``number`` is None before the run's first claim; it never goes down.

    While the store cannot be read the last number stands, and ``error`` says why: requests go on.
    """

    def __init__(
        self, store: Store, run: str, rng: random.Random, *, interval: float, clock: Callable[[], float]
    ) -> None:
        """``interval``: seconds between looks; ``clock``: monotonic seconds."""
        self.run = run
        self.number: int | None = None
        self.error: str | None = "not read yet"
        self._chain = ChainReader(store)
        self._rng = rng
        self._interval = interval
        self._clock = clock
        self._read_at: float | None = None
        self._answered = asyncio.Event()

    @property
    def age(self) -> float | None:
        """Seconds since the store last answered."""
        return None if self._read_at is None else self._clock() - self._read_at

    async def follow(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._interval * self._rng.uniform(0.8, 1.0))

    async def look(self) -> None:
        """Read the head once."""
        began = self._clock()
        try:
            head, _ = await self._chain.head(self.run)
            self.number = head.number if self.number is None else max(self.number, head.number)
        except NoHead:
            pass
        except (StoreError, FormatError) as error:
            self.error = f"{type(error).__name__}: {error}"
            return
        self.error, self._read_at = None, began
        self._answered.set()

    async def known(self, seconds: float) -> bool:
        """Whether the store has answered at all, or does so within ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                await self._answered.wait()
        except TimeoutError:
            return False
        return True

    async def reaches(self, number: int, seconds: float) -> bool:
        """Whether the head names ``number`` or a later one, or does so within ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                while self.number is None or self.number < number:
                    await self.look()
                    if self.number is None or self.number < number:
                        await asyncio.sleep(IMPATIENT)
        except TimeoutError:
            return False
        return True
