"""Scenarios of engines that lie about their weights, and are found out when a state comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..replica.reconciler import Follow
from .sim_cases import ANY, fleet, serves, until
from .sim_operator import SimulatedOperator
from .sim_random import point
from .sim_replica import SimulatedReplica
from .sim_trainer import SimulatedTrainer
from .sim_world import World


def lying(world: World, rate: float) -> None:
    """From now on engines lie so often."""
    plan = world.faults.plan
    world.faults.plan = type(plan)(**{**vars(plan), "engine_lies": rate})


async def learned(world: World, replica: SimulatedReplica, number: int) -> None:
    """Until a version is served, and what its weights answer is kept."""
    await serves(world, replica, number)

    def kept() -> bool:
        assert replica.reconciler is not None
        last = replica.reconciler.status()["probe"]["last"]
        return last is not None and last["outcome"] in ("kept", "same") and replica.applied == number

    await until(world, kept, f"the answer of {number}")


async def found_out(world: World, replica: SimulatedReplica, happens: Callable[[], object]) -> None:
    """Requests come and go all the time, while an engine lies about weights that were here before."""
    failures, asked = len(replica.failures), list[asyncio.Future[object]]()

    async def traffic() -> None:
        while len(replica.failures) == failures:
            asked.append(asyncio.ensure_future(replica.ask(f"q{len(asked)}", ANY, tokens=12)))
            await asyncio.sleep(0.2)

    going = asyncio.ensure_future(traffic())
    await asyncio.sleep(2.0)
    lying(world, 1.0)
    happens()
    await until(world, lambda: len(replica.failures) > failures, "the lie is found")
    lying(world, 0.0)
    await going
    await asyncio.gather(*asked)


async def trained(world: World, trainer: SimulatedTrainer, replica: SimulatedReplica, number: int) -> None:
    """The trainer publishes version ``number``, whose weights no other has, and the replica has served it."""
    trainer.versions, trainer.changes = number, [["embed", "layer.0", "layer.1"][number % 3]]
    trainer.done.clear()
    await trainer.supervise()
    await learned(world, replica, number)


async def p01_a_copy_that_was_none_is_found_when_its_state_comes_back(world: World) -> None:
    """The engine confirms the copy, by its label too; the weights are those of the version before."""
    trainer = SimulatedTrainer(world, "t", "a", versions=3)
    replica = SimulatedReplica(world, "r", Follow(channel="latest"), together=world.random.random() < 0.5)
    point(world, "a")
    async with fleet(world, [], [replica]):
        for number in range(1, 4):
            await trained(world, trainer, replica, number)
        await found_out(world, replica, lambda: point(world, "a", 1))
        point(world, "a")


async def p02_boot_weights_that_are_others_than_last_time(world: World) -> None:
    """An engine restarts from other bytes under its boot label, where all say that it is fresh."""
    trainer = SimulatedTrainer(world, "t", "a", versions=0)
    replica = SimulatedReplica(world, "r", Follow("a"), together=True, in_ram=False)
    await trainer.supervise()
    async with fleet(world, [], [replica]):
        await learned(world, replica, 0)
        await asyncio.sleep(2 * world.timing.poll)  # also in the file
        await found_out(world, replica, lambda: replica.engine.process.kill())


async def after(event: asyncio.Event, operator: SimulatedOperator, number: int) -> None:
    await event.wait()
    await operator.roll_back("a", number)


async def p03_a_rollback_in_the_midst_of_requests(world: World) -> None:
    """Upwards in numbers, so that what runs goes on: none of it may go out before the verdict."""
    trainer = SimulatedTrainer(world, "t", "a", versions=2, full_rate=0.0)
    replica = SimulatedReplica(world, "r", Follow("a"))
    operator = SimulatedOperator(world, "o")
    async with fleet(world, [], [replica]):
        for number in (1, 2):
            await trained(world, trainer, replica, number)
        rolling = asyncio.Event()
        rolled_back = asyncio.ensure_future(after(rolling, operator, 1))
        await found_out(world, replica, rolling.set)
        await rolled_back


PROBE_CASES = [
    p01_a_copy_that_was_none_is_found_when_its_state_comes_back,
    p02_boot_weights_that_are_others_than_last_time,
    p03_a_rollback_in_the_midst_of_requests,
]
