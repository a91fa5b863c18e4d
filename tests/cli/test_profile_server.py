"""The servers of ``stitch profile``: what the fresh one is started with, starts and streams that fail."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stitch_core.cli.common import UsageError
from stitch_core.cli.profile_server import HttpServer, fresh_server, reference_command
from stitch_core.traffic import ServerError

HEALTHY = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ.get("STITCH_STORE", "none").encode())
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@asynccontextmanager
async def answering(status: int, body: bytes) -> AsyncIterator[HttpServer]:
    """A server that answers everything so."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        await reader.readexactly(int(length[0].split(b":")[1]) if length else 0)
        lines = f"HTTP/1.1 {status} x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(lines.encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        async with HttpServer.opened(f"http://127.0.0.1:{port}") as client:
            yield client
    finally:
        server.close()
        await server.wait_closed()


async def command_of(info: dict[str, Any], name: str | None = None) -> tuple[str, list[str]]:
    async with answering(200, json.dumps(info).encode()) as server:
        return await reference_command(server, name)


async def test_the_fresh_server_is_of_the_same_engine_with_what_its_numbers_depend_on() -> None:
    command, flags = await command_of({"engine": "stitch-embedded", "max_len": 64, "prefill_rows": None})
    assert ("stitch_embedded" in command, flags) == (True, ["--max-len", "64"])
    info = {"attention_backend": "fa3", "tp_size": 4, "quantization": None, "api_key": "secret"}
    command, flags = await command_of(info)
    assert ("sglang.launch_server" in command, flags) == (
        True, ["--attention-backend", "fa3", "--tp-size", "4"],
    )  # fmt: skip
    assert await command_of({}, "serve {model} {port}") == ("serve {model} {port}", [])
    with pytest.raises(UsageError, match="give --reference URL, --start-reference COMMAND, or --no-ref"):
        await command_of({"engine": "another"})


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("/no/such/program {model}", "/no/such/program cannot be run: No such file"),
        (
            f"{sys.executable} -c 'print(\"out of memory\"); raise SystemExit(3)'",
            "ended with 3: out of memory",
        ),
        ("serve {modle}", "only {model} and {port} are filled in"),
        ("serve '{port}", "only {model} and {port} are filled in"),
    ],
)
async def test_a_fresh_server_that_does_not_start(template: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said.replace("{", r"\{")):
        async with fresh_server(template, (), tmp_path, tmp_path):
            pass


async def test_a_fresh_server_is_ended_and_follows_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STITCH_STORE", "file:/somewhere")
    script = tmp_path / "healthy.py"
    script.write_text(HEALTHY)
    async with fresh_server(f"{sys.executable} {script} {{port}}", (), tmp_path, tmp_path) as server:
        assert await server.ask("GET", "/anything") == (200, "none")
    async with HttpServer.opened(server.url) as gone:
        with pytest.raises(ServerError, match=server.url):
            await gone.ask("GET", "/anything")


@pytest.mark.parametrize(
    ("status", "body", "again", "said"),
    [
        (503, b'{"error": {"type": "EngineUnavailable"}}', True, "503 .*EngineUnavailable"),
        (400, b"no", False, "400 no"),
        (200, b'data: {"text": ""}\n\n', False, "a stream's event is not one of /generate"),
        (200, b'data: {"meta_info": {"completion_tokens": 1}}\n\n', False, "a stream was cut"),
        (200, b'data: {"error": {"message": "the engine died"}}\n\n', False, "the engine died"),
    ],
)
async def test_streams_that_go_wrong(status: int, body: bytes, again: bool, said: str) -> None:
    async with answering(status, body) as server:
        with pytest.raises(ServerError, match=said) as raised:
            async for _ in server.stream({}):
                pass
    assert raised.value.again == again


async def test_a_key_goes_with_every_request() -> None:
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 x\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with HttpServer.opened(url, {"Authorization": "Bearer key"}) as client:
        assert await client.ask("GET", "/ready") == (200, {})
    server.close()
    await server.wait_closed()
    assert b"Authorization: Bearer key" in heads[0]
    assert heads[0].startswith(b"GET /ready ")
