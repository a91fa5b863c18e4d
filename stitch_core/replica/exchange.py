"""One admitted request on its way through the engine app: disconnects, revocation, and an end in any case."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from ..versions import Refusal, unavailable
from .admission import Ticket
from .answer import Answer
from .asgi import App, Message, Receive, Scope, Send


class Exchange:
    """Runs the engine app for one ticket.

    A revoked ticket looks like a client that left: the engine is told by the means it has for that, and by
    ``abort`` for each of ``request_ids`` if the app has not returned ``grace`` seconds later.
    """

    def __init__(
        self,
        app: App,
        ticket: Ticket,
        answer: Answer,
        *,
        receive: Receive,
        body: bytes,
        request_ids: Sequence[str],
        abort: Callable[[str], Awaitable[None]],
        grace: float,
        send: Send | None = None,
    ) -> None:
        """``send`` takes what the app answers, for ``answer`` (default: ``answer.send``)."""
        self._app = app
        self._send = send or answer.send
        self._ticket = ticket
        self._answer = answer
        self._client = receive
        self._body: bytes | None = body
        self._request_ids = request_ids
        self._abort = abort
        self._grace = grace
        self._stop = asyncio.Event()
        ticket.on_revoke = self._stop.set

    async def run(self, scope: Scope) -> None:
        """Returns when the app has; raises what the app raised, after the client was answered."""
        listener = asyncio.create_task(self._listen())
        stop = asyncio.create_task(self._stop.wait())
        work = asyncio.ensure_future(self._app(scope, self._receive, self._send))
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            # What an app does after its answer is complete is its own affair.
            if not work.done() and not self._answer.complete:
                await self._end(work)
            await asyncio.wait({work})
        finally:
            for task in (listener, stop, work):
                task.cancel()
            await asyncio.gather(listener, stop, work, return_exceptions=True)
        if not self._answer.complete and (not self._stop.is_set() or self._ticket.revoked):
            await self._give_up(self._ticket.revoked or unavailable("the engine ended without an answer"))
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _listen(self) -> None:
        """The only reader of the client's messages once the body is read."""
        while (await self._client())["type"] != "http.disconnect":
            pass
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
            await self._give_up(self._ticket.revoked)
        if await self._returned(work):
            return
        for request_id in self._request_ids:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(self._grace):
                    await self._abort(request_id)
        if not await self._returned(work):
            work.cancel()

    async def _give_up(self, refusal: Refusal) -> None:
        # A client that does not read must not keep a drain waiting.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace):
                await self._answer.give_up(refusal)

    async def _returned(self, work: asyncio.Future[None]) -> bool:
        await asyncio.wait({work}, timeout=self._grace)
        return work.done()
