"""The fleet of benchmarks/fleet.py: real replicas, gateways and publisher on one virtual clock."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.fleet_models import Clock, Engine, Line, Network, SlowStore, Stager, at_once, table
from stitch_core.manifest import PayloadFile
from stitch_core.publisher import Boot, Payload, Publisher
from stitch_core.replica.activation import ActivationSettings
from stitch_core.replica.admission import Gate, Ticket
from stitch_core.replica.reconciler import Follow, Reconciler
from stitch_core.replica.service import Announcer
from stitch_core.state import state_digest
from stitch_core.stores.memory import MemoryStore
from stitch_core.versions import VersionConstraint
from stitch_gateway.attempt import Again
from stitch_gateway.call import Call
from stitch_gateway.consumers import Scope
from stitch_gateway.dispatch import Dispatcher
from stitch_gateway.fleet import Fleet
from stitch_gateway.pools import StorePool
from stitch_gateway.reach import Reach

RUN = "run"
POLL = 5.0
EVERY = 30.0  # seconds between versions
FOLLOWED = 30.0  # seconds until all replicas follow, and requests come


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
        if (wanted := call.constraint.min_version) in world.published:
            world.served_after.append(asyncio.get_running_loop().time() - world.published[wanted])
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
        self.served_after: list[float] = []  # seconds from a publication until a request for it runs
        self.most_held = 0
        made = [Replica(number, self) for number in range(replicas)]
        self.replicas = {replica.url: replica for replica in made}
        self.network = Network(
            lambda url: self.replicas[url].ready, lambda url: self.replicas[url].reconciler.wake(), self.rng
        )
        self.gateways = [self._gateway() for _ in range(gateways)]
        self.clients = held

    def store(self, who: str) -> Any:
        return SlowStore(self.memory, self.rng, self.calls, who)

    def _gateway(self) -> Dispatcher:
        pool = StorePool(self.store("gateways"), Clock())
        fleet = Fleet(pool, self.network, self.rng)  # type: ignore[arg-type]
        dispatcher = Dispatcher(fleet, Tries(self, fleet), self.rng)  # type: ignore[arg-type]
        dispatcher.on_held = Reach(fleet, self.network, 5.0).wake  # type: ignore[arg-type]
        return dispatcher

    async def live(self, versions: int) -> None:
        publisher = Publisher(
            self.store("trainer"), RUN, files=None, clock=Clock(), rng=self.rng,  # type: ignore[arg-type]
            run_blocking=at_once, nonce=lambda: f"{self.rng.getrandbits(128):032x}",
        )  # fmt: skip
        await publisher.claim(Boot("/boot", state_digest(table(0))))
        tasks = [asyncio.ensure_future(gateway.fleet.run()) for gateway in self.gateways]
        for replica in self.replicas.values():
            tasks += map(asyncio.ensure_future, (replica.reconciler.run(), replica.announcer.run()))
        await asyncio.sleep(FOLLOWED)
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
            wanted = max(wanted, admitted.number) + 1
