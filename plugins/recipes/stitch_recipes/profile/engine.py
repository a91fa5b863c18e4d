"""The recipe's own engine on this host: its replica command, and what has to change of it without a GPU."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from stitch_core.cli.common import UsageError
from stitch_core.cli.profile_server import HttpServer, Started
from stitch_core.profile_moves import stitch_status

from .. import processes
from ..schema import Recipe
from ..site import Site

PORTABLE = frozenset({
    "disable-shared-experts-fusion", "quantization", "reasoning-parser", "schedule-conservativeness",
    "schedule-policy", "skip-server-warmup", "tool-call-parser", "trust-remote-code",
})  # fmt: skip
"""Flags of recipes that mean the same on a CPU; the others choose GPU kernels, or sizes of GPU memory."""

CPU_FLAGS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--mem-fraction-static", "0.8",
    "--max-total-tokens", "8192", "--max-running-requests", "8", "--chunked-prefill-size", "256",
    "--sleep-on-idle", "--random-seed", "1",
)  # fmt: skip
"""As the tests of stock SGLang on a CPU start it; the pool for KV is small, whatever share it may have."""

DRIVER = Path("/dev/nvidiactl")
_ERROR = re.compile(r"(?:^|\s|\.)([A-Za-z]*(?:Error|Exception|Refused|Ended): .*)$")


class EngineUnavailable(Exception):
    """The engine cannot serve this checkpoint on this host; the message is the engine's own."""


@dataclass(frozen=True)
class Launch:
    """A command and its environment; ``left_out``: flags of the recipe that this host has no use for."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    left_out: tuple[str, ...] = ()


def has_gpu() -> bool:
    """Whether NVIDIA's driver is there."""
    return DRIVER.exists()


def launch(
    recipe: Recipe, site: Site, model: Path, *, program: str, port: int, gpu: bool, host_dir: Path
) -> Launch:
    """The recipe's replica on this host; it follows ``site``'s run. ``program`` is SGLang's command."""
    left_out: tuple[str, ...] = ()
    if not gpu:
        flags = recipe.engine.flags
        left_out = tuple(f"--{name}" for name in flags if name not in PORTABLE)
        kept = {name: value for name, value in flags.items() if name in PORTABLE}
        if recipe.engine.gpus > 1:
            left_out = (f"--tp-size {recipe.engine.gpus}", *left_out)
        engine = recipe.engine.model_copy(update={"flags": kept, "gpus": 1})
        recipe = recipe.model_copy(update={"engine": engine})
    process = processes.replica(recipe, site, str(model))
    argv = (program, *process.argv[1:], *(() if gpu else CPU_FLAGS))
    environment = {**process.environment, "STITCH_HOST_DIR": str(host_dir), "STITCH_POLL": "1"}
    return Launch((*argv, "--host", "127.0.0.1", "--port", str(port)), environment, left_out)


def without_stitch(started: Launch, model: Path, port: int) -> Launch:
    """The same engine, stock: it boots from ``model`` and follows nothing."""
    argv = list(started.argv)
    argv[argv.index("--model-path") + 1] = str(model)
    argv += ["--port", str(port)]
    kept = {name: value for name, value in started.environment.items() if not name.startswith("STITCH_")}
    return Launch(tuple(argv), kept)


@contextlib.asynccontextmanager
async def running(chosen: Launch, port: int, log: Path, ready: str) -> AsyncIterator[HttpServer]:
    """A server that answers ``ready``, ended at the end. Raises EngineUnavailable."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("STITCH_")}
    try:
        started = Started(chosen.argv, port, log, {**own, **chosen.environment})
    except OSError as error:
        raise EngineUnavailable(f"{chosen.argv[0]} cannot be run: {error.strerror}") from None
    try:
        async with HttpServer.opened(started.url) as server:
            try:
                await started.until_healthy(server, ready)
            except UsageError as error:
                raise EngineUnavailable(_reason(log) or str(error)) from None
            yield server
    finally:
        await asyncio.to_thread(started.stop)


async def until_tested(server: HttpServer, patience: float) -> str:
    """The destination that the replica uses, once its self-test has ended. Raises TimeoutError."""
    async with asyncio.timeout(patience):
        while True:
            said = (await stitch_status(server)).get("destination", {})
            if said.get("uses") is not None:
                return str(said["uses"])
            await asyncio.sleep(0.2)


def _reason(log: Path) -> str | None:
    """The first error that the engine's log names: those after it are of processes that lost it."""
    with contextlib.suppress(OSError):
        for line in log.read_text(errors="replace").splitlines():
            found = _ERROR.search(line)
            if found is not None:
                return found[1]
    return None
