"""Clients: what is not HTTP is refused as all else is, and who only stopped sending is still answered."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from aiohttp import web
from aiohttp.http import HttpVersion10
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler

from stitch_core.replica.server import StallWatch
from stitch_core.versions import Refusal, malformed

# What any HTTP/1.1 client skips: an answer before the answer; in a stream of events a chunk with a comment.
# The host of one that has left for good resets the connection for it, which is how we know.
STILL_THERE = b"HTTP/1.1 100 Continue\r\n\r\n"
STILL_STREAMING = b"3\r\n:\n\n\r\n"
# Seconds that a connection may be idle, or send half a request: longer than load balancers keep theirs.
KEEP_ALIVE = 620.0
FIRST_LOOK, LAST_LOOK = 0.005, 1.0
NO_HEAD = "the request's head did not come in time"
# Seconds in which a client that has begun to send a request's head must have sent it all.
HEAD_SECONDS = 30.0


class Connection(RequestHandler):
    """One client. ``streams``: its answer is a stream of whole events, each a chunk."""

    __slots__ = ("_head", "_last", "_stall", "streams")

    def __init__(self, manager: web.Server, *, stall: float, **options: Any) -> None:
        """``stall``: seconds for which a client may take nothing of an answer before it is cut."""
        super().__init__(manager, **options)
        self.streams = False
        self._stall = StallWatch(stall, self._cut)
        self._head: asyncio.TimerHandle | None = None
        self._last: Any = None

    @property
    def _idle(self) -> bool:
        """Whether no request is being answered."""
        return self._waiter is not None and not self._waiter.done()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages:
            self._last = self._messages[-1]
            self._forget_head()
        elif self._head is None and data and self._idle:
            self._head = self._loop.call_later(HEAD_SECONDS, self._late)

    def _late(self) -> None:
        """Half a request was sent, and the rest does not come."""
        self._head = None
        if self.transport is None or not self._idle:
            return
        body = json.dumps(Refusal(408, "RequestTimeout", NO_HEAD, "never").body()).encode()
        head = "HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.force_close()

    def _forget_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def pause_writing(self) -> None:
        """The client does not keep up; as long as it does not, its request keeps a replica busy."""
        super().pause_writing()
        if self.transport is not None:
            self._stall.start(self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall.stop()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stall.stop()
        self._forget_head()
        super().connection_lost(exc)

    def _cut(self) -> None:
        if self.transport is not None:
            self.logger.info("a client took nothing of its answer for %g s", self._stall.seconds)
            self.transport.abort()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more: it has left, or it waits for its answer. True keeps the connection."""
        transport, request = self.transport, self._current_request
        if transport is None or self._last is None or self._idle:
            return False
        message, payload = self._last
        version = getattr(message, "version", None)  # None: it was no HTTP
        begun = request is not None and not self._messages and request.writer.output_size > 0
        # A client of HTTP/1.0 may not be sent what tells the two apart.
        if not payload.is_eof() or version == HttpVersion10 or (begun and not self.streams):
            return False
        if version is not None:
            transport.write(STILL_STREAMING if begun else STILL_THERE)
        self.close()  # once it is answered
        self._look(FIRST_LOOK)
        return True

    def _look(self, pause: float) -> None:
        """Nobody reads from this connection any more: a reset shows only to who asks."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        sock: Any = transport.get_extra_info("socket")
        if sock is None or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            transport.abort()
            return
        self._loop.call_later(pause, self._look, min(2 * pause, LAST_LOOK))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What no handler answered, in the one envelope. Raises ConnectionError if an answer was begun."""
        if status < 500:
            self.logger.debug("not HTTP, from %s: %s", request.remote, message)
            lines = (message or "").strip().splitlines() or ["it cannot be parsed"]
            if isinstance(exc, LineTooLong) or lines[0].startswith("Too many headers"):
                text = "a line of the request's head is too long, or there are too many of them"
                refusal = Refusal(431, "HeadersTooLarge", text, "never")
            else:
                refusal = malformed(f"the request is not HTTP: {lines[0].rstrip(':')}")
        else:
            self.logger.error("a request from %s failed", request.remote, exc_info=exc)
            refusal = Refusal(500, "InternalError", "the gateway failed; its log says how", "never")
        if request.writer.output_size > 0:
            raise ConnectionError("the answer was begun")
        answer = web.json_response(refusal.body(), status=refusal.status)
        answer.force_close()
        return answer


class _Server(web.Server):
    def __call__(self) -> RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """Serves an app on such connections, which hand out bodies as they were sent."""

    def __init__(self, app: web.Application, *, shutdown_timeout: float, stall: float = 60.0) -> None:
        # Cancellation of the handler is how a client's disconnect reaches the replica.
        super().__init__(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout,
            auto_decompress=False, keepalive_timeout=KEEP_ALIVE, stall=stall,
        )  # fmt: skip

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler, request_factory=made.request_factory, loop=made._loop,
            handler_cancellation=made.handler_cancellation, **made._kwargs,
        )  # fmt: skip
