"""One real SGLang server on a free loopback port, with the plugin found as that of an installed Stitch is."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[3]
START_SECONDS = 300.0
STOP_SECONDS = 60.0

# A scheduler that says nothing about GPUs, with small chunks, so that a prompt takes several steps.
ARGUMENTS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule",
    "--mem-fraction-static", "0.3", "--max-total-tokens", "16384", "--random-seed", "1",
    "--max-running-requests", "32", "--chunked-prefill-size", "256", "--host", "127.0.0.1",
    "--served-model-name", "policy",
)  # fmt: skip


class ServerEnded(Exception):
    """The server's process ended; the message has the end of its log."""


def distribution(directory: Path) -> Path:
    """The metadata that an installed Stitch has, so that SGLang finds the plugin as it is declared."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = directory / f"stitch_rl-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: stitch-rl\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in groups
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return directory


def environment(scratch: Path, settings: Mapping[str, str]) -> dict[str, str]:
    """Of a server's process: this clone's code, the CPU stand-ins, no network, and ``settings``."""
    paths = (
        ROOT / "tests" / "real" / "sglang_cpu",
        distribution(scratch / "distribution"),
        ROOT,
        ROOT / "plugins" / "sglang",
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("STITCH_", "SGLANG_", "PYTEST_"))}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        **settings,
    }


class SGLangServer:
    """``settings`` are the STITCH_* variables; ``arguments`` come behind ``ARGUMENTS``."""

    def __init__(
        self, model: Path, scratch: Path, settings: Mapping[str, str], arguments: Sequence[str] = ()
    ) -> None:
        self.port = free_port()
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
        timeout = aiohttp.ClientTimeout(options.pop("timeout", 120))
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(method, self.url + path, json=body, **options) as response,
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

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End it and all that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_SECONDS)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
