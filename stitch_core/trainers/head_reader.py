"""The head of a run, as rollout code asks for it: synchronously, and not more often than it has to."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

from ..chain import ChainReader, NoHead
from ..head import Head
from ..ports import Store
from ..retry import Retry, retrying
from ..stores.bounded import BoundedStore
from ..threads import LoopThread

READ_SECONDS = 60.0


class HeadReader:
    """Reads the head of ``run``; used by any thread."""

    def __init__(
        self, open_store: Callable[[], Store], run: str, *, fresh_for: float = 1.0, patience: float = 0.0
    ) -> None:
        """``fresh_for``: seconds for which an answer of ``recent`` holds. ``patience``: seconds for which a
        read waits for a store that does not answer."""
        self.run = run
        self._loop = LoopThread("stitch-head")
        self._store = BoundedStore(open_store(), READ_SECONDS)
        self._chain = ChainReader(self._store)
        self._fresh_for = fresh_for
        self._retry = Retry(attempts=None, deadline=patience)
        self._last: tuple[float, Head] | None = None

    def read(self) -> Head | None:
        """The head now, None before the run's first claim. Raises StoreError, FormatError."""
        try:
            head, _ = self._loop.run(
                retrying(lambda: self._chain.head(self.run), self._retry, random.Random())
            )
        except NoHead:
            return None
        self._last = time.monotonic(), head
        return head

    def recent(self) -> Head | None:
        """The head, as of at most ``fresh_for`` seconds ago."""
        if self._last is not None and time.monotonic() - self._last[0] < self._fresh_for:
            return self._last[1]
        return self.read()

    def oldest(self, lag: int) -> int:
        """The oldest version that may be rolled out: ``lag`` before the head, and no writer's before its own.

        So nothing is rolled out that was there before the trainer started, nor before a rollback: the first
        version of the newest one's writer has the weights that it began with. Raises StoreError, FormatError.
        """
        head = self.recent()
        if head is None or lag == 0:
            return 0 if head is None else head.number
        return self._loop.run(retrying(lambda: self._oldest(head, lag), self._retry, random.Random()))

    async def _oldest(self, head: Head, lag: int) -> int:
        newest = await self._chain.manifest(self.run, head)
        rows = await self._chain.rows(newest, number=max(0, head.number - lag))
        own = itertools.takewhile(lambda row: row.epoch == newest.epoch, rows)
        first = min(row.number for row in own)
        # Version 0 is the boot checkpoint, which the first writer's weights need not be.
        return max(head.number - lag, first, min(1, head.number))

    def close(self) -> None:
        """Let go of the store and end the thread. Closing twice is fine."""
        if self._loop.closed:
            return
        self._loop.run(self._store.close())
        self._loop.close()
