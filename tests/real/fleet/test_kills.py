"""Killing any one process beside the trainer loses no request without a clear error, and no truth.

Promises 1 and 5. All clients go through the gateway; every answer is recomputed to the bit.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from .processes import Child, Fleet, Trainer, caught_up, get, ready
from .traffic import Traffic, failures, proven

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

RUN = "kills"
LAG = 3


@dataclass
class World:
    """A fleet at work, and two replicas that the next test may do harm to."""

    fleet: Fleet
    trainer: Trainer
    gateway: Child
    replicas: list[Child]
    started: int = 0

    def start_replica(self) -> Child:
        kv_mode = ("in_place", "retract")[self.started % 2]
        self.replicas.append(self.fleet.replica(f"r{self.started}", "--run", RUN, kv_mode=kv_mode))
        self.started += 1
        return self.replicas[-1]

    def demand(self, rng: random.Random) -> dict[str, Any]:
        return {"run": RUN, "min_version": max(0, self.trainer.head - LAG)}

    async def traffic(self, seed: int) -> Traffic:
        return Traffic(await self.gateway.url(), self.demand, seed=seed)

    async def replace(self, victim: Child) -> None:
        """A fresh replica for one that is gone, once it serves."""
        self.replicas.remove(victim)
        await caught_up(await self.start_replica().url(), self.trainer)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Any:
    fleet = Fleet(tmp_path_factory.mktemp("kills"))
    yield fleet
    fleet.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(fleet: Fleet) -> AsyncIterator[World]:
    trainer = fleet.trainer(RUN)
    world = World(fleet, trainer, fleet.gateway(), [])
    for _ in range(2):
        world.start_replica()
    for replica in world.replicas:
        await caught_up(await replica.url(), trainer)
    await ready(await world.gateway.url(), lambda said: said["replicas"] == 2)
    trainer.start()
    yield world
    trainer.stop()


async def test_a_replica_killed(world: World) -> None:
    """Whoever had no byte of a stream yet sees no error; the others see one in their stream."""
    async with await world.traffic(1) as traffic:
        await traffic.more(20)
        victim = world.replicas[0]
        victim.send(signal.SIGKILL)
        await traffic.more(20)
        await world.replace(victim)
        await traffic.more(10)
    for outcome in failures(traffic.outcomes):
        assert outcome.begun, outcome
        assert outcome.error == "event EngineUnavailable", outcome
        assert outcome.detail["retryable"], outcome
    report = await proven(world.fleet, RUN, traffic.outcomes)
    assert min(report.spanning.values()) > 0, report.spanning


async def test_a_replica_terminated(world: World) -> None:
    """SIGTERM loses nothing at all: it leaves rotation, lets requests end, and exits with 0."""
    async with await world.traffic(2) as traffic:
        await traffic.more(10)
        victim = world.replicas[0]
        victim.send(signal.SIGTERM)
        assert await victim.ended() == 0, victim.stderr()
        await traffic.more(20)
        await world.replace(victim)
    assert not failures(traffic.outcomes)
    await proven(world.fleet, RUN, traffic.outcomes)


async def test_a_replica_stopped_for_a_while(world: World) -> None:
    """Requests at a process that stands still end when it goes on; it answers for what it serves then."""
    async with await world.traffic(3) as traffic:
        await traffic.more(10)
        world.replicas[0].send(signal.SIGSTOP)
        await asyncio.sleep(3)
        world.replicas[0].send(signal.SIGCONT)
        await traffic.more(20)
        await caught_up(await world.replicas[0].url(), world.trainer)
    assert not failures(traffic.outcomes)
    await proven(world.fleet, RUN, traffic.outcomes)


async def test_the_gateway_killed(world: World) -> None:
    """Its clients lose their connection; it comes back without a memory and serves at once."""
    url = await world.gateway.url()
    async with await world.traffic(4) as traffic:
        await traffic.more(10)
        world.gateway.send(signal.SIGKILL)
        await world.gateway.ended()
        world.gateway = world.fleet.gateway(int(url.rpartition(":")[2]))
        await world.gateway.announced()
        restarted = asyncio.get_running_loop().time()
        await traffic.more(20)
    for outcome in failures(traffic.outcomes):
        assert str(outcome.error).startswith("connection "), outcome
        assert outcome.sent < restarted, outcome
    # What the lost clients had asked for runs on for nobody: the replicas have ended it.
    for replica in world.replicas:
        await ready(await replica.url(), lambda said: said["active_requests"] == 0)
        _, loads = await get(await replica.url(), "/v1/loads")
        assert loads["loads"][0]["num_total_reqs"] == 0
    await proven(world.fleet, RUN, traffic.outcomes)
