"""A large fleet on virtual time: 1,000 replicas follow a run while gateways hold 20,000 requests for it.

Real: publisher, reconciler, planner, gate, announcer, and the gateways' pool, fleet view, dispatcher and
routing. Modelled: the store's latency and bandwidth, the network, engines, the bytes of weights.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import harness
from stitch_core.chain import ChainReader
from stitch_core.manifest import Manifest, PayloadFile
from stitch_core.planner import Planner
from stitch_core.ports import EngineIdentity
from stitch_core.publisher import Boot, Payload, Publisher
from stitch_core.replica.activation import ActivationSettings
from stitch_core.replica.admission import Gate, Ticket
from stitch_core.replica.reconciler import Follow, Reconciler
from stitch_core.replica.service import Announcer
from stitch_core.replica.staging import Staged
from stitch_core.state import TensorInfo, state_digest
from stitch_core.stores.memory import MemoryStore
from stitch_core.testing.loop import simulated_loop
from stitch_core.versions import VersionConstraint
from stitch_gateway.attempt import Again
from stitch_gateway.call import Call
from stitch_gateway.consumers import Scope
from stitch_gateway.dispatch import Dispatcher
from stitch_gateway.fleet import Fleet
from stitch_gateway.pools import StorePool
from stitch_gateway.routing import choose

RUN = "run"
POLL = 5.0
EVERY = 30.0  # seconds between versions
DELTA_BYTES = 1_600_000_000  # 1 % of 80 billion parameters, sparse
HOST_RATE, STORE_RATE = 2.5e9, 100e9  # bytes per second of one host, and of the store to all
# What one prefix of S3 takes, per second (AWS, "Best practices design patterns: optimizing S3 performance").
S3_READS, S3_WRITES = 5500, 3500
# What an engine typically runs at once; what exceeds it waits in its queue.
ENGINE_SEQUENCES = 256
READS = frozenset(("load", "read", "size", "list", "digest"))


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
            while left > 0:
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

    async def boot_table(self) -> dict[str, TensorInfo]:
        return table(0)

    async def stage(self, target: Manifest) -> Staged:
        plan = await self._planner.plan(target, {self._held, state_digest(table(0))})
        loop = asyncio.get_running_loop()
        began, pieces = loop.time(), len(plan.sources)
        await self._line.fetch(pieces * DELTA_BYTES)
        fetched = loop.time()
        await asyncio.sleep(pieces * self._rng.uniform(1.0, 2.0))
        self._held = target.state
        return Staged(
            pieces * DELTA_BYTES, fetched - began, loop.time() - fetched, Path("/host"), table(target.number)
        )


class Engine:
    """Pauses for half a second to copy."""

    def __init__(self) -> None:
        self.label = "default"

    async def identity(self) -> EngineIdentity:
        return EngineIdentity("one", self.label)

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


class Replica:
    """A real reconciler and gate. ``served``: when each version was, and the seconds that staging it took."""

    def __init__(self, number: int, world: World) -> None:
        self.id, self.url = f"replica-{number:04d}", f"http://replica-{number:04d}:30100"
        clock, store = Clock(), world.store("replicas")
        self.gate = Gate(clock)
        stager = Stager(store, world.line, world.rng)
        self.reconciler = Reconciler(
            store, Engine(), self.gate, None, Follow(RUN), Path("/boot"), None, clock, world.rng, at_once,
            ActivationSettings(), poll=POLL, make_stager=lambda activity: stager,
        )  # fmt: skip
        self.gate.on_refused = self.reconciler.wake
        self.announcer = Announcer(store, self.reconciler, self.id, self.url)
        self.served: dict[int, tuple[float, float]] = {}
        self.most = 0
        self.reconciler.on_activated = self._activated

    def _activated(self, update: Any) -> None:
        number = self.gate.serving.number if self.gate.serving else 0
        took = update.fetch + update.stage + update.drain + update.pause
        self.served[number] = (asyncio.get_running_loop().time(), took)

    @property
    def ready(self) -> dict[str, Any]:
        serving = self.gate.serving
        return {
            "ready": self.gate.ready, "run": serving.run if serving else None,
            "weight_version": str(serving.number) if serving else None, "active_requests": self.gate.active,
        }  # fmt: skip


class Network:
    """What a gateway's fleet view asks: ``/ready`` of replicas, a millisecond or two away."""

    def __init__(self, replicas: dict[str, Replica], rng: random.Random) -> None:
        self._replicas, self._rng, self.probes = replicas, rng, 0

    @contextlib.asynccontextmanager
    async def get(self, url: str, headers: Any = None, timeout: Any = None) -> AsyncIterator[Any]:
        self.probes += 1
        await asyncio.sleep(self._rng.uniform(0.001, 0.003))
        address, _, path = url.partition("://")[2].partition("/")
        found = path == "ready"
        body = json.dumps(self._replicas[f"http://{address}"].ready).encode() if found else b"{}"

        async def pieces() -> AsyncIterator[bytes]:
            yield body

        yield SimpleNamespace(status=200 if found else 404, content=SimpleNamespace(iter_any=pieces))


class Tries:
    """In the place of the gateway's ``Attempt``: the replica's real gate, and a generation that is time."""

    log = None

    def __init__(self, world: World, fleet: Fleet) -> None:
        self._world, self._fleet = world, fleet

    async def run(self, request: Any, call: Call, replica: Any) -> Any:
        world, there = self._world, self._world.replicas[replica.url]
        await asyncio.sleep(world.rng.uniform(0.001, 0.003))
        ticket = await there.gate.admit(call.constraint, call.ids[0])
        if not isinstance(ticket, Ticket):
            self._fleet.refused(replica, ticket.details.get("run"), ticket.details.get("applied"))
            return Again(ticket.message, failure=False)
        self._fleet.answered(replica, ticket.admitted)
        there.most = max(there.most, there.gate.active)
        world.staleness.append(world.head - ticket.admitted.number)
        try:
            await asyncio.sleep(world.rng.uniform(5.0, 20.0))
        finally:
            there.gate.release(ticket)
        return ticket.admitted


class World:
    """Everything, on one virtual clock."""

    def __init__(self, replicas: int, held: int, gateways: int, seed: int) -> None:
        self.rng, self.line = random.Random(seed), Line()
        self.memory, self.calls = MemoryStore(), Counter[tuple[str, str, int]]()
        self.head, self.published = 0, dict[int, float]()
        self.staleness: list[int] = []
        self.answered = self.refused = self.most_held = 0
        made = [Replica(number, self) for number in range(replicas)]
        self.replicas = {replica.url: replica for replica in made}
        self.network = Network(self.replicas, self.rng)
        self.gateways = [self._gateway() for _ in range(gateways)]
        self.clients = held

    def store(self, who: str) -> Any:
        return SlowStore(self.memory, self.rng, self.calls, who)

    def _gateway(self) -> Dispatcher:
        pool = StorePool(self.store("gateways"), Clock())
        fleet = Fleet(pool, self.network, self.rng)  # type: ignore[arg-type]
        return Dispatcher(fleet, Tries(self, fleet), self.rng)  # type: ignore[arg-type]

    async def live(self, versions: int) -> None:
        publisher = Publisher(
            self.store("trainer"), RUN, files=None, clock=Clock(), rng=self.rng,  # type: ignore[arg-type]
            run_blocking=at_once, nonce=lambda: f"{self.rng.getrandbits(128):032x}",
        )  # fmt: skip
        await publisher.claim(Boot("/boot", state_digest(table(0))))
        tasks = [asyncio.ensure_future(gateway.fleet.run()) for gateway in self.gateways]
        for replica in self.replicas.values():
            tasks += map(asyncio.ensure_future, (replica.reconciler.run(), replica.announcer.run()))
        await asyncio.sleep(EVERY)
        tasks += [asyncio.ensure_future(self._client(number)) for number in range(self.clients)]
        await asyncio.sleep(5.0)
        for _ in range(versions):
            await self._publish(publisher)
            await asyncio.sleep(EVERY)
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    async def _publish(self, publisher: Publisher) -> None:
        number, old = publisher.reserve(), self.head
        data = f"delta {number}".encode()
        file = PayloadFile("delta.bin", len(data), "sha256:" + hashlib.sha256(data).hexdigest())
        await self.memory.create(publisher.prefix(number) + file.name, data)
        changed = {"w": (table(old)["w"].digest, table(number)["w"].digest)}
        self.most_held = max(self.most_held, sum(len(gateway.held) for gateway in self.gateways))
        await publisher.publish(Payload(
            "delta", state_digest(table(number)), Path("/x"), (), state_digest(table(old)), "xor", changed,
            uploaded=(file,),
        ), number)  # fmt: skip
        self.head, self.published[number] = number, asyncio.get_running_loop().time()

    async def _client(self, number: int) -> None:
        """Always wants the version after the one that it had: most of the time it is held."""
        gateway, wanted = self.gateways[number % len(self.gateways)], 1
        loop = asyncio.get_running_loop()
        while True:
            call = Call(
                "/generate", {}, b"", VersionConstraint(wanted, None, RUN), (f"{number}-{wanted}",),
                Scope(RUN, "rollout"), loop.time() + 120.0,
            )  # fmt: skip
            admitted: Any = await gateway.run(None, call)  # type: ignore[arg-type]
            self.answered += 1
            wanted = max(wanted, admitted.number) + 1


def quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def agreement(world: World, keys: int = 2000) -> float:
    """The share of sessions that all gateways send to the same replica."""
    anything = VersionConstraint(None, None, RUN)
    same = 0
    for number in range(keys):
        key = f"session-{number}".encode()
        found = [choose(g.fleet.replicas, anything, world.rng, key=key) for g in world.gateways]
        same += len({replica.id if replica else None for replica in found}) == 1
    return same / keys


def rates(world: World, who: str | None, reads: bool) -> list[int]:
    """Store calls in each second in which there were any."""
    seconds: Counter[int] = Counter()
    for (by, what, second), count in world.calls.items():
        if who in (None, by) and (what in READS) == reads:
            seconds[second] += count
    return list(seconds.values()) or [0]


def rows(world: World, cpu: float) -> Iterator[harness.Row]:
    waits, late, missing = [], [], 0
    for replica in world.replicas.values():
        for number, at in world.published.items():
            if number not in replica.served:
                missing += 1
                continue
            when, staging = replica.served[number]
            late.append(when - at)
            waits.append((when - at - staging) / POLL)
    count = len(world.replicas)
    yield harness.at_most(
        "G5", f"poll intervals, beside staging, until the last of {count} replicas serves a new version",
        float("inf") if missing else max(waits), 2.0, "HTTP, engines, bytes of weights (modelled)",
    )  # fmt: skip
    row = harness.Row
    for share in (0.5, 0.95, 1.0):
        yield row(f"converged.p{share * 100:g}", "seconds from the head's move until a replica serves it",
                  quantile(late, share))  # fmt: skip
    yield row("held", "requests held at once, by all gateways", world.most_held)
    yield row("answered", "requests answered", world.answered)
    mean = statistics.fmean(world.staleness or [0])
    yield row("staleness.mean", "versions behind the head at admission", mean)
    yield row("staleness.max", "versions behind the head at admission", max(world.staleness, default=0))
    for who in ("replicas", "gateways"):
        for reads in (True, False):
            name = "reads" if reads else "writes"
            yield row(f"store.{who}.{name}", f"{name} per second of the store, the mean and (next) the most",
                      statistics.fmean(rates(world, who, reads)))  # fmt: skip
            yield row(f"store.{who}.{name}.most", "in one second", max(rates(world, who, reads)))
    yield row("bytes", "GB that replicas fetched", world.line.bytes / 1e9)
    yield row("affinity", "share of sessions that all gateways send to the same replica", agreement(world))
    busiest = max(replica.most for replica in world.replicas.values())
    yield row("herd", "most requests at one replica, as a multiple of the mean share of those held",
              busiest / max(1.0, world.most_held / count))  # fmt: skip
    used = {
        f"the store's reads ({S3_READS}/s for one prefix)": max(rates(world, None, True)) / S3_READS,
        f"the store's writes ({S3_WRITES}/s for one prefix)": max(rates(world, None, False)) / S3_WRITES,
        f"requests at the first replica ({ENGINE_SEQUENCES} run at once)": busiest / ENGINE_SEQUENCES,
    }
    first = max(used, key=lambda name: used[name])
    yield row("limit", f"the first limit: {first}; the share of it in the worst second", used[first])
    yield row("cpu", "seconds of CPU that the simulation took", cpu)


def measure(options: argparse.Namespace) -> Iterable[harness.Row]:
    replicas, held, gateways, versions = (100, 2000, 2, 2) if options.quick else (1000, 20000, 4, 3)
    replicas, held = options.replicas or replicas, options.held or held
    began = time.process_time()
    with simulated_loop(random.Random(options.seed), max_steps=200_000_000) as loop:
        world = World(replicas, held, gateways, options.seed)
        loop.run_until_complete(world.live(versions))
        harness.say(f"{loop.steps} callbacks for {loop.time():.0f} s of {replicas} replicas")
        return list(rows(world, time.process_time() - began))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=int, help="how many (1000; quick 100)")
    parser.add_argument("--held", type=int, help="clients that wait for the next version (20000; quick 2000)")
    parser.add_argument("--seed", type=int, default=1)


if __name__ == "__main__":
    harness.run(__doc__ or "", measure, options)
