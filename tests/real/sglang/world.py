"""A run in a store, its publisher, and one SGLang replica that follows it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stitch_core.policy_publisher import PolicyPublisher

from .checkpoints import Weights, random_weights, to_publish, write
from .server import SGLangServer

RUN = "r"
ARRIVES = 60.0


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
        self, arguments: Sequence[str] = ("--disable-overlap-schedule",), **settings: str
    ) -> SGLangServer:
        """A replica that follows the run; ``settings`` are STITCH_* variables in lower case."""
        given = {
            "store": self.url, "run": RUN, "host_dir": str(self.host), "id": "replica", "poll": "0.2",
            "pin_drain": "30", "drain": "30", **settings,
        }  # fmt: skip
        variables = {f"STITCH_{name.upper()}": value for name, value in given.items()}
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

    async def serves(self, number: int) -> dict[str, Any]:
        """Wait until the replica serves ``number`` or later; its status."""
        return await self.status_until(lambda status: (status["applied"] or 0) >= number)

    async def status_until(self, condition: Any, seconds: float = ARRIVES) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while True:
            status: dict[str, Any] = (await self.server.call("GET", "/ready"))[1]
            if condition(status):
                return status
            assert time.monotonic() < deadline, f"{status}\n{self.server.tail()}"
            await asyncio.sleep(0.1)

    def close(self) -> None:
        self.server.stop()
        self.publisher.close()
