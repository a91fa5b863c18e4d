"""A run in a store, its publisher, and one SGLang replica that follows it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stitch_core.policy_publisher import PolicyPublisher

from .checkpoints import Weights, random_weights, to_publish, write
from .server import SGLangServer

RUN = "r"
ARRIVES = 60.0
ENDLESS = 3500
"""Tokens that no machine gives before the test is done."""


def faults(scratch: Path) -> dict[str, str]:
    """Faults of ``rank_faults.py`` by files in ``scratch``: for the environment of a server.

    As an installed plugin is, in a directory that the server's processes look into.
    """
    directory = scratch / "distribution"
    info = directory / "faults-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faults\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nfaults = rank_faults:register\n")
    shutil.copy(Path(__file__).with_name("rank_faults.py"), directory)
    return {"FAULTS": str(scratch)}


@contextmanager
def small_disk(path: Path) -> Iterator[None]:
    """A file system with room for nothing at ``path``, for as long as it lasts."""
    path.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", path]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("platform: no file system can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


class World:
    """Versions by number are known by the seed of their weights: version 0 has seed 0."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.store = scratch / "store"
        self.url = f"file:{self.store}"
        self.boot = write(scratch / "boot", random_weights(0))
        self.host = scratch / "host"
        self.seeds = [0]
        self.publisher = PolicyPublisher.start(self.url, RUN, self.boot, scratch / "work")
        self.server: SGLangServer

    def start(
        self,
        arguments: Sequence[str] = ("--disable-overlap-schedule",),
        environment: Mapping[str, str] | None = None,
        **settings: str,
    ) -> SGLangServer:
        """A replica that follows the run; ``settings`` are STITCH_* variables in lower case."""
        given = {
            "store": self.url, "run": RUN, "host_dir": str(self.host), "id": "replica", "poll": "0.2",
            "pin_drain": "30", "drain": "30", **settings,
        }  # fmt: skip
        variables = {f"STITCH_{name.upper()}": value for name, value in given.items()} | (environment or {})
        self.server = SGLangServer(self.boot, self.scratch, variables, arguments)
        return self.server

    def publish(self, seed: int) -> int:
        """The weights of ``seed`` as the next version; its number."""
        return self.publish_weights(seed, random_weights(seed))

    def publish_weights(self, seed: int, weights: Weights) -> int:
        number = self.publisher.publish(to_publish(weights)).result().number
        assert number == len(self.seeds)
        self.seeds.append(seed)
        return number

    async def across(self, prompts: Sequence[list[int]], seed: int) -> list[dict[str, Any]]:
        """Generations under way when the weights of ``seed`` are activated, ended soon after by an abort."""
        active = (await self.status_until(lambda _: True))["active_requests"]
        rids = [f"across-{len(self.seeds)}-{i}" for i in range(len(prompts))]
        generations = [
            asyncio.ensure_future(self.server.generate(prompt, new=ENDLESS, rid=rid))
            for prompt, rid in zip(prompts, rids, strict=True)
        ]
        await self.status_until(lambda status: status["active_requests"] >= active + len(prompts))
        await asyncio.sleep(0.5)
        await self.serves(self.publish(seed))
        await asyncio.sleep(0.5)
        for rid in rids:
            assert (await self.server.call("POST", "/abort_request", {"rid": rid}))[0] == 200
        return [await generation for generation in generations]

    async def serves(self, number: int) -> dict[str, Any]:
        """Wait until the replica serves ``number`` or later; its status."""
        return await self.status_until(lambda status: (status["applied"] or 0) >= number)

    async def status_until(
        self, condition: Any, seconds: float = ARRIVES, server: SGLangServer | None = None
    ) -> dict[str, Any]:
        server, deadline = server or self.server, time.monotonic() + seconds
        while True:
            status: dict[str, Any] = (await server.call("GET", "/ready"))[1]
            if condition(status):
                return status
            assert time.monotonic() < deadline, f"{status}\n{server.tail()}"
            await asyncio.sleep(0.1)

    def close(self) -> None:
        self.server.stop()
        self.publisher.close()
