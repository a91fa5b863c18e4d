"""A gateway process that is killed or told to end in mid-answer: what its clients and its replicas see."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.gateway.fleet import Server
from tests.gateway.test_gateway import EVENT, FINAL
from tests.gateway.test_leaving import until

PROMPT = {"text": "hi"}
STREAM = {**PROMPT, "stream": True}
CLIENTS = 4

pytestmark = pytest.mark.slow


class Running:
    """A gateway process before one replica whose engine hangs in mid-answer."""

    def __init__(self, server: Server, process: Process, url: str) -> None:
        self.server, self.process, self.url = server, process, url
        self.begun = 0

    async def active(self) -> bool:
        return self.server.replica.gate.active == CLIENTS

    async def idle(self) -> bool:
        return self.server.replica.gate.active == 0

    async def reading(self) -> bool:
        return self.begun == CLIENTS

    async def ask(self, session: aiohttp.ClientSession, body: dict[str, object]) -> tuple[int, bytes]:
        async with session.post(self.url + "/generate", json=body) as answer:
            got = b""
            async for chunk in answer.content.iter_any():
                self.begun += not got
                got += chunk
            return answer.status, got

    async def code(self, patience: float = 30.0) -> int:
        return await asyncio.wait_for(self.process.wait(), patience)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    server = Server()
    server.serves(7)
    server.engine.hang.clear()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "stitch_core.cli", "gateway", "--json", "--port", "0", "--replica", server.url,
        "--poll", "0.05", "--leave", "0.5", "--drain", "30",
        stdout=PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        yield Running(server, process, json.loads(line)["url"])
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await server.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_killed_it_ends_nothing_as_a_success(running: Running, stream: bool) -> None:
    running.server.engine.pieces = [EVENT] if stream else None
    async with aiohttp.ClientSession() as session:
        body = STREAM if stream else PROMPT
        asking = [asyncio.ensure_future(running.ask(session, body)) for _ in range(CLIENTS)]
        await until(running.active)
        if stream:
            await until(running.reading)
        running.process.send_signal(signal.SIGKILL)
        assert await running.code() == -signal.SIGKILL
        outcomes = await asyncio.gather(*asking, return_exceptions=True)
    for outcome in outcomes:
        expected = aiohttp.ClientPayloadError if stream else aiohttp.ServerDisconnectedError
        assert isinstance(outcome, expected | ConnectionResetError | aiohttp.ClientOSError), outcome
    # The engine was left hanging: only the connections that ended can have told the replica.
    await until(running.idle)
    assert running.server.engine.disconnected


async def test_told_to_end_it_leaves_rotation_and_ends_every_answer(running: Running) -> None:
    running.server.engine.pieces = [EVENT, FINAL]
    async with aiohttp.ClientSession() as session:

        async def ready() -> bool:
            async with session.get(running.url + "/ready") as answer:
                return answer.status == 200

        async def leaving() -> bool:
            return not await ready()

        await until(ready)
        asking = [asyncio.ensure_future(running.ask(session, STREAM)) for _ in range(CLIENTS)]
        await until(running.active)
        running.process.send_signal(signal.SIGTERM)
        await until(leaving)
        await asyncio.sleep(0.6)
        assert running.process.returncode is None
        running.server.engine.hang.set()
        for status, got in await asyncio.gather(*asking):
            assert status == 200
            assert got.endswith(b"data: [DONE]\n\n")
    assert await running.code() == 0
