"""The servers of ``stitch profile``: the one that is measured, over HTTP, and a fresh one beside it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..replica import sse
from ..traffic import Json, ServerError
from ..urls import is_http
from .common import UsageError, say

ANSWER_SECONDS = 600.0
CONNECT_SECONDS = 10.0
START_SECONDS = 1800.0
AGAIN = (409, 429, 503)

REFERENCES = {
    "embedded": "{python} -m stitch_embedded --model {model} --port {port}",
    "sglang": "{python} -m sglang.launch_server --model-path {model} --host 127.0.0.1 --port {port}",
}
"""Commands by name; what else they need comes from the server's own settings or ``--reference-arg``."""

SGLANG_SETTINGS = (
    "device", "attention_backend", "dtype", "quantization", "kv_cache_dtype", "tp_size", "context_length",
    "mem_fraction_static", "max_total_tokens", "chunked_prefill_size", "page_size", "random_seed",
)  # fmt: skip
"""SGLang's settings on which the numbers, or whether it fits, depend: the fresh server gets the same."""


class HttpServer:
    """A ``traffic.Server`` at a URL. ``headers`` go with every request."""

    def __init__(self, session: Any, url: str) -> None:
        self._session, self.url = session, url.rstrip("/")

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, url: str, headers: Mapping[str, str] | None = None) -> AsyncIterator[HttpServer]:
        import aiohttp

        if not is_http(url):
            raise UsageError(f"{url} is not a URL such as http://127.0.0.1:30100")
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS, sock_connect=CONNECT_SECONDS)
        # Servers close connections that were idle for 5 s; a request that takes one up just then is lost.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(
            timeout=timeout, headers=dict(headers or {}), connector=connector
        ) as session:
            yield cls(session, url)

    async def generate(self, body: Json) -> Json:
        status, answer = await self.ask("POST", "/generate", body)
        if status != 200 or not isinstance(answer, dict):
            raise ServerError(f"/generate: {status} {_short(answer)}", status in AGAIN)
        return answer

    async def stream(self, body: Json) -> AsyncIterator[Json]:
        import aiohttp

        try:
            async with self._session.post(f"{self.url}/generate", json=body) as response:
                if response.status != 200:
                    text = await response.text()
                    raise ServerError(
                        f"/generate: {response.status} {_short(text)}", response.status in AGAIN
                    )
                splitter, data = sse.Splitter(), ""
                async for part in response.content.iter_any():
                    for event in splitter.feed(part):
                        data = sse.data_of(event) or data
                        if data != "[DONE]":
                            yield _event(data)
                if data != "[DONE]":
                    raise ServerError("a stream was cut")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerError(f"/generate: {error!r}") from error

    async def ask(self, method: str, path: str, body: Json | None = None) -> tuple[int, Any]:
        import aiohttp

        try:
            async with self._session.request(method, self.url + path, json=body) as response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerError(f"{self.url}{path}: {error or type(error).__name__}") from error
        try:
            return response.status, json.loads(raw)
        except ValueError:
            return response.status, raw.decode("utf-8", "replace")


class Started:
    """A server in a process of its own, on a free port. ``stop`` ends it and all that it started."""

    def __init__(
        self, command: Sequence[str], port: int, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.url, self._log = f"http://127.0.0.1:{port}", log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=environment,
            )

    async def until_healthy(self, server: HttpServer, path: str = "/health") -> None:
        """Until ``path`` answers 200. Raises UsageError if the server ends, or is not there in time."""
        async with _deadline(START_SECONDS, f"the server was not there in time; see {self._log}"):
            while True:
                if self._process.poll() is not None:
                    raise UsageError(f"the server ended with {self._process.returncode}: {self.tail()}")
                with contextlib.suppress(ServerError):
                    if (await server.ask("GET", path))[0] == 200:
                        return
                await asyncio.sleep(0.2)

    def tail(self) -> str:
        return " / ".join(self._log.read_text(errors="replace").splitlines()[-5:])

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
                break
        with contextlib.suppress(ProcessLookupError):  # those that outlive their parent
            os.killpg(self._process.pid, signal.SIGKILL)


@contextlib.asynccontextmanager
async def fresh_server(
    template: str, extra: Sequence[str], model: Path, work: Path
) -> AsyncIterator[HttpServer]:
    """A server that boots from ``model``. Raises UsageError."""
    port = free_port()
    places = {"python": sys.executable, "model": str(model), "port": str(port)}
    try:
        command = [part.format(**places) for part in shlex.split(template)] + list(extra)
    except (KeyError, IndexError, ValueError) as error:
        raise UsageError(
            f"--start-reference {template}: only {{model}} and {{port}} are filled in ({error})"
        ) from None
    say(f"starting a fresh server: {shlex.join(command)}")
    try:
        # One that followed the store too would not be fresh for long.
        own = {name: value for name, value in os.environ.items() if not name.startswith("STITCH_")}
        started = Started(command, port, work / "reference.log", own)
    except OSError as error:
        raise UsageError(f"--start-reference: {command[0]} cannot be run: {error.strerror}") from None
    try:
        async with HttpServer.opened(started.url) as server:
            await started.until_healthy(server)
            yield server
    finally:
        await asyncio.to_thread(started.stop)


async def reference_command(server: HttpServer, name: str | None) -> tuple[str, list[str]]:
    """The command of ``--start-reference``, and settings taken over from ``server``. Raises UsageError."""
    _, info = await server.ask("GET", "/server_info")
    info = info if isinstance(info, dict) else {}
    if name is None:
        name = (
            "embedded"
            if info.get("engine") == "stitch-embedded"
            else "sglang"
            if "attention_backend" in info
            else ""
        )
        if not name:
            raise UsageError(
                f"{server.url} says no engine that this command can start: give --reference URL, "
                "--start-reference COMMAND, or --no-reference"
            )
    if name == "embedded":
        options = {"--max-len": info.get("max_len"), "--prefill-rows": info.get("prefill_rows")}
    elif name == "sglang":
        options = {f"--{key.replace('_', '-')}": info.get(key) for key in SGLANG_SETTINGS}
    else:
        return name, []
    flags = [part for key, value in options.items() if value is not None for part in (key, str(value))]
    return REFERENCES[name], flags


@contextlib.asynccontextmanager
async def _deadline(seconds: float, message: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise UsageError(message) from None


def _event(data: str) -> Json:
    try:
        value = json.loads(data)
        if isinstance(value, dict) and "completion_tokens" in value["meta_info"]:
            return value
    except (ValueError, KeyError, TypeError):
        pass
    raise ServerError(f"a stream's event is not one of /generate: {data[:200]}")


def _short(answer: Any) -> str:
    return (answer if isinstance(answer, str) else json.dumps(answer))[:300]


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
