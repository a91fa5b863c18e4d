"""Scenarios that the random one found, each cut down to what breaks the protocol that does not expect it."""

from __future__ import annotations

from pathlib import Path

from ..ports import EngineUncertain
from ..replica.reconciler import Follow
from .process import SimulatedProcess
from .sim_cases import ANY, fleet, point, serves, until
from .sim_replica import SimulatedReplica
from .sim_trainer import SimulatedTrainer
from .sim_world import World


async def s01_the_engine_restarts_between_prepare_and_activate(world: World) -> None:
    """What was prepared is gone with it: to activate must not put the new label on boot weights."""
    trainer, replica = (
        SimulatedTrainer(world, "t", "a", versions=6),
        SimulatedReplica(world, "r", Follow("a")),
    )
    engine = replica.engine
    engine.boot_seconds = 0.05
    kills = [1, 3, 4]

    def prepared(process: SimulatedProcess, what: str, where: str) -> None:
        kills[:] = [left - 1 for left in kills]
        if 0 in kills:
            world.loop.call_later(world.random.uniform(0, 0.3), lambda: engine.process.kill())

    engine.on_call = prepared
    async with fleet(world, [trainer], [replica]):
        await serves(world, replica, 1)
        while replica.applied != 6:
            await replica.ask("q", ANY, tokens=2)


async def s02_an_interrupted_step_and_then_another_way(world: World) -> None:
    """An apply dies half way; the channel has moved, and the next plan starts from the same base."""
    trainers = [SimulatedTrainer(world, f"t{run}", run, versions=3, full_rate=0.0) for run in "ab"]
    replica = SimulatedReplica(world, "r", Follow(channel="latest"))
    for trainer in trainers:
        await trainer.supervise()
    point(world, "a")
    works, left = replica.machine.on_change, [world.random.randint(1, 4)]

    def change(process: SimulatedProcess, what: str, path: Path) -> None:
        works(process, what, path)
        if what == "write_at" and "data-" in str(path) and left[0] > 0:
            left[0] -= 1
            if left[0] == 0:
                point(world, "b")
                process.crash()

    replica.machine.on_change = change
    async with fleet(world, [], [replica], "b"):
        await until(world, lambda: left[0] == 0 or bool(replica.gate and replica.gate.serving), "a step")
        point(world, "b")
        await until(world, lambda: replica.gate is not None and "b/" in str(replica.gate.serving), "run b")


async def s03_a_half_copied_engine_and_nobody_who_knows(world: World) -> None:
    """An activation stops in the middle, and the process that was to hear of it dies: the next must know."""
    trainers = [SimulatedTrainer(world, f"t{run}", run, versions=2, full_rate=0.0) for run in "ab"]
    for trainer, changes in zip(trainers, (["embed", "scale"], ["layer.0"]), strict=True):
        trainer.changes = changes
        await trainer.supervise()
    replica = SimulatedReplica(world, "r", Follow(channel="latest"))
    activate, activations = replica.engine.activate, [0]
    point(world, "a")

    async def half(label: str) -> None:
        activations[0] += 1
        if activations[0] > 1:
            await activate(label)
            return
        replica.engine.weights.copy("embed", replica.engine.prepared["embed"])
        replica.process.kill()
        point(world, "b")
        raise EngineUncertain("stopped in the middle")

    replica.engine.activate = half  # type: ignore[method-assign]
    async with fleet(world, [], [replica], "b"):
        await until(world, lambda: replica.gate is not None and "b/" in str(replica.gate.serving), "run b")


FOUND = [
    s01_the_engine_restarts_between_prepare_and_activate,
    s02_an_interrupted_step_and_then_another_way,
    s03_a_half_copied_engine_and_nobody_who_knows,
]
