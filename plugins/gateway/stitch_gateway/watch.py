"""What a gateway reads in the store again and again: one task each, the last good reading, its age."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from stitch_core.head import FormatError
from stitch_core.ports import StoreError


class Watch:
    """Looks every ``interval`` seconds. While the store cannot be read the last reading stands.

    ``error`` says why it cannot: requests go on.
    """

    def __init__(self, rng: random.Random, *, interval: float, clock: Callable[[], float]) -> None:
        """``interval``: seconds between looks; ``clock``: monotonic seconds."""
        self.error: str | None = "not read yet"
        self._rng = rng
        self._interval = interval
        self._clock = clock
        self._read_at: float | None = None
        self._answered = asyncio.Event()

    async def _read(self) -> None:
        """One reading. Raises StoreError, FormatError."""
        raise NotImplementedError

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
        """Read once."""
        began = self._clock()
        try:
            await self._read()
        except (StoreError, FormatError) as error:
            self.error = f"{type(error).__name__}: {error}"
            return
        self.error, self._read_at = None, began
        self._answered.set()

    async def known(self, seconds: float) -> bool:
        """Whether the store has answered at all, or does so within ``seconds``."""
        if self._answered.is_set():
            return True
        try:
            async with asyncio.timeout(seconds):
                await self._answered.wait()
        except TimeoutError:
            return False
        return True
