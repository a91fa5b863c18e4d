"""The gateway's own view of runs' heads: what bounds staleness, and what a trainer's updates wait for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from stitch_core.chain import ChainReader, NoHead
from stitch_core.ports import Store

from .watch import Watch

# While a trainer waits for the head it is read this often (seconds).
IMPATIENT = 0.1
# Runs whose heads are followed besides the gateway's own; the one that was asked for least lately ends first.
MOST_RUNS = 32


class HeadView(Watch):
    """Follows the head of ``run``. ``number`` is None before the run's first claim; it never goes down."""

    def __init__(
        self, store: Store, run: str, rng: random.Random, *, interval: float, clock: Callable[[], float]
    ) -> None:
        """``interval``: seconds between looks; ``clock``: monotonic seconds."""
        super().__init__(rng, interval=interval, clock=clock)
        self.run = run
        self.number: int | None = None
        self._chain = ChainReader(store)

    async def _read(self) -> None:
        try:
            head, _ = await self._chain.head(self.run)
        except NoHead:
            return
        self.number = head.number if self.number is None else max(self.number, head.number)

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


class Heads:
    """The heads of the runs that consumers lag behind, each followed from when it is first asked for."""

    def __init__(
        self,
        store: Store,
        rng: random.Random,
        *,
        interval: float,
        clock: Callable[[], float],
        keep: str | None = None,
    ) -> None:
        """``keep``: the run whose head is followed to the end."""
        self._keep = keep
        self._store = store
        self._rng = rng
        self._interval = interval
        self._clock = clock
        self._following: dict[str, tuple[HeadView, asyncio.Task[None]]] = {}

    def of(self, run: str) -> HeadView:
        """The view of a run's head."""
        found = self._following.pop(run, None)
        if found is None:
            if len(self._following) > MOST_RUNS:
                oldest = next(name for name in self._following if name != self._keep)
                self._following.pop(oldest)[1].cancel()
            view = HeadView(self._store, run, self._rng, interval=self._interval, clock=self._clock)
            found = view, asyncio.ensure_future(view.follow())
        self._following[run] = found
        return found[0]

    async def close(self) -> None:
        """Ends the looking."""
        tasks = [task for _, task in self._following.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
