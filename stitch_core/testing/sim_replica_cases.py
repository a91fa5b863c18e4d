"""Scenarios of one fault each for replicas: convergence, drains, restarts. See ``sim_cases``."""

from __future__ import annotations

import asyncio

from ..ports import EngineRefused
from ..replica.reconciler import Follow
from ..versions import VersionConstraint
from .faults import Outage
from .sim_cases import ANY, error_of, fleet, head_number, serves, until
from .sim_operator import SimulatedOperator
from .sim_replica import SimulatedReplica
from .sim_trainer import SimulatedTrainer
from .sim_world import Timing, World


async def c17_wakes_are_lost_or_come_at_any_moment(world: World) -> None:
    """Without a wake the timer is enough; a wake in the middle of a pass is not dropped."""
    world.timing = Timing(poll=3600.0, train=1.0)
    trainer, replica = (
        SimulatedTrainer(world, "t", "a", versions=1),
        SimulatedReplica(world, "r", Follow("a")),
    )
    async with fleet(world, [], [replica]):
        for number in range(1, 6):
            trainer.versions = number
            trainer.done.clear()
            retrained = asyncio.ensure_future(trainer.supervise())
            await until(world, lambda number=number: head_number(world) >= number, "a version")  # type: ignore[misc]
            # A wake before the last pass is over may have seen the old head; this one may not.
            assert replica.reconciler is not None
            replica.reconciler.wake()
            await asyncio.sleep(world.random.uniform(0, 3))
            replica.reconciler.wake()
            await serves(world, replica, number, 120.0)
            await retrained
        trainer.versions = 6
        trainer.done.clear()
        await trainer.supervise()
        began = world.loop.time()
        await serves(world, replica, 6, 2 * 3600.0)
        assert world.loop.time() - began > 60


async def c18_the_store_is_unreadable_for_an_hour(world: World) -> None:
    """Serving goes on, and status says since when."""
    trainer, replica = (
        SimulatedTrainer(world, "t", "a", versions=2),
        SimulatedReplica(world, "r", Follow("a")),
    )
    async with fleet(world, [trainer], [replica]):
        await serves(world, replica, 2)
        plan, now = world.faults.plan, world.loop.time()
        world.faults.plan = type(plan)(**{**vars(plan), "outages": (Outage(now, now + 3600.0),)})
        await asyncio.sleep(3500.0)
        assert replica.reconciler is not None
        status = replica.reconciler.status()
        assert status["ready"]
        assert status["last_success_age"] > 3400
        assert status["problem"]["age"] > 3400
        response = await replica.ask("q", VersionConstraint(min_version=2), tokens=5)
        assert response is not None
        assert response.status == 200
        await asyncio.sleep(200.0)
        assert replica.reconciler.status()["problem"] is None


async def c19_a_joiner_gets_no_traffic_before_it_has_caught_up(world: World) -> None:
    """It refuses so that others are asked, is not replaced for being slow, and serves the head at once."""
    trainer = SimulatedTrainer(world, "t", "a", versions=8)
    await trainer.supervise()
    plan = world.faults.plan
    world.faults.plan = type(plan)(**{**vars(plan), "latency": 8.0})
    joiner = SimulatedReplica(world, "joiner", Follow("a"))
    async with fleet(world, [], [joiner]):
        await asyncio.sleep(1.0)
        while joiner.applied is None:
            response = await joiner.ask("q", ANY, tokens=1)
            assert joiner.applied is not None or error_of(response)[2] == "elsewhere"
            await asyncio.sleep(1.0)
            assert world.loop.time() < 3600
        assert joiner.applied == 8
    assert joiner.failures == []


async def c21_one_pinned_request_runs_for_an_hour(world: World) -> None:
    """It is ended at the drain deadline, with an error that says try elsewhere; nobody waits behind it."""
    trainer = SimulatedTrainer(world, "t", "a", versions=1)
    replica = SimulatedReplica(world, "r", Follow("a"))
    await trainer.supervise()
    async with fleet(world, [], [replica]):
        await serves(world, replica, 1)
        pinned = asyncio.ensure_future(replica.ask("pin", VersionConstraint(exact_version=1), tokens=7200))
        await asyncio.sleep(5)
        trainer.versions = 4
        trainer.done.clear()
        publishing = asyncio.ensure_future(trainer.supervise())
        await until(world, lambda: head_number(world) >= 2, "version 2")
        began = world.loop.time()
        while not pinned.done():
            asked = world.loop.time()
            response = await replica.ask("other", ANY, tokens=1)
            assert response is not None
            assert response.status == 200
            assert world.loop.time() - asked < 20
            await asyncio.sleep(2)
        # The deadline belongs to the version that is left: newer targets do not put it off.
        assert world.loop.time() - began < world.timing.pin_drain + 30
        assert error_of(await pinned) == (409, "WeightVersionElsewhere", "elsewhere")
        await publishing


async def c22_a_restarted_replica_never_passes_boot_weights_off(world: World) -> None:
    """Requests go on while engines and replicas restart at version 5."""
    trainer = SimulatedTrainer(world, "t", "a", versions=5)
    await trainer.supervise()
    replicas = [SimulatedReplica(world, f"r{i}", Follow("a"), together=i == 1) for i in range(2)]
    async with fleet(world, [], replicas):
        for replica in replicas:
            await serves(world, replica, 5)
        asked = []
        for i in range(60):
            replica = replicas[i % 2]
            asked.append(asyncio.ensure_future(replica.ask(f"q{i}", ANY, tokens=4)))
            if i % 20 == 10:
                replica.engine.process.kill()
            if i % 20 == 15:
                replica.process.kill()
            await asyncio.sleep(world.random.expovariate(1.0))
        await asyncio.gather(*asked)
    assert world.judge.answered > 10


async def c24_publishing_is_faster_than_staging(world: World) -> None:
    """Replicas still activate, and skip versions."""
    world.timing = Timing(train=0.2)
    plan = world.faults.plan
    trainer, replica = (
        SimulatedTrainer(world, "t", "a", versions=40),
        SimulatedReplica(world, "r", Follow("a")),
    )
    world.faults.plan = type(plan)(**{**vars(plan), "latency": 0.3})
    async with fleet(world, [trainer], [replica]):
        await serves(world, replica, 1, 120.0)
        seen = set()
        while head_number(world) < 40:
            seen.add(replica.applied)
            await asyncio.sleep(0.2)
        assert len(seen - {None}) >= 4
        assert len(seen) < 40


async def c32_what_was_staged_before_is_not_forgotten(world: World) -> None:
    """v1 changes one tensor and cannot be activated; v2 changes another and can: the engine has both."""
    trainer = SimulatedTrainer(world, "t", "a", versions=0, full_rate=0.0)
    replica = SimulatedReplica(world, "r", Follow("a"))
    refuse, activate = [False], replica.engine.activate

    async def refusing(label: str) -> None:
        if refuse[0]:
            raise EngineRefused("not now")
        await activate(label)

    replica.engine.activate = refusing  # type: ignore[method-assign]
    async with fleet(world, [trainer], [replica]):
        await serves(world, replica, 0)
        refuse[0] = True
        for number, tensor in enumerate(("embed", "layer.1", "layer.0"), 1):
            trainer.versions, trainer.changes = number, [tensor]
            trainer.done.clear()
            await trainer.supervise()
            await asyncio.sleep(world.random.uniform(0, 60))
        assert replica.applied == 0
        refuse[0] = False


async def restarts(world: World, replica: SimulatedReplica, times: int) -> None:
    """Kill the engine at any await, and ask; it is back at once, so that calls may not notice."""
    replica.engine.boot_seconds = 0.01
    asked = []
    for i in range(times):
        await asyncio.sleep(world.random.expovariate(1.0))
        replica.engine.process.kill()
        await asyncio.sleep(0.02 + world.random.expovariate(1.0))
        asked.append(asyncio.ensure_future(replica.ask(f"again{i}", ANY, tokens=3)))
    await asyncio.gather(*asked)


async def c76_the_engine_comes_back_with_other_weights(world: World) -> None:
    """Behind a sidecar, at version 0 and after a rollback to its state: a new label alone is never enough."""
    trainer = SimulatedTrainer(world, "t", "a", versions=0)
    replica, operator = SimulatedReplica(world, "r", Follow("a")), SimulatedOperator(world, "o")
    plan = world.faults.plan
    other = type(plan)(**{**vars(plan), "engine_other_weights": 0.7})
    async with fleet(world, [trainer], [replica]):
        await serves(world, replica, 0)
        world.faults.plan = other
        await restarts(world, replica, 10)
        world.faults.plan = plan
        trainer.versions = 2
        trainer.done.clear()
        await trainer.supervise()
        await operator.roll_back("a", 0, with_boot=True)
        await serves(world, replica, 3)
        world.faults.plan = other
        await restarts(world, replica, 10)
        world.faults.plan = plan
    assert world.judge.answered > 0


async def c77_the_boot_checkpoint_changes_while_the_replica_starts(world: World) -> None:
    """Between the engine's load and the first hash it is another one: the engine is not version 0's."""
    trainer = SimulatedTrainer(world, "t", "a", versions=0)
    await trainer.supervise()
    plan = world.faults.plan
    world.faults.plan = type(plan)(**{**vars(plan), "engine_other_weights": 1.0})
    replicas = [SimulatedReplica(world, f"r{i}", Follow("a"), together=True) for i in range(2)]
    world.faults.plan = plan
    assert all(replica.boot.exchanges for replica in replicas)
    await asyncio.sleep(world.random.choice((0.0, 10.0)))
    async with fleet(world, [], replicas):
        for replica in replicas:
            await serves(world, replica, 0)
            response = await replica.ask("q", VersionConstraint(exact_version=0), tokens=3)
            assert response is not None
            assert response.status == 200


REPLICA_CASES = [
    c17_wakes_are_lost_or_come_at_any_moment,
    c18_the_store_is_unreadable_for_an_hour,
    c19_a_joiner_gets_no_traffic_before_it_has_caught_up,
    c21_one_pinned_request_runs_for_an_hour,
    c22_a_restarted_replica_never_passes_boot_weights_off,
    c24_publishing_is_faster_than_staging,
    c32_what_was_staged_before_is_not_forgotten,
    c76_the_engine_comes_back_with_other_weights,
    c77_the_boot_checkpoint_changes_while_the_replica_starts,
]
