"""A bound on what many transfers hold in memory at once."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import AsyncIterator

TRANSFER_BYTES = 256 * 2**20


class Room:
    """``size`` bytes, lent first come first served. Owned by one event loop."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, count: int) -> int:
        """Wait for ``count`` bytes, or for all there are if that is less; what to release later."""
        count = min(count, self.size)
        if not self._waiting and count <= self._free:
            self._free -= count
            return count
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(count)
            else:
                self._waiting.remove((count, turn))
                self._serve()
            raise
        return count

    def release(self, count: int) -> None:
        self._free += count
        self._serve()

    @contextlib.asynccontextmanager
    async def lent(self, count: int) -> AsyncIterator[None]:
        count = await self.acquire(count)
        try:
            yield
        finally:
            self.release(count)

    def _serve(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            count, turn = self._waiting.popleft()
            if not turn.done():
                self._free -= count
                turn.set_result(None)


_rooms: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Room] = weakref.WeakKeyDictionary()


def transfer_room() -> Room:
    """The room that all downloads of a process share: one an event loop, and one loop is what moves files."""
    loop = asyncio.get_running_loop()
    if loop not in _rooms:
        _rooms[loop] = Room(TRANSFER_BYTES)
    return _rooms[loop]
