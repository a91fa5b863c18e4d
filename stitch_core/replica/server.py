"""An ASGI app on a socket, with uvicorn. uvicorn comes with the engine's image or the extra ``[cli]``."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable
from typing import Any

from ..stores.probe import error_text
from ..versions import Refusal, malformed
from .asgi import App, encode_json
from .outbox import STALL_SECONDS

BACKLOG = 2048
# Seconds in which a client must have sent a request's head: of its first, or once it has begun another.
HEAD_SECONDS = 30.0


class StallWatch:
    """Calls ``cut`` once a client has taken nothing for ``seconds`` of what its connection holds for it."""

    def __init__(self, seconds: float, cut: Callable[[], None]) -> None:
        self.seconds, self._cut = seconds, cut
        self._timer: asyncio.TimerHandle | None = None

    def start(self, transport: asyncio.WriteTransport) -> None:
        """The client does not keep up; call ``stop`` when it does, or is gone."""
        self.stop()
        self._look(transport, None)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, transport: asyncio.WriteTransport, before: int | None) -> None:
        held = transport.get_write_buffer_size()
        if before is not None and held >= before:
            self._timer = None
            self._cut()
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.seconds, self._look, transport, held)


class PortInUse(OSError):
    """Another process listens on the port."""


class ServerEnded(OSError):
    """The server ended although nobody asked it to; what it logged says why."""


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises PortInUse, OSError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise OSError(f"{host} is not an address of this machine: {error.strerror}") from None
    # uvicorn sets TCP_NODELAY only on connections of a listener whose protocol is named.
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(f"port {port} on {host} is in use by another process") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise OSError(f"{host} is not an address of this machine: {error.strerror}") from None
        raise OSError(f"port {port} on {host}: {error_text(error)}") from None
    return listener


async def serve(app: App, listener: socket.socket, end: asyncio.Event, *, grace: float = 5.0) -> None:
    """Serve until ``end`` is set, then give open connections ``grace`` seconds. Signals are the caller's.

    Raises ServerEnded, such as when the app's startup fails.
    """
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    config = uvicorn.Config(
        app, http=_hurried(AutoHTTPProtocol), log_level="warning", access_log=False, lifespan="on", ws="none"
    )
    config.timeout_graceful_shutdown = max(1, round(grace))
    server = uvicorn.Server(config)

    async def run() -> None:
        with contextlib.suppress(SystemExit):  # some versions exit where an app does not start
            await server._serve([listener])

    serving = asyncio.ensure_future(run())
    ending = asyncio.ensure_future(end.wait())
    try:
        await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
    finally:
        ending.cancel()
        asked = end.is_set()
        server.should_exit = True
        await serving
    if not asked:
        raise ServerEnded("the HTTP server ended by itself")


def _hurried(protocol: type[Any]) -> type[Any]:
    """uvicorn's ``protocol`` with deadlines for heads and for clients that take nothing of their answers, and
    what is no HTTP refused in the one envelope.
    """

    class Hurried(protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._stall = StallWatch(STALL_SECONDS, transport.abort)
            self._wait_for_head()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stall.start(self.transport)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stall.stop()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self._awaits_head():
                self._stop_waiting()
            elif self._deadline is None:
                self._wait_for_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            self._stall.stop()
            super().connection_lost(exc)

        def _awaits_head(self) -> bool:
            return self.cycle is None or bool(self.cycle.response_complete)

        def _wait_for_head(self) -> None:
            self._deadline = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._late)

        def _stop_waiting(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _late(self) -> None:
            self._deadline = None
            if self._awaits_head() and not self.transport.is_closing():
                text = "the request's head did not come in time"
                self._refuse(Refusal(408, "RequestTimeout", text, "never"), "Request Timeout")

        def send_400_response(self, msg: str) -> None:
            """uvicorn's own is plain text."""
            if self._awaits_head():
                self._refuse(malformed(f"the request is not HTTP: {msg}"), "Bad Request")
            else:  # what was begun stays incomplete
                self.transport.close()

        def _refuse(self, refusal: Refusal, reason: str) -> None:
            body = encode_json(refusal.body())
            head = f"HTTP/1.1 {refusal.status} {reason}\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
            self.transport.close()

    return Hurried
