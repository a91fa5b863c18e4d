"""Answers on their way to clients that read slowly, or not at all: kept here, so that no engine waits."""

from __future__ import annotations

import asyncio
from collections import deque

from .asgi import Message, Send

STALL_SECONDS = 60.0
"""A client that takes nothing of its answer for so long is given up."""

MOST_KEPT = 1 << 30
"""Bytes that one process keeps of all its clients' answers; beyond it engines wait for their clients."""

PIECE = 256 << 10
"""Bytes after which it is looked again whether a client takes any."""


class Kept:
    """How much the answers of one process are that wait for their clients: bytes, and how many may be."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self.most = most
        self.bytes = 0


class Outbox:
    """What goes to one client. ``put`` and ``wait`` are the answer's, ``run`` is the only one who sends."""

    def __init__(self, send: Send, kept: Kept, stall: float = STALL_SECONDS) -> None:
        """``stall``: seconds for which the client may take nothing."""
        self._send, self._kept, self._stall = send, kept, stall
        self._queue: deque[Message] = deque()
        self._size = 0
        self._closed = self._gone = False
        self._news = asyncio.Event()  # for run
        self._sent = asyncio.Event()  # for wait

    async def put(self, message: Message) -> None:
        """Behind what is kept already; does not wait. Dropped if the client is gone."""
        if self._gone:
            return
        self._queue.append(message)
        self._count(len(message.get("body", b"")))
        self._news.set()

    async def wait(self) -> None:
        """Until there is room for more, or the client has taken all of this answer, or is gone."""
        while self._size and self._kept.bytes > self._kept.most and not self._gone:
            self._sent.clear()
            await self._sent.wait()

    def close(self) -> None:
        """Nothing comes any more: ``run`` ends once all is sent."""
        self._closed = True
        self._news.set()

    async def run(self) -> None:
        """Send until closed. Raises what sending raises, and TimeoutError for a client that takes nothing."""
        try:
            while True:
                self._news.clear()
                while self._queue:
                    message = self._next()
                    async with asyncio.timeout(self._stall):
                        await self._send(message)
                    self._count(-len(message.get("body", b"")))
                    self._sent.set()
                if self._closed:
                    return
                await self._news.wait()
        finally:
            self._gone = True
            self._queue.clear()
            self._count(-self._size)
            self._sent.set()

    def _next(self) -> Message:
        """The first message; of a body as much as has gathered, up to a piece."""
        message = self._queue.popleft()
        if message["type"] != "http.response.body":
            return message
        parts = [message.get("body", b"")]
        size = len(parts[0])
        while self._queue and size < PIECE:
            message = self._queue.popleft()
            parts.append(message.get("body", b""))
            size += len(parts[-1])
        return {**message, "body": b"".join(parts)} if len(parts) > 1 else message

    def _count(self, size: int) -> None:
        self._size += size
        self._kept.bytes += size
