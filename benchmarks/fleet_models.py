"""What benchmarks/fleet.py models: latency and bandwidth of the store, network, engines, bytes of weights."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stitch_core.chain import ChainReader
from stitch_core.manifest import Manifest
from stitch_core.planner import Planner
from stitch_core.ports import EngineIdentity
from stitch_core.replica.boot import BootCheckpoint
from stitch_core.replica.staging import Announce, Staged
from stitch_core.state import TensorInfo, state_digest
from stitch_core.stores.memory import MemoryStore

DELTA_BYTES = 1_600_000_000  # 1 % of 80 billion parameters, sparse
HOST_RATE, STORE_RATE = 2.5e9, 100e9  # bytes per second of one host, and of the store to all


class Clock:
    """The loop's virtual time, for both of the clock's faces."""

    def time(self) -> float:
        return 1.8e9 + self.monotonic()

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()


async def at_once(function: Any, *arguments: Any) -> Any:
    """Blocking work that takes no time."""
    return function(*arguments)


class SlowStore:
    """``store`` behind a network: 10 to 40 ms a call. Counts calls by who, what and second."""

    capabilities = MemoryStore().capabilities

    def __init__(
        self, store: MemoryStore, rng: random.Random, calls: Counter[tuple[str, str, int]], who: str
    ) -> None:
        self._store, self._rng, self._calls, self._who = store, rng, calls, who

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        async def slow(*arguments: Any) -> Any:
            self._calls[self._who, name, int(asyncio.get_running_loop().time())] += 1
            await asyncio.sleep(self._rng.uniform(0.005, 0.02))
            result = await call(*arguments)
            await asyncio.sleep(self._rng.uniform(0.005, 0.02))
            return result

        return slow

    async def close(self) -> None:
        return


class Line:
    """The store's bandwidth, shared by all who fetch."""

    def __init__(self) -> None:
        self.active, self.bytes = 0, 0.0

    async def fetch(self, size: float) -> None:
        self.active += 1
        left = size
        try:
            while left >= 1.0:  # what rounding leaves of a byte would take for ever
                rate = min(HOST_RATE, STORE_RATE / self.active)
                step = min(0.2, left / rate)
                await asyncio.sleep(step)
                left -= rate * step
        finally:
            self.active -= 1
            self.bytes += size


def table(number: int) -> dict[str, TensorInfo]:
    digest = hashlib.sha256(str(number).encode()).hexdigest()[:32]
    return {"w": TensorInfo("BF16", (8,), digest)}


class Stager:
    """Plans as replicas do; fetching and applying is time."""

    fetching: tuple[str, ...] = ()

    def __init__(self, store: Any, line: Line, rng: random.Random) -> None:
        self._planner, self._line, self._rng = Planner(store, ChainReader(store)), line, rng
        self._held = state_digest(table(0))

    async def boot(self) -> BootCheckpoint:
        return BootCheckpoint(table(0), {})

    async def stage(self, target: Manifest, announce: Announce) -> Staged:
        plan = await self._planner.plan(target, {self._held, state_digest(table(0))})
        loop = asyncio.get_running_loop()
        self.fetching = tuple(source.digest() for source in plan.sources)
        await announce()
        began, pieces = loop.time(), len(plan.sources)
        await self._line.fetch(pieces * DELTA_BYTES)
        fetched = loop.time()
        await asyncio.sleep(pieces * self._rng.uniform(1.0, 2.0))
        self._held, self.fetching = target.state, ()
        return Staged(
            pieces * DELTA_BYTES, fetched - began, loop.time() - fetched, Path("/host"), table(target.number)
        )


class Engine:
    """Pauses for half a second to copy."""

    def __init__(self) -> None:
        self.label = "default"

    async def identity(self) -> EngineIdentity:
        return EngineIdentity("one", self.label, boot_marks={})

    async def prepare(self, checkpoint: Path, changed: Collection[str]) -> None:
        await asyncio.sleep(0.1)

    async def pause(self, mode: str) -> None:
        await asyncio.sleep(0.05)

    async def activate(self, label: str) -> None:
        await asyncio.sleep(0.4)
        self.label = label

    async def resume(self) -> None:
        await asyncio.sleep(0.05)

    async def abort(self, request_id: str) -> None:
        return

    async def probe(self) -> None:
        return None


class Network:
    """What a gateway asks of replicas, a millisecond or two away: ``/ready`` and ``/wake``."""

    def __init__(
        self, ready: Callable[[str], dict[str, Any]], wake: Callable[[str], None], rng: random.Random
    ) -> None:
        """``ready``: what the replica at a URL says; ``wake``: wakes it."""
        self._ready, self._wake, self._rng = ready, wake, rng
        self.probes = self.wakes = 0

    @contextlib.asynccontextmanager
    async def get(self, url: str, **_: Any) -> AsyncIterator[Any]:
        self.probes += 1
        await asyncio.sleep(self._rng.uniform(0.001, 0.003))
        address, _, path = url.partition("://")[2].partition("/")
        found = path == "ready"
        body = json.dumps(self._ready(f"http://{address}")).encode() if found else b"{}"

        async def pieces() -> AsyncIterator[bytes]:
            yield body

        yield SimpleNamespace(status=200 if found else 404, content=SimpleNamespace(iter_any=pieces))

    @contextlib.asynccontextmanager
    async def post(self, url: str, **_: Any) -> AsyncIterator[Any]:
        self.wakes += 1
        await asyncio.sleep(self._rng.uniform(0.001, 0.003))
        self._wake(url.removesuffix("/wake"))
        yield SimpleNamespace(status=202)
