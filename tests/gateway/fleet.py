"""Replicas as the gateway sees them: real sockets, the real middleware, an engine that a test scripts."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

from stitch_core.ports import Store
from stitch_core.replica.server import listen, serve
from stitch_core.versions import PolicyVersion
from stitch_gateway.app import Gateway, GatewaySettings, open_gateway
from stitch_gateway.connection import Runner
from stitch_gateway.pools import StaticPool
from tests.replica.scripted import Replica, generated, span


class Server:
    """One replica on a port of its own."""

    def __init__(self) -> None:
        self.replica = Replica()
        self.listener = listen("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.id = f"127.0.0.1:{self.port}"
        self._end = asyncio.Event()
        self._task = asyncio.ensure_future(serve(self.replica.app, self.listener, self._end, grace=5))

    @property
    def engine(self) -> Any:
        return self.replica.engine

    def serves(self, number: int, run: str = "r") -> None:
        """Serve this version from now on, and answer under it."""
        self.replica.gate.open(PolicyVersion(run, number))
        self.engine.body = generated(span(str(PolicyVersion(run, number)), 0, 3))

    async def close(self) -> None:
        self.engine.hang.set()
        self._end.set()
        await self._task
        self.listener.close()


class Fleet:
    """Replicas and the gateway before them."""

    def __init__(self) -> None:
        self.stack = contextlib.AsyncExitStack()
        self.servers: list[Any] = []
        self.gateway: Gateway
        self.url = ""
        self.session: aiohttp.ClientSession

    def add(self, number: int = 7, run: str = "r") -> Server:
        server = Server()
        server.serves(number, run)
        self.servers.append(server)
        return server

    async def start(
        self,
        *urls: str,
        until_ready: int | None = None,
        store: Store | None = None,
        peers: Any = None,
        stall: float = 60.0,
        **settings: Any,
    ) -> None:
        """Start the gateway in front of the replicas (and ``urls``), and wait until it has seen them."""
        settings = {"hold": 30.0, "poll": 0.02, "probe_timeout": 30.0, **settings}
        pool = StaticPool([*(server.url for server in self.servers), *urls])
        opening = open_gateway(pool, GatewaySettings(**settings), random.Random(1), store, peers)
        self.gateway = await self.stack.enter_async_context(opening)
        self.session = await self.stack.enter_async_context(aiohttp.ClientSession())
        runner = Runner(self.gateway.app(), shutdown_timeout=5, stall=stall)
        await runner.setup()
        self.stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        wanted = len(self.servers) if until_ready is None else until_ready
        await self.until(lambda: sum(r.ready for r in self.gateway.fleet.replicas) >= wanted)

    async def until(self, condition: Any, timeout: float = 60.0) -> None:
        async with asyncio.timeout(timeout):
            while not condition():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.gateway.fleet.changed.wait(), 0.01)

    async def post(self, body: Any, path: str = "/generate", **options: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, **options) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as answer:
            return answer.status, await answer.json()

    async def close(self) -> None:
        await self.stack.aclose()
        await asyncio.gather(*(server.close() for server in self.servers))


class RawReplica:
    """A replica of plain sockets: answers ``/ready`` well, and each POST with the next of ``answers``.

    An answer is bytes that are sent before the connection is cut.
    """

    def __init__(self, *answers: bytes, serving: int = 7) -> None:
        self.answers = list(answers)
        self.requests = 0
        self.serving = serving
        self.url = ""
        self._server: asyncio.Server
        self._serving: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["RawReplica"]:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            self._server.close()
            await some_turns()  # what was accepted is served then
            for writer in self._serving.values():
                writer.transport.abort()
            await asyncio.gather(*self._serving, return_exceptions=True)
            await some_turns()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving[task] = writer
        await self._serve(reader, writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                body = (
                    b'{"ready": true, "run": "r", "weight_version": "%d", "active_requests": 0}'
                    % self.serving
                )
                writer.write(whole(body))
            else:
                self.requests += 1
                writer.write(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def some_turns() -> None:
    """What the loop has begun, such as to accept or to close a connection, comes to its end."""
    for _ in range(10):
        await asyncio.sleep(0)


def whole(body: bytes, status: bytes = b"200 OK", kind: bytes = b"application/json") -> bytes:
    """An HTTP answer that closes the connection."""
    head = b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-type: %s\r\n" % (status, kind)
    return (
        head
        + b"x-stitch-run: r\r\nx-stitch-admitted-version: 7\r\ncontent-length: %d\r\n\r\n" % len(body)
        + body
    )


def chunked(*pieces: bytes) -> bytes:
    """The beginning of an event stream in chunked coding, without its end."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    head += b"x-stitch-run: r\r\nx-stitch-admitted-version: 7\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
