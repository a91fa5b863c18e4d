"""Minutes of a fleet whose processes are killed, stopped and started at random, whose store comes and goes.

Every request ends, in a success or in an error that says what happened; every success is proven. A seed names
the order of what is done, not the moment: STITCH_CHAOS_SEEDS="7 8" tries others.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from .processes import Child, Fleet, Trainer, caught_up, get, ready
from .traffic import Outcome, Traffic, failures, proven, stored_away

pytestmark = [pytest.mark.real, pytest.mark.long]

RUN = "chaos"
SECONDS = 100.0
SEEDS = [int(seed) for seed in os.environ.get("STITCH_CHAOS_SEEDS", "0 1 2").split()]
# What a client may be told by a fleet that is being taken apart.
CLEAR = {
    "409 WeightVersionNotReady", "409 WeightVersionElsewhere", "410 WeightVersionGone",
    "503 EngineUnavailable", "event EngineUnavailable", "event WeightVersionElsewhere",
}  # fmt: skip


class Chaos:
    """Two replicas with an engine inside, one with an engine behind it, a gateway; what is done to them."""

    def __init__(self, fleet: Fleet, trainer: Trainer, rng: random.Random) -> None:
        self.fleet, self.trainer, self.rng = fleet, trainer, rng
        self.processes: dict[str, Child] = {}
        self.ports: dict[str, int] = {}
        self.gateway_deaths: list[tuple[float, float]] = []
        self.done: Counter[str] = Counter()

    async def start(self, name: str) -> None:
        """Start what is called so, where it was before. Replicas keep their host directory."""
        if name == "gateway":
            child = self.fleet.gateway(self.ports.get(name, 0), hold=20)
        elif name == "engine":
            child = self.fleet.engine(self.ports.get(name, 0))
        else:
            options = ["--run", RUN, "--pin-drain", "2", "--drain", "20"]
            if name == "sidecar":
                options += ["--engine", f"http://127.0.0.1:{self.ports['engine']}"]
            kv_mode = "retract" if name == "r1" else "in_place"
            child = self.fleet.replica(name, *options, kv_mode=kv_mode)
        self.processes[name] = child
        self.ports[name] = int((await child.url()).rpartition(":")[2])

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def demand(self, rng: random.Random) -> dict[str, Any]:
        kind = rng.random()
        if kind < 0.15:
            return {"run": RUN, "exact_version": self.trainer.head}
        return {"run": RUN, "min_version": max(0, self.trainer.head - 3)} if kind < 0.85 else {}

    async def harm(self) -> None:
        """One thing goes wrong, and is put right as a supervisor does."""
        harms = (self.kill, self.kill, self.terminate, self.stand_still, self.lose_store)
        harm = self.rng.choice(harms)
        self.done[harm.__name__] += 1
        await harm()

    async def kill(self) -> None:
        name = self.rng.choice(list(self.processes))
        began = time.monotonic()
        self.processes[name].kill()
        if name in ("r0", "r1") and self.rng.random() < 0.3:
            shutil.rmtree(self.fleet.root / f"host-{name}", ignore_errors=True)
        await self.start(name)
        if name == "gateway":
            self.gateway_deaths.append((began, time.monotonic()))

    async def terminate(self) -> None:
        name = self.rng.choice(("r0", "r1", "sidecar"))
        self.processes[name].send(signal.SIGTERM)
        # A sidecar may be ending with 1 already, because its engine went in the middle of an activation.
        expected = (0, 1) if name == "sidecar" else (0,)
        assert await self.processes[name].ended() in expected, self.processes[name].stderr()
        await self.start(name)

    async def stand_still(self) -> None:
        child = self.processes[self.rng.choice(list(self.processes))]
        child.send(signal.SIGSTOP)
        await asyncio.sleep(self.rng.uniform(0.2, 4))
        child.send(signal.SIGCONT)

    async def lose_store(self) -> None:
        self.trainer.stop()  # what a trainer does without its store is its own test
        target = self.rng.choice((self.fleet.store, self.fleet.root / "nowhere"))
        async with stored_away(self.fleet, target):
            await asyncio.sleep(self.rng.uniform(0.5, 3))
        self.trainer.start()

    async def mend(self) -> None:
        """Start again who ended by itself: a replica whose engine went in the wrong moment may do that."""
        for name, child in list(self.processes.items()):
            if child.process.poll() is not None:
                assert name == "sidecar", (name, child.stderr())
                self.done["sidecar ended by itself"] += 1
                await self.start(name)

    def judge(self, outcome: Outcome) -> None:
        """An error has to be clear, or that of a connection to a gateway that died."""
        if str(outcome.error).startswith("connection "):
            alive = all(end < outcome.sent or outcome.ended < began for began, end in self.gateway_deaths)
            assert not alive, outcome
        else:
            assert outcome.error in CLEAR, outcome


@pytest.fixture
def fleet(tmp_path: Path) -> Any:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


@pytest.mark.parametrize("seed", SEEDS)
async def test_everything_at_random(fleet: Fleet, seed: int) -> None:
    print(f"chaos seed {seed}")
    trainer = fleet.trainer(RUN)
    chaos = Chaos(fleet, trainer, random.Random(seed))
    for name in ("engine", "gateway", "r0", "r1", "sidecar"):
        await chaos.start(name)
    await ready(chaos.url("gateway"), lambda said: said["replicas"] == 3)
    trainer.start()
    end = time.monotonic() + SECONDS
    async with Traffic(chaos.url("gateway"), chaos.demand, seed=seed) as traffic:
        while time.monotonic() < end:
            await asyncio.sleep(chaos.rng.uniform(0, 3))
            await chaos.mend()
            await chaos.harm()
        await asyncio.sleep(1)
        await chaos.mend()
    async with Traffic(chaos.url("gateway"), lambda _: {"run": RUN}, seed=seed + 1) as calm:
        for name in ("r0", "r1", "sidecar"):
            await caught_up(chaos.url(name), trainer)
        await ready(chaos.url("gateway"), lambda said: said["replicas"] == 3)
        before = len(calm.outcomes)
        await calm.more(30)
        assert not failures(calm.outcomes[before + 8 :])
    trainer.stop()
    for name in ("r0", "r1", "sidecar"):
        await ready(chaos.url(name), lambda said: said["active_requests"] == 0)
        assert (await get(chaos.url(name), "/v1/loads"))[1]["loads"][0]["num_total_reqs"] == 0
    for outcome in failures(traffic.outcomes):
        chaos.judge(outcome)
    report = await proven(fleet, RUN, [*traffic.outcomes, *calm.outcomes])
    errors = Counter(outcome.error for outcome in failures(traffic.outcomes))
    print(f"{report.proven} proven; {dict(chaos.done)}; errors {dict(errors)}")
