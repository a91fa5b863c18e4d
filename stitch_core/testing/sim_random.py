"""The random scenario: trainers, replicas and clients in a world where anything may go wrong, until it calms.

While faults last nothing untrue may be said or done; when they are over everything has to come right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from ..head import Channel, channel_key
from ..replica.reconciler import Follow
from ..versions import VersionConstraint
from .sim_http import Client
from .sim_jobs import SimulatedCompactor
from .sim_operator import SimulatedOperator
from .sim_ranks import SimulatedRanks
from .sim_replica import SimulatedReplica
from .sim_trainer import SimulatedTrainer
from .sim_world import World

Writer = SimulatedTrainer | SimulatedOperator

SETTLE = 1500.0
"""Seconds after the last fault in which everything must have come right."""


async def anything(world: World) -> None:
    """A fleet of random shape under the world's plan of faults."""
    random = world.random
    switch = random.random() < 0.3
    follow = Follow(channel="latest") if switch or random.random() < 0.3 else Follow(run="a")
    versions, hasty = random.randint(3, 9), random.choice((0.0, 0.25))
    encoding = random.choice(("xor", "xor", "sparse", "mixed"))
    saves, stubborn = random.choice((0.0, 0.0, 0.4)), random.choice((0, 0, 3))
    trainers = [
        a_trainer(world, name, versions)
        for name in (["trainer", "rival"] if random.random() < 0.25 else ["trainer"])
    ]
    for trainer in trainers:
        trainer.impatience, trainer.save_rate, trainer.stubborn = hasty, saves, stubborn
    operator = SimulatedOperator(world, "operator")
    if switch:
        trainers.append(SimulatedTrainer(world, "other", "b", versions=random.randint(2, 5)))
    replicas = [
        SimulatedReplica(
            world, f"r{i}", follow, kv_mode=random.choice(("in_place", "retract")),
            together=random.random() < 0.5, in_ram=random.random() < 0.5, drain_all=random.random() < 0.2,
        )
        for i in range(random.randint(1, 3))
    ]  # fmt: skip
    compactors = [
        SimulatedCompactor(world, f"compact{i}", "a", grace=60.0, transcodes=random.random() < 0.5)
        for i in range(random.choice((0, 0, 1, 2)))
    ]
    for trainer in trainers:
        trainer.encoding = encoding
    point(world, "a")
    tasks = [start_later(world, part, 60.0 * (i > 0)) for i, part in enumerate(trainers)]
    tasks += [start_later(world, part, 120.0 * (i > 0)) for i, part in enumerate(replicas)]
    tasks += [start_later(world, part, 60.0) for part in compactors]
    tasks.append(asyncio.ensure_future(chaos(world, [*trainers, operator], replicas)))
    enough = asyncio.Event()
    requests = asyncio.ensure_future(traffic(world, replicas, enough))
    tasks.append(asyncio.ensure_future(operate(world, operator, "b" if switch else "a")))
    await asyncio.sleep(world.faults.plan.quiet_after)
    await all_is_well(world, [*trainers, operator], replicas, [*tasks, requests], "b" if switch else "a")
    enough.set()
    if not (await asyncio.wait([requests], timeout=SETTLE))[0]:
        world.judge.broken("independence: every request ends", world.loop.describe())
    requests.result()
    for task in tasks:
        task.cancel()


def a_trainer(world: World, name: str, versions: int) -> SimulatedTrainer:
    """Of one process, or of several ranks whose base changes on one host now and then."""
    random = world.random
    if random.random() < 0.7:
        return SimulatedTrainer(world, name, "a", versions=versions)
    ranks = SimulatedRanks(world, name, "a", versions=versions, stock=random.random() < 0.5)
    ranks.spoil_rate = random.choice((0.0, 0.5))
    return ranks


async def operate(world: World, operator: SimulatedOperator, last: str) -> None:
    """An operator moves the channel now and then, also down, and rolls back; in the end it names ``last``."""
    random, judge = world.random, world.judge
    for _ in range(random.choice((0, 0, 1, 3))):
        await asyncio.sleep(world.faults.plan.quiet_after / 4 * random.random())
        run = random.choice(list(judge.heads) or ["a"])
        numbers = [version.number for version in judge.versions if version.run == run]
        if len(numbers) > 1 and random.random() < 0.5:
            await operator.roll_back(run, random.choice(numbers[:-1]), with_boot=random.random() < 0.5)
        else:
            await operator.point(run, random.choice([None, *numbers]))
    await asyncio.sleep(max(0.0, world.faults.plan.quiet_after * random.random() - world.loop.time()))
    await operator.point(last)
    operator.done.set()


def point(world: World, run: str, exact: int | None = None) -> None:
    """Somebody moves the channel, at once and whatever it says now."""
    channel = Channel(run, exact, world.nonce())
    world.trace.add(f"channel latest -> {channel}")
    world.bucket.put(channel_key("latest"), channel.encode(), "somebody")


def start_later(
    world: World, part: SimulatedTrainer | SimulatedReplica | SimulatedCompactor, most: float
) -> asyncio.Future[None]:
    """Start a part within ``most`` seconds."""

    async def start() -> None:
        await asyncio.sleep(most * world.random.random())
        await part.supervise()

    return asyncio.ensure_future(start())


async def chaos(world: World, writers: Sequence[Writer], replicas: Sequence[SimulatedReplica]) -> None:
    """Kill, crash, stall and restart by the plan."""
    plan, random = world.faults.plan, world.random

    parts: list[Writer | SimulatedReplica] = [*writers, *replicas]

    def kill() -> None:
        part = random.choice(parts)
        world.trace.add(f"chaos: kills {part.name}")
        if world.faults.hit(plan.host_crash):
            part.machine.crash()
        elif part.process is not None:
            part.process.kill()

    def stall() -> None:
        part, seconds = random.choice(parts), plan.stall * random.random()
        world.trace.add(f"chaos: {part.name} stands still for {seconds:.1f} s")
        if part.process is not None:
            part.process.stall(seconds)

    def restart() -> None:
        random.choice(replicas).engine.process.kill()

    async def every(mean: float, event: Callable[[], None]) -> None:
        while mean:
            await asyncio.sleep(random.expovariate(1 / mean))
            if world.faults.quiet:
                return
            event()

    await asyncio.gather(
        every(plan.kill_every, kill),
        every(plan.stall_every, stall),
        every(plan.engine_restart_every, restart),
    )


async def traffic(
    world: World, replicas: Sequence[SimulatedReplica], enough: asyncio.Event, every: float = 6.0
) -> None:
    """Requests of all kinds for all replicas until it is enough; returns when all have ended."""
    random, number = world.random, 0
    async with asyncio.TaskGroup() as group:
        while not enough.is_set():
            await asyncio.sleep(random.expovariate(1 / every))
            number += 1
            group.create_task(request(world, random.choice(replicas), f"q{number}"))


async def request(world: World, replica: SimulatedReplica, request_id: str) -> None:
    """One request with a random demand; some clients leave before they are answered, some stop reading."""
    random = world.random
    client = Client()
    if random.random() < 0.15:
        world.loop.call_later(random.uniform(0, 10), client.leave)
    elif random.random() < 0.2:
        stop = random.uniform(0, 20)
        world.loop.call_later(stop, client.reads.clear)
        world.loop.call_later(stop + random.choice((5, 50, 500)), client.reads.set)
    constraint, tokens = demand(world), random.choice((1, 4, 20, 60))
    began, healthy = world.loop.time(), replica.health
    response = await replica.ask(
        request_id, constraint, tokens=tokens, stream=random.random() < 0.5, client=client
    )
    took = world.loop.time() - began
    # The gate holds for 10 s at most, a pause may come between any two tokens, and a process may stall.
    if took > 60 * world.timing.token + 900 + world.faults.plan.stall:
        world.judge.broken("independence: every request ends", f"{request_id} took {took:.0f} s")
    if response is None or response.status == 200 or constraint or not calm(world):
        return
    if healthy is not None and healthy == replica.health and not replica.drains:
        world.judge.broken("independence: it goes on serving", f"{replica.name} {request_id}: {response}")


def calm(world: World) -> bool:
    """Whether nothing happens to engines and processes, whatever happens to the store and the trainers."""
    plan = world.faults.plan
    return (plan.stall_every, plan.slow, plan.engine_silent, plan.engine_refuses) == (0, 0, 0, 0)


def demand(world: World) -> VersionConstraint:
    """None, a minimum, an exact version, or another run's."""
    random, judge = world.random, world.judge
    run = random.choice(list(judge.heads) or ["a"])
    newest = judge.newest(run)
    number = newest.number if newest else 0
    return random.choice((
        VersionConstraint(),
        VersionConstraint(),
        VersionConstraint(run=run),
        VersionConstraint(min_version=max(0, number - random.randint(-1, 2)), run=run),
        VersionConstraint(exact_version=max(0, number - random.randint(0, 1)), run=run),
    ))  # fmt: skip


async def all_is_well(
    world: World,
    writers: Sequence[Writer],
    replicas: Sequence[SimulatedReplica],
    tasks: Iterable[asyncio.Future[None]],
    run: str,
) -> None:
    """Convergence: writers end, replicas serve the head of ``run`` and answer; no part has failed."""
    deadline = world.loop.time() + SETTLE

    def left() -> list[str]:
        waiting = [f"{writer.name} is not done" for writer in writers if not writer.done.is_set()]
        waiting += [why for replica in replicas if (why := replica.why_not(run))]
        return waiting

    while missing := left():
        for replica in replicas:
            if replica.engine.lies and not replica.engine.process.dead:
                replica.engine.process.kill()  # nothing else would find out before its state comes back
        for task in tasks:
            if task.done():
                task.result()
        if world.loop.time() > deadline:
            missing += [str(replica.reconciler and replica.reconciler.status()) for replica in replicas]
            world.judge.broken("convergence: every live replica arrives", "\n".join(missing))
        await asyncio.sleep(2.0)
    newest = world.judge.newest(run)
    assert newest is not None
    for replica in replicas:
        constraint = VersionConstraint(min_version=newest.number, run=run)
        response = await replica.ask("last", constraint, tokens=2)
        if response is None or response.status != 200:
            world.judge.broken("convergence: it answers", f"{replica.name}: {response}")
