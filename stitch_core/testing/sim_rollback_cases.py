"""Scenarios of trainers that resume at older versions, of rollbacks, and of runs that are released."""

from __future__ import annotations

import asyncio

from ..head import Head, head_key
from ..ports import Unavailable
from ..replica.reconciler import Follow
from ..versions import VersionConstraint
from .process import SimulatedProcess
from .sim_cases import ANY, fleet, head_number, kill_at, quietly, serves, until
from .sim_operator import SimulatedOperator
from .sim_replica import SimulatedReplica
from .sim_trainer import Saved, SimulatedTrainer, publisher_of
from .sim_world import World


def saved_at(world: World, number: int, run: str = "a") -> Saved:
    """The checkpoint that a trainer would have saved with a version."""
    return Saved(
        number, next(m.state for v, m in world.judge.versions.items() if (v.run, v.number) == (run, number))
    )


async def c31r_a_rollback_whose_swap_lands_late(world: World) -> None:
    """Nobody hears of it, the operator dies, and it lands after all: done again, it is one rollback."""
    trainer = SimulatedTrainer(world, "t", "a", versions=5, full_rate=0.0)
    replica = SimulatedReplica(world, "r", Follow("a"))
    operator = SimulatedOperator(world, "o")
    swap, late = type(world.bucket).swap, list[str]()

    def lands_late(key: str, expected: str | None, data: bytes, who: str) -> str:
        claim = Head.decode(data).number == 5
        if key == head_key("a") and who.startswith("o#") and claim == claims and not late:
            late.append(key)
            seconds = world.random.uniform(0, 200)
            world.loop.call_later(
                seconds, lambda: quietly(lambda: swap(world.bucket, key, expected, data, who))
            )
            if world.random.random() < 0.5 and operator.process is not None:
                operator.process.kill()
            raise Unavailable("no answer")
        return swap(world.bucket, key, expected, data, who)

    claims = world.random.random() < 0.5
    async with fleet(world, [trainer], [replica]):
        await serves(world, replica, 5)
        world.bucket.swap = lands_late  # type: ignore[method-assign]
        await operator.roll_back("a", 3)
        await asyncio.sleep(250)
    newest = world.judge.newest("a")
    assert late
    assert newest is not None
    assert newest.state == saved_at(world, 3).state
    assert world.judge.heads["a"].abandoned == ((4, 5),)
    assert newest.number in (6, 7)


async def c33_a_delta_that_fits_several_bases(world: World) -> None:
    """Each base has every tensor that it names, and its index lies: it is applied to the proven one alone.

    The trainer resumes at an older version; one replica has applied what came after it, another joins.
    """
    first = SimulatedTrainer(world, "first", "a", versions=4, full_rate=0.0)
    replica, joiner = (SimulatedReplica(world, name, Follow("a")) for name in ("r", "joiner"))
    await first.supervise()
    async with fleet(world, [], [replica]):
        await serves(world, replica, 4)
        second = SimulatedTrainer(world, "second", "a", versions=6, full_rate=0.0)
        second.saved = saved_at(world, world.random.randint(0, 3))
        base = second.saved
        async with fleet(world, [second], [joiner]):
            await serves(world, replica, 6)
    chain = {version.number: manifest for version, manifest in world.judge.versions.items()}
    assert chain[5].representation.base == base.state
    assert chain[6].representation.base == chain[5].state
    assert [row.number for row in chain[6].history] == [5, 4, 3, 2, 1, 0]
    for one in (replica, joiner):
        response = await one.ask("which", VersionConstraint(exact_version=6), tokens=2)
        assert response is not None
        assert response.status == 200


async def c35_a_supervisor_restarts_the_trainer_after_a_rollback(world: World) -> None:
    """What it saved was given up: refused, however often; from a checkpoint before that it goes on."""
    trainer = SimulatedTrainer(world, "t", "a", versions=12, full_rate=0.0, save_rate=1.0, stubborn=100)
    replica = SimulatedReplica(world, "r", Follow("a"))
    operator = SimulatedOperator(world, "o")
    async with fleet(world, [trainer], [replica]):
        await serves(world, replica, 5)
        at = head_number(world)
        goal = saved_at(world, 2)
        # Kept by the supervisor, whatever the trainer is told.
        stale = saved_at(world, world.random.randint(3, at))
        if world.random.random() < 0.5:
            trainer.saved = stale
            trainer.save_rate = 0.0
        await operator.roll_back("a", 2)
        rolled_back = world.judge.newest("a")
        assert rolled_back is not None
        assert rolled_back.state == goal.state
        await until(world, lambda: bool(trainer.refused), "the supervisor's trainer is refused")
        trainer.save_rate = 1.0
        await serves(world, replica, 12)
    done = operator.rolled_back[0]
    assert all("a rollback to 2 gave up" in str(refused) for refused in trainer.refused)
    after = sorted(m.number for m in world.judge.versions.values() if m.number > done.manifest.number)
    first = next(m for m in world.judge.versions.values() if m.number == after[0])
    assert first.representation.base == goal.state, "it goes on from the rollback, not from what was given up"


async def r01_replicas_that_applied_what_was_given_up(world: World) -> None:
    """Replicas at the head, on the way to it, and new ones all come to the older weights, newly numbered."""
    trainer = SimulatedTrainer(world, "t", "a", versions=8, full_rate=world.random.choice((0.0, 0.3)))
    replicas = [SimulatedReplica(world, f"r{i}", Follow("a")) for i in range(3)]
    operator = SimulatedOperator(world, "o")
    async with fleet(world, [trainer], replicas[:2]):
        await serves(world, replicas[0], 3)
        replicas[1].process.stall(world.random.uniform(0, 100))
        to = world.random.randint(0, 2)
        await operator.roll_back("a", to, with_boot=True)
        assert not operator.refused
        newest = world.judge.newest("a")
        assert newest is not None
        assert newest.state == saved_at(world, to).state
        async with fleet(world, [], replicas[2:]):
            for replica in replicas:
                await serves(world, replica, newest.number)
                response = await replica.ask("which", ANY, tokens=2)
                assert response is not None
                assert response.body["true_states"] == [newest.state] * 2
    assert trainer.fenced is not None


async def r02_an_operator_that_dies_while_it_rolls_back(world: World) -> None:
    """At any write of it; done again the rollback is what it would have been."""
    trainer = SimulatedTrainer(world, "t", "a", versions=4, full_rate=0.0)
    replica = SimulatedReplica(world, "r", Follow("a"))
    operator = SimulatedOperator(world, "o")
    await trainer.supervise()
    left = [world.random.randint(1, 7)]

    def observe(key: str, old: bytes | None, new: bytes | None, who: str) -> None:
        left[0] -= who.startswith("o#")
        if left[0] == 0 and operator.process is not None:
            operator.process.kill()

    world.bucket.observers.append(observe)
    async with fleet(world, [], [replica]):
        await operator.roll_back("a", 1, with_boot=world.random.random() < 0.5)
        newest = world.judge.newest("a")
        assert newest is not None
        await serves(world, replica, newest.number)
    assert newest.state == saved_at(world, 1).state
    assert world.judge.heads["a"].abandoned == ((2, 4),)


async def r03_a_run_is_released(world: World) -> None:
    """Its trainer, in the middle of whatever it does, publishes nothing more; the next one claims as ever."""
    trainer = SimulatedTrainer(world, "t", "a", versions=9)
    replica = SimulatedReplica(world, "r", Follow("a"))
    async with fleet(world, [trainer], [replica]):
        await serves(world, replica, 2)
        await asyncio.sleep(world.random.uniform(0, 20))
        process = SimulatedProcess(world.loop, "operator")
        publisher = publisher_of(world, process, world.machine("operator"), "a")
        fenced, newest = await process.spawn(publisher.release())
        await until(world, trainer.done.is_set, "the trainer is fenced")
        assert head_number(world) == newest.number == fenced.number
        assert trainer.fenced is not None
        other = SimulatedTrainer(world, "other", "a", versions=9)
        async with fleet(world, [other], []):
            await serves(world, replica, 9)


async def r04_a_trainer_resumes_at_what_it_saved(world: World) -> None:
    """Killed at some write, at any interval of saving: numbers go up, replicas that were ahead come along."""
    trainer = SimulatedTrainer(world, "t", "a", versions=9, save_rate=0.4, full_rate=0.1)
    replicas = [SimulatedReplica(world, f"r{i}", Follow("a")) for i in range(2)]
    number = world.random.randint(3, 7)
    killed = kill_at(world, trainer, f"runs/a/e0001/weight_v{number:06d}/")
    async with fleet(world, [trainer], replicas):
        await killed.wait()
        saved = trainer.saved
        for replica in replicas:
            await serves(world, replica, 9)
    chain = [m for m in world.judge.versions.values() if m.epoch > 1]
    resumed = min(chain, key=lambda manifest: manifest.number)
    if saved is not None and resumed.representation.kind == "delta":
        assert resumed.representation.base == saved.state


async def r05_a_trainer_resumes_below_the_floor(world: World) -> None:
    """What it would build on may be collected any time: its first version is a full."""
    trainer = SimulatedTrainer(world, "t", "a", versions=4, full_rate=0.0)
    full = SimulatedTrainer(world, "full", "a", versions=5, full_rate=1.0)
    replica = SimulatedReplica(world, "r", Follow("a"))
    await trainer.supervise()
    await full.supervise()
    again = SimulatedTrainer(world, "again", "a", versions=8, full_rate=0.0)
    again.saved = saved_at(world, world.random.randint(0, 4))
    async with fleet(world, [again], [replica]):
        await serves(world, replica, 8)
    chain = {version.number: manifest for version, manifest in world.judge.versions.items()}
    assert [chain[number].representation.kind for number in (5, 6, 7)] == ["full", "full", "delta"]


ROLLBACK_CASES = [
    c31r_a_rollback_whose_swap_lands_late,
    c33_a_delta_that_fits_several_bases,
    c35_a_supervisor_restarts_the_trainer_after_a_rollback,
    r01_replicas_that_applied_what_was_given_up,
    r02_an_operator_that_dies_while_it_rolls_back,
    r03_a_run_is_released,
    r04_a_trainer_resumes_at_what_it_saved,
    r05_a_trainer_resumes_below_the_floor,
]
