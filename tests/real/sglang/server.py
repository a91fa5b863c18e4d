"""One real SGLang server on a free loopback port, with the plugin found as that of an installed Stitch is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from recipes.local.sglang_server import CPU_ARGUMENTS, environment, free_port

START_SECONDS = 300.0
STOP_SECONDS = 20.0

# Small chunks, so that a prompt takes several steps.
ARGUMENTS = (
    *CPU_ARGUMENTS, "--max-total-tokens", "16384", "--max-running-requests", "32",
    "--chunked-prefill-size", "256", "--served-model-name", "policy",
)  # fmt: skip


class ServerEnded(Exception):
    """The server's process ended; the message has the end of its log."""


class SGLangServer:
    """``settings`` are the STITCH_* variables; ``arguments`` come behind ``ARGUMENTS``."""

    def __init__(
        self, model: Path, scratch: Path, settings: Mapping[str, str], arguments: Sequence[str] = ()
    ) -> None:
        self.port = free_port()
        self.headers: dict[str, str] = {}
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = scratch / f"sglang-{self.port}.log"
        command = [
            sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--model-path", str(model),
            "--port", str(self.port), *ARGUMENTS, *arguments,
        ]  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment(scratch, settings), stdout=log, stderr=log, start_new_session=True
            )

    async def until_ready(self, path: str = "/ready", status: int = 200) -> SGLangServer:
        """Wait until ``path`` answers ``status``. Raises ServerEnded, TimeoutError."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerEnded(f"status {self.process.returncode}\n{self.tail()}")
            try:
                if (await self.call("GET", path, timeout=5))[0] == status:
                    return self
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(0.2)
        raise TimeoutError(f"no {status} from {path} in {START_SECONDS:g} s\n{self.tail()}")

    async def call(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any, Any]:
        """Status, JSON (or text), headers."""
        timeout = aiohttp.ClientTimeout(options.pop("timeout", 600))
        headers = {**self.headers, **options.pop("headers", {})}
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(method, self.url + path, json=body, headers=headers, **options) as response,
        ):
            is_json = response.content_type == "application/json"
            return response.status, await (response.json() if is_json else response.text()), response.headers

    async def generate(self, tokens: list[int], **fields: Any) -> dict[str, Any]:
        """A greedy /generate that must succeed; ``fields`` of the request, ``new`` the number of tokens."""
        sampling = {"temperature": 0, "max_new_tokens": fields.pop("new", 8), "ignore_eos": True}
        body = {"input_ids": tokens, "sampling_params": sampling, **fields}
        status, answer, _ = await self.call("POST", "/generate", body)
        assert status == 200, answer
        result: dict[str, Any] = answer
        return result

    def children(self, words: str) -> list[int]:
        """Process ids of its children whose command line has ``words`` in it."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid and words in (process / "cmdline").read_text():
                    found.append(int(process.name))
        return found

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End it and all that it started."""
        self.process.kill()
        self.process.wait(STOP_SECONDS)
        # The others end with it, the one that removes shared memory last.
        deadline = time.monotonic() + STOP_SECONDS
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self.process.pid, 0)
                time.sleep(0.1)
            os.killpg(self.process.pid, signal.SIGKILL)
