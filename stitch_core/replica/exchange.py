"""One admitted request on its way through the engine app: disconnects, revocation, and an end in any case.

First the engine works for it, then what its client has not read yet is sent: only the former is the gate's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..versions import unavailable
from .admission import Ticket
from .answer import Answer
from .asgi import App, Message, Receive, Scope, Send
from .outbox import Outbox


class Exchange:
    """Runs the engine app for one ticket, whose ``answer`` goes through ``outbox``.

    A revoked ticket, and a client that takes nothing, look like a client that left: the engine is told by the
    means it has for that, and by ``abort`` for each of ``request_ids`` if the app has not returned ``grace``
    seconds later.
    """

    def __init__(
        self,
        app: App,
        ticket: Ticket,
        answer: Answer,
        outbox: Outbox,
        *,
        receive: Receive,
        body: bytes,
        request_ids: Sequence[str],
        abort: Callable[[str], Awaitable[None]],
        release: Callable[[], None],
        grace: float,
        send: Send | None = None,
    ) -> None:
        """``release`` is called when the engine has done with the request. ``send`` takes what the app
        answers, for ``answer`` (default: ``answer.send``).
        """
        self._app = app
        self._send = send or answer.send
        self._ticket = ticket
        self._answer, self._outbox = answer, outbox
        self._client = receive
        self._body: bytes | None = body
        self._request_ids = request_ids
        self._abort = abort
        self._release = release
        self._grace = grace
        self._stop = asyncio.Event()
        self._left = asyncio.Event()
        ticket.on_revoke = self._stop.set

    async def run(self, scope: Scope) -> None:
        """Returns when the app has and the client was answered, or is gone; raises what the app raised."""
        listener = asyncio.create_task(self._listen())
        sender = asyncio.create_task(self._deliver())
        stop = asyncio.create_task(self._stop.wait())
        left = asyncio.create_task(self._left.wait())
        work = asyncio.ensure_future(self._app(scope, self._receive, self._send))
        try:
            await self._work(work, stop)
            self._release()
            self._outbox.close()
            tasks: set[asyncio.Future[Any]] = {sender, left}
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (listener, sender, stop, left, work):
                task.cancel()
            await asyncio.gather(listener, sender, stop, left, work, return_exceptions=True)
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _work(self, work: asyncio.Future[None], stop: asyncio.Future[Any]) -> None:
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        # What an app does after its answer is complete is its own affair.
        if not work.done() and not self._answer.complete:
            await self._end(work)
        await asyncio.wait({work})
        if not self._answer.complete and (not self._stop.is_set() or self._ticket.revoked):
            await self._answer.give_up(
                self._ticket.revoked or unavailable("the engine ended without an answer")
            )

    async def _listen(self) -> None:
        """The only reader of the client's messages once the body is read."""
        while (await self._client())["type"] != "http.disconnect":
            pass
        self._leave()

    async def _deliver(self) -> None:
        """However sending fails, the client does not get its answer any more."""
        try:
            await self._outbox.run()
        except Exception:
            self._leave()

    def _leave(self) -> None:
        self._left.set()
        self._stop.set()

    async def _receive(self) -> Message:
        """The app's ``receive``: the body, then nothing until the request is to end."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._stop.wait()
        return {"type": "http.disconnect"}

    async def _end(self, work: asyncio.Future[None]) -> None:
        """Make the app return: by the disconnect that it sees, by abort, by cancelling it."""
        if self._ticket.revoked is not None:
            await self._answer.give_up(self._ticket.revoked)
        if await self._returned(work):
            return
        await asyncio.gather(*(self._abort_one(request_id) for request_id in self._request_ids))
        if not await self._returned(work):
            work.cancel()

    async def _abort_one(self, request_id: str) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._grace):
                await self._abort(request_id)

    async def _returned(self, work: asyncio.Future[None]) -> bool:
        await asyncio.wait({work}, timeout=self._grace)
        return work.done()
