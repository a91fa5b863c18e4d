"""The way back of one request: what the engine app sends, checked and stamped, or a refusal in its place."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable

from ..versions import HEADER_ADMITTED, HEADER_RUN, Refusal, unavailable
from . import sse
from .admission import Ticket
from .asgi import Headers, Message, encode_json, header_map, send_refusal, without
from .outbox import Outbox
from .report import Unreported, WrongReport
from .stamp import Stamper

DONE = "[DONE]"


def unreported(message: str) -> Refusal:
    """502: a generation whose versions the engine does not tell is not handed out."""
    return Refusal(502, "VersionUnreported", message, "never")


class Answer:
    """All that a client gets. Nothing but a checked answer goes out as a success, and no revoked one.

    Answers that are no success (errors of the engine) pass untouched.
    """

    def __init__(
        self,
        outbox: Outbox,
        ticket: Ticket,
        stamper: Stamper,
        *,
        release: Callable[[], None],
        mismatch: Callable[[str], None],
        answering: Callable[[], Awaitable[None]],
    ) -> None:
        """``release`` is called as soon as the engine has nothing more to do for this request, whatever the
        client has read of it.

        ``answering`` returns once answers may go out (``Gate.answering``).
        """
        self.started = False
        self.complete = False
        self._outbox, self._send = outbox, outbox.put
        self._ticket = ticket
        self._stamper = stamper
        self._release = release
        self._mismatch = mismatch
        self._answering = answering
        self._lock = asyncio.Lock()
        self._start: Message | None = None
        self._handle: Callable[[bytes, bool], Awaitable[None]] = self._write
        self._parts: list[bytes] = []
        self._splitter = sse.Splitter()

    async def send(self, message: Message) -> None:
        """The engine app's ``send``."""
        # Not under the lock: what is revoked meanwhile is refused at once.
        await self._answering()
        async with self._lock:
            if self.complete:
                return
            if message["type"] == "http.response.start":
                self._begin(message)
            elif message["type"] == "http.response.body" and self._start is not None:
                last = not message.get("more_body", False)
                if last:
                    self._release()
                if self._ticket.revoked is not None:
                    await self._refuse(self._ticket.revoked)
                else:
                    await self._handle(message.get("body", b""), last)
        if not self.complete:
            await self._outbox.wait()

    async def give_up(self, refusal: Refusal) -> None:
        """End the answer now; what the engine app still sends is dropped."""
        async with self._lock:
            if not self.complete:
                await self._refuse(refusal)

    # ------------------------------------------------------------------------------------------ inside

    def _begin(self, message: Message) -> None:
        self._start = message
        if not 200 <= message["status"] < 300:
            return
        headers = header_map(message.get("headers", ()))
        streams = headers.get("content-type", "").startswith("text/event-stream")
        self._handle = self._stream if streams else self._whole
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            self._handle = functools.partial(self._encoded, encoding)
        kept = without(
            message.get("headers", ()), ("content-length", "content-encoding", HEADER_ADMITTED, HEADER_RUN)
        )
        admitted = self._ticket.admitted
        kept.append((HEADER_ADMITTED.encode(), str(admitted.number).encode()))
        kept.append((HEADER_RUN.encode(), admitted.run.encode()))
        self._start = {**message, "headers": kept}

    async def _whole(self, data: bytes, last: bool) -> None:
        self._parts.append(data)
        if not last:
            return
        try:
            value = json.loads(b"".join(self._parts))
        except (ValueError, RecursionError):
            await self._refuse(unreported("the engine's answer is not JSON"))
            return
        refusal = None
        try:
            body = encode_json(self._stamper.body(value))
        except (WrongReport, Unreported) as error:
            refusal = self._judge(error)
        if refusal is not None:
            await self._refuse(refusal)
        else:
            await self._write(body, True, [(b"content-length", str(len(body)).encode())])

    async def _encoded(self, encoding: str, data: bytes, last: bool) -> None:
        message = f"the engine answers in content-encoding {encoding}, which was not asked for"
        await self._refuse(unreported(message))

    async def _stream(self, data: bytes, last: bool) -> None:
        events = self._splitter.feed(data)
        if last and (rest := self._splitter.finish()).strip():
            events.append(rest + b"\n\n")
        out = bytearray()
        for event in events:
            try:
                out += self._event(event)
            except (WrongReport, Unreported) as error:
                if out:
                    await self._write(bytes(out), False)
                await self._refuse(self._judge(error))
                return
        if last and (missing := self._stamper.missing()) is not None:
            await self._refuse(unreported(missing))
        elif out or last:
            await self._write(bytes(out), last)

    def _event(self, event: bytes) -> bytes:
        data = sse.data_of(event)
        if data is None:
            return event
        if data.strip() == DONE:
            if (missing := self._stamper.missing()) is not None:
                raise Unreported(missing)
            return event
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return event
        return sse.with_data(event, self._stamper.event(value)) if isinstance(value, dict) else event

    def _judge(self, error: WrongReport | Unreported) -> Refusal:
        if isinstance(error, Unreported):
            return unreported(str(error))
        self._mismatch(str(error))
        return unavailable(f"the engine's answer cannot be trusted: {error}")

    async def _refuse(self, refusal: Refusal) -> None:
        self.complete = True
        if not self.started:
            self.started = True
            await send_refusal(self._send, refusal)
        elif self._handle == self._stream:
            event = sse.with_data(b"", refusal.body())
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        # An error of the engine that was begun stays incomplete: the server cuts the connection.

    async def _write(self, data: bytes, last: bool, headers: Headers | None = None) -> None:
        # Set first: if sending fails the client is gone, and nothing may be sent any more.
        self.complete = self.complete or last
        if not self.started:
            assert self._start is not None
            self.started = True
            await self._send({**self._start, "headers": [*self._start.get("headers", ()), *(headers or ())]})
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
