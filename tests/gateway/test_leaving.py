"""A gateway that is to end leaves rotation first, then lets requests end, then exits, with deadlines."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from stitch_gateway.app import run_gateway
from stitch_gateway.pools import StaticPool
from tests.gateway.fleet import Server
from tests.gateway.test_gateway import EVENT

PROMPT = {"text": "hi"}


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + 60
    while not await true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


class Leaving:
    """A gateway before one replica, and a client of it."""

    def __init__(self, server: Server, session: aiohttp.ClientSession) -> None:
        self.server, self.session = server, session
        self.stop, self.url = asyncio.Event(), ""
        self.task: asyncio.Task[None]

    async def start(self, **options: Any) -> None:
        port = asyncio.get_running_loop().create_future()
        pool = StaticPool([self.server.url])
        self.task = asyncio.ensure_future(
            run_gateway(pool, "127.0.0.1", 0, stop=self.stop, on_ready=port.set_result, poll=0.02, **options)
        )
        self.url = f"http://127.0.0.1:{await port}"
        await until(self.is_ready)

    async def ready(self) -> tuple[int, Any]:
        async with self.session.get(self.url + "/ready") as answer:
            return answer.status, await answer.json()

    async def is_ready(self) -> bool:
        return (await self.ready())[0] == 200

    async def active(self) -> bool:
        """Whether the replica runs a request."""
        return self.server.replica.gate.active > 0

    async def idle(self) -> bool:
        return not await self.active()

    async def post(self, **options: Any) -> int:
        async with self.session.post(self.url + "/generate", json=PROMPT, **options) as answer:
            await answer.read()
            return answer.status

    async def refused(self) -> bool:
        """Whether nobody takes a new connection."""
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]))
        except OSError:
            return True
        writer.close()
        return False


@pytest.fixture
async def leaving() -> AsyncIterator[Leaving]:
    server = Server()
    server.serves(7)
    async with aiohttp.ClientSession() as session:
        made = Leaving(server, session)
        yield made
        made.stop.set()
        server.engine.hang.set()
        made.task.cancel()
        await asyncio.gather(made.task, return_exceptions=True)
        await server.close()


async def test_it_says_so_while_it_still_serves(leaving: Leaving) -> None:
    await leaving.start(leave=60.0)
    assert await leaving.ready() == (200, {"ready": True, "replicas": 1, "leaving": False})
    leaving.stop.set()
    await asyncio.sleep(0)
    assert await leaving.ready() == (503, {"ready": False, "replicas": 1, "leaving": True})
    async with leaving.session.get(leaving.url + "/health") as answer:
        assert answer.status == 200
    # A request that comes all the same is served, and its connection is not kept.
    async with leaving.session.post(leaving.url + "/generate", json=PROMPT) as answer:
        assert (answer.status, answer.headers["connection"]) == (200, "close")


async def test_then_it_takes_nobody_and_what_runs_may_end(leaving: Leaving) -> None:
    leaving.server.engine.hang.clear()
    await leaving.start(leave=0.05, drain=60.0)
    running = asyncio.ensure_future(leaving.post())
    await until(leaving.active)
    leaving.stop.set()
    await until(leaving.refused)
    assert not leaving.task.done()
    leaving.server.engine.hang.set()
    assert await running == 200
    await asyncio.wait_for(leaving.task, 60)


async def test_the_drain_has_a_deadline_and_who_is_cut_sees_an_error(leaving: Leaving) -> None:
    leaving.server.engine.pieces = [EVENT]
    leaving.server.engine.hang.clear()
    await leaving.start(leave=0.0, drain=0.1)
    body = {**PROMPT, "stream": True}
    async with leaving.session.post(leaving.url + "/generate", json=body) as answer:
        got = await answer.content.readuntil(b"\n\n")
        leaving.stop.set()
        await asyncio.wait_for(leaving.task, 60)
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    assert b'"finish_reason":null' in got
    await until(leaving.idle)


async def test_a_gateway_that_is_cancelled_ends_at_once(leaving: Leaving) -> None:
    await leaving.start(leave=60.0)
    leaving.task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait_for(leaving.task, 60)
    assert await leaving.refused()
