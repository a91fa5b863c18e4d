"""A trainer's side: its store, its requests as slime and Miles make them, replicas that really generate."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from stitch_core.files import PosixFiles
from stitch_core.head import Head, head_key
from stitch_core.manifest import manifest_key
from stitch_core.ports import SystemClock
from stitch_core.replica.admission import Gate
from stitch_core.replica.middleware import StitchMiddleware
from stitch_core.replica.server import listen, serve
from stitch_core.stores.memory import MemoryStore
from stitch_core.testing.checkpoints import random_tensors, write_checkpoint
from stitch_core.testing.fake_engine import FakeEngine
from stitch_core.testing.fake_server import FakeServer
from stitch_core.versions import PolicyVersion
from tests.gateway.fleet import Fleet

TRIES = 60


class EngineReplica:
    """A fake engine behind the middleware, on a port of its own; versions differ by label only."""

    def __init__(self, boot: Path, *, step_seconds: float = 0.005) -> None:
        self.gate = Gate(SystemClock(), hold=0.2)
        self.engine = FakeEngine(boot, step_seconds=step_seconds)
        self.wakes = 0
        self.app = StitchMiddleware(
            FakeServer(self.engine), self.gate, status=dict, wake=self._wake, mismatch=self.gate.forget,
            abort=self.engine.abort, grace=0.5,
        )  # fmt: skip
        self.listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self._end = asyncio.Event()
        self._task = asyncio.ensure_future(serve(self.app, self.listener, self._end, grace=1))

    def _wake(self) -> None:
        self.wakes += 1

    def serves(self, number: int, run: str = "r") -> None:
        """Serve this version from now on."""
        self.engine.take({}, str(PolicyVersion(run, number)))
        self.gate.open(PolicyVersion(run, number))

    @property
    def ids(self) -> list[str]:
        """What the engine calls the requests that it runs."""
        return sorted(request.rid for request in self.engine.requests)

    async def close(self) -> None:
        self.engine.abort_prefix("")
        self._end.set()
        await self._task
        await self.engine.close()
        self.listener.close()


def boot_checkpoint(directory: Path) -> Path:
    write_checkpoint(
        directory, PosixFiles(), random_tensors(np.random.default_rng(0), {"w": ("F32", (8,))}), 1
    )
    return directory


class RunStore(MemoryStore):
    """Holds the head of run ``r``, which a test moves."""

    async def publish(self, number: int) -> None:
        head = Head(number, 1, manifest_key(number, 1), "sha256:" + "0" * 64, "writer")
        await self.replace(head_key("r"), head.encode())


class Trainer:
    """Calls as the frameworks do: no header of ours, no time limit, a failure is fatal or repeated."""

    def __init__(self, fleet: Fleet, *, sleep: float = 0.005) -> None:
        """``sleep``: seconds between two tries of a rollout request, 1 in life."""
        self.fleet = fleet
        self.sleep = sleep
        self.tries: list[int] = []
        self.calls: list[tuple[str, str]] = []

    async def get(self, path: str, url: str | None = None) -> Any:
        return await self._fatal("GET", path, None, url)

    async def post(self, path: str, body: dict[str, Any] | None = None, url: str | None = None) -> Any:
        return await self._fatal("POST", path, body or {}, url)

    async def _fatal(self, method: str, path: str, body: Any, url: str | None) -> Any:
        self.calls.append((method, path))
        async with self.fleet.session.request(method, (url or self.fleet.url) + path, json=body) as answer:
            answer.raise_for_status()
            return await answer.json() if answer.content_type == "application/json" else await answer.text()

    async def rollout(self, body: dict[str, Any], path: str = "/generate") -> Any:
        """The loop of stock clients: any failure is tried again, 60 times in all, then the run dies."""
        for tried in range(1, TRIES + 1):
            try:
                async with self.fleet.session.post(self.fleet.url + path, json=body) as answer:
                    answer.raise_for_status()
                    value = await answer.json()
                    self.tries.append(tried)
                    return value
            except aiohttp.ClientError:
                if tried == TRIES:
                    raise
                await asyncio.sleep(self.sleep)
        raise AssertionError

    async def abort_until_idle(self, pause: float = 0.05) -> int:
        """As slime ends a rollout step: abort all at each worker until its load is 0. Returns the rounds."""
        workers = [worker["url"] for worker in (await self.get("/workers"))["workers"]]
        rounds = 0
        for url in workers:
            while True:
                rounds += 1
                await self.post("/abort_request", {"abort_all": True}, url)
                if load_of(await self.get("/v1/loads?include=core", url)) <= 0:
                    break
                await asyncio.sleep(pause)
        return rounds


def load_of(answer: Any) -> int:
    """How slime reads a load."""
    if isinstance(answer, list):
        return sum(load_of(item) for item in answer)
    if "loads" in answer:
        return load_of(answer["loads"])
    for key in ("num_reqs", "num_total_reqs", "total_reqs"):
        if isinstance(answer.get(key), int):
            return int(answer[key])
    return int(answer.get("num_running_reqs", 0)) + int(answer.get("num_waiting_reqs", 0))
