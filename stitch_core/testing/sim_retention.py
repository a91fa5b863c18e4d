"""Collectors, compactors, an anchor job, trainers and readers on one run: nothing that is needed goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ..head import Channel
from ..manifest import floor_number, run_prefix
from ..pins import Pin, pin_key
from ..versions import PolicyVersion
from .sim_cases import head_number, kill_at, until
from .sim_jobs import (
    SimulatedAnchorJob,
    SimulatedCollector,
    SimulatedCompactor,
    SimulatedJob,
    SimulatedReader,
)
from .sim_keeper import Keeper
from .sim_random import SETTLE
from .sim_trainer import SimulatedTrainer
from .sim_world import Timing, World

Part = SimulatedTrainer | SimulatedJob


async def retention(world: World) -> None:
    """Two trainers, collectors and compactors, four readers and an anchor job, any faults at every call."""
    random, grace = world.random, world.random.choice((0.0, 60.0, 240.0))
    keeper = Keeper(world, grace)
    versions, encoding = random.randint(8, 16), random.choice(("xor", "sparse"))
    trainers = [_trainer(world, name, versions) for name in ("trainer", "rival")]
    readers = [
        SimulatedReader(
            world, f"r{i}", "a", lag=random.choice((0.0, 0.0, 90.0)),
            anchor_every=random.choice((None, None, 3)),
        )
        for i in range(4)
    ]  # fmt: skip
    jobs: list[SimulatedJob] = [SimulatedCollector(world, f"gc{i}", "a", grace=grace) for i in range(2)]
    jobs += [SimulatedCompactor(world, f"compact{i}", "a", grace=grace) for i in range(random.choice((0, 2)))]
    jobs.append(SimulatedAnchorJob(world, "anchor", "a"))
    for trainer in trainers:
        trainer.encoding = encoding
    parts: list[Part] = [*trainers, *readers, *jobs]
    tasks = [_start(part, 60.0 * random.random() * (part is not trainers[0])) for part in parts]
    tasks.append(asyncio.ensure_future(_chaos(world, parts)))
    await asyncio.sleep(world.faults.plan.quiet_after)
    await _all_is_well(world, trainers, readers, tasks)
    # A joiner that comes when all is over finds its way through what is left.
    joiner = SimulatedReader(world, "joiner", "a")
    tasks.append(asyncio.ensure_future(joiner.supervise()))
    await _all_is_well(world, trainers, [joiner], tasks)
    world.judge.collected = keeper.deleted
    for task in tasks:
        task.cancel()


def _trainer(world: World, name: str, versions: int, full_rate: float = 0.05) -> SimulatedTrainer:
    trainer = SimulatedTrainer(world, name, "a", versions=versions, full_rate=full_rate)
    trainer.raise_floor = True
    return trainer


def _start(part: Part, seconds: float) -> asyncio.Future[None]:
    async def start() -> None:
        await asyncio.sleep(seconds)
        await part.supervise()

    return asyncio.ensure_future(start())


async def _chaos(world: World, parts: Sequence[Part]) -> None:
    plan, random = world.faults.plan, world.random

    def kill() -> None:
        part = random.choice(parts)
        world.trace.add(f"chaos: kills {part.name}")
        if part.process is not None:
            part.process.kill()

    def stall() -> None:
        part, seconds = random.choice(parts), plan.stall * random.random()
        world.trace.add(f"chaos: {part.name} stands still for {seconds:.1f} s")
        if part.process is not None:
            part.process.stall(seconds)

    async def every(mean: float, event: Callable[[], None]) -> None:
        while mean:
            await asyncio.sleep(random.expovariate(1 / mean))
            if world.faults.quiet:
                return
            event()

    await asyncio.gather(every(plan.kill_every, kill), every(plan.stall_every, stall))


async def _all_is_well(
    world: World,
    trainers: Sequence[SimulatedTrainer],
    readers: Sequence[SimulatedReader],
    tasks: Sequence[asyncio.Future[None]],
) -> None:
    """Trainers end, and every reader holds the head."""
    deadline = world.loop.time() + SETTLE

    def left() -> list[str]:
        waiting = [f"{trainer.name} is not done" for trainer in trainers if not trainer.done.is_set()]
        return waiting + [
            f"{r.name} holds {r.applied}, not {head_number(world)}: {r.errors[-3:]}"
            for r in readers
            if r.applied != head_number(world)
        ]

    while missing := left():
        for task in tasks:
            if task.done():
                task.result()
        if world.loop.time() > deadline:
            world.judge.broken("convergence: every reader arrives", "\n".join(missing))
        await asyncio.sleep(2.0)


# ----------------------------------------------------------------------------------- one fault at a time


async def _anchored(
    world: World, versions: int = 10, every: int = 3, behind: float = 0.0
) -> SimulatedTrainer:
    """A run of deltas whose floor was raised again and again; every version lies behind."""
    trainer, job = _trainer(world, "first", 0, 0.0), SimulatedAnchorJob(world, "anchor", "a")
    job.every, trainer.behind = every, behind
    task = asyncio.ensure_future(job.supervise())
    for number in range(1, versions + 1):
        trainer.versions = number
        trainer.done.clear()
        await trainer.supervise()
        fulls = [key for key in world.bucket.objects if "/fulls/0" in key and key.count("/") == 3]
        await until(world, lambda n=number, f=fulls: n % every or len(f) <= _fulls(world), "a full")  # type: ignore[misc]
        if number % every == 0:
            await until(world, lambda n=number: _fulls(world) >= n // every, "a full")  # type: ignore[misc]
    task.cancel()
    if job.process is not None:
        job.process.kill()
    return trainer


def _fulls(world: World) -> int:
    return len(world.judge.records("a"))


def _payload(world: World) -> set[int]:
    return {int(key.split("/")[3].removeprefix("weight_v"))
            for key in world.bucket.objects if "/weight_v" in key}  # fmt: skip


async def c10_a_replica_below_what_was_collected(world: World) -> None:
    """It holds version 1, the deltas above it are gone: it takes a full, and never a wrong base."""
    world.timing = Timing(train=1.0)
    Keeper(world, 10.0)
    reader = SimulatedReader(world, "r", "a")
    trainer = _trainer(world, "first", 1, 0.0)
    await trainer.supervise()
    task = asyncio.ensure_future(reader.supervise())
    await until(world, lambda: reader.applied == 1, "version 1")
    assert reader.process is not None
    reader.process.stall(400.0)
    await _anchored(world)
    collector = SimulatedCollector(world, "gc", "a", grace=10.0, every=5.0)
    collecting = asyncio.ensure_future(collector.supervise())
    await until(world, lambda: min(_payload(world)) > 3, "the collector")
    await until(world, lambda: reader.applied == 10, "the reader", 1000.0)
    for each in (task, collecting):
        each.cancel()


async def c29_a_publisher_sleeps_longer_than_the_grace(world: World) -> None:
    """Between its manifest and its swap, while collectors and compactors work, perhaps another writer too."""
    world.timing = Timing(train=1.0)
    keeper = Keeper(world, 10.0)
    await _anchored(world)
    collectors = [SimulatedCollector(world, f"gc{i}", "a", grace=10.0, every=5.0) for i in range(2)]
    compactors = [SimulatedCompactor(world, f"compact{i}", "a", grace=10.0, every=5.0) for i in range(2)]
    tasks = [asyncio.ensure_future(job.supervise()) for job in (*collectors, *compactors)]
    sleeper = _trainer(world, "sleeper", 12, 0.0)
    slept: list[str] = []

    def sleep(key: str, old: bytes | None, new: bytes | None, who: str) -> None:
        if key.startswith(run_prefix("a") + "manifests/000011") and not slept and sleeper.process:
            slept.append(key)
            sleeper.process.stall(300.0)

    world.bucket.observers.append(sleep)
    tasks.append(asyncio.ensure_future(sleeper.supervise()))
    await until(world, lambda: bool(slept), "the sleep")
    if world.random.random() < 0.5:
        other = _trainer(world, "other", 13, 0.0)
        await other.supervise()
        assert head_number(world) == 13
        await until(world, lambda: keeper.deleted > 0, "the collector")
        await until(world, sleeper.done.is_set, "the sleeper")
        assert sleeper.fenced is not None
    else:
        await until(world, lambda: head_number(world) == 12, "the sleeper")
    reader = SimulatedReader(world, "r", "a")
    tasks.append(asyncio.ensure_future(reader.supervise()))
    await until(world, lambda: reader.applied == head_number(world), "the reader")
    for task in tasks:
        task.cancel()


async def c34_a_full_beside_the_chain_is_corrupt(world: World) -> None:
    """Cheap, listed, and wrong: excluded, planned around, never chosen again by this process."""
    world.timing = Timing(train=1.0)
    await _anchored(world)
    record = max(world.judge.records("a"), key=lambda record: record.number)
    file = world.random.choice(record.representation.files)
    wrong = record.file_key(file.name)
    get, at = world.bucket.get, world.random.random()

    def damaged(key: str) -> bytes:
        data = get(key)
        place = int(at * len(data))
        return data if key != wrong else data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    world.bucket.get = damaged  # type: ignore[method-assign]
    reads: list[str] = []
    world.bucket.on_call = lambda process, what, called: reads.append(called) if called == wrong else None
    reader = SimulatedReader(world, "r", "a")
    task = asyncio.ensure_future(reader.supervise())
    await until(world, lambda: reader.applied == 10, "the reader")
    seen = len(reads)
    trainer = _trainer(world, "more", 14, 0.0)
    await trainer.supervise()
    await until(world, lambda: reader.applied == 14, "the reader")
    assert len(reads) == seen, "it was read again"
    task.cancel()


async def s34_a_cheap_span_is_corrupt(world: World) -> None:
    """One file of the aggregate is not what its record says: planned around, and not read again."""
    world.timing = Timing(train=1.0)
    Keeper(world, 1e6)
    trainer = _trainer(world, "first", 12, 0.0)
    trainer.encoding = world.random.choice(("xor", "sparse"))
    await trainer.supervise()
    job = asyncio.ensure_future(SimulatedCompactor(world, "compact", "a", grace=1e6).supervise())
    await until(world, lambda: (0, 12) in _spans(world), "the aggregate")
    aggregate = next(r for r in world.judge.records("a") if (r.since, r.number) == (0, 12))
    wrong = aggregate.file_key(world.random.choice(aggregate.representation.files).name)
    get, at = world.bucket.get, world.random.random()

    def damaged(key: str) -> bytes:
        data = get(key)
        place = int(at * len(data))
        return data if key != wrong else data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    world.bucket.get = damaged  # type: ignore[method-assign]
    reader, reads = SimulatedReader(world, "r", "a"), []

    def called(process: object, what: str, key: str) -> None:
        if key == wrong and process is reader.process:
            reads.append(key)

    world.bucket.on_call = called
    task = asyncio.ensure_future(reader.supervise())
    await until(world, lambda: reader.applied == 12, "the reader")
    seen = len(reads)
    assert seen, "it was not even tried"
    # The compactor meets it too, when it makes the next aggregate, and does without.
    more = _trainer(world, "more", 16, 0.0)
    more.encoding = trainer.encoding
    await more.supervise()
    await until(world, lambda: (0, 16) in _spans(world), "the next aggregate")
    await until(world, lambda: reader.applied == 16, "the reader")
    assert len(reads) == seen, "it was read again"
    joiner = SimulatedReader(world, "joiner", "a")
    joining = asyncio.ensure_future(joiner.supervise())
    await until(world, lambda: joiner.applied == 16, "a joiner")
    for each in (task, job, joining):
        each.cancel()


def _spans(world: World) -> set[tuple[int | None, int]]:
    return {(record.since, record.number) for record in world.judge.records("a")}


async def n05_a_joiner_fetches_an_aggregate_that_was_replaced(world: World) -> None:
    """Two compactors make newer ones, and the grace is over: its record keeps the one that it fetches."""
    world.timing = Timing(train=1.0)
    keeper = Keeper(world, 10.0)
    trainer = _trainer(world, "first", 9, 0.0)
    await trainer.supervise()
    compactors = [SimulatedCompactor(world, f"compact{i}", "a", grace=10.0, every=5.0) for i in range(2)]
    tasks = [asyncio.ensure_future(job.supervise()) for job in compactors]
    await until(world, lambda: (0, 8) in _spans(world), "the aggregate")
    joiner = SimulatedReader(world, "joiner", "a")
    joiner.slow = 400.0
    tasks.append(asyncio.ensure_future(joiner.supervise()))
    await asyncio.sleep(30.0)
    world.timing = Timing(train=25.0)
    more = _trainer(world, "more", 24, 0.0)
    await more.supervise()
    await until(world, lambda: (0, 24) in _spans(world), "newer ones")
    await until(world, lambda: (0, 12) not in _spans(world), "one that is not fetched goes")
    await until(world, lambda: joiner.applied == 9, "the joiner", 5000.0)
    assert not joiner.errors, joiner.errors
    joiner.slow = 0.0
    await until(world, lambda: joiner.applied == 24, "the joiner", 5000.0)
    await until(world, lambda: (0, 8) not in _spans(world), "the one that was fetched goes")
    assert keeper.deleted > 0
    for task in tasks:
        task.cancel()


async def n01_a_joiner_slower_than_the_grace(world: World) -> None:
    """Its fetch takes many times the grace: its record keeps what it fetches, and it needs no second plan."""
    world.timing = Timing(train=1.0)
    keeper = Keeper(world, 10.0)
    await _anchored(world, 5)
    joiner = SimulatedReader(world, "joiner", "a")
    joiner.slow = 400.0
    tasks = [asyncio.ensure_future(joiner.supervise())]
    await asyncio.sleep(60.0)
    collector = SimulatedCollector(world, "gc", "a", grace=10.0, every=5.0)
    tasks.append(asyncio.ensure_future(collector.supervise()))
    await _anchored_more(world, 14)
    await until(world, lambda: keeper.deleted > 0, "the collector")
    await until(world, lambda: joiner.applied is not None, "the joiner", 5000.0)
    assert not joiner.errors, joiner.errors
    joiner.slow = 0.0
    await until(world, lambda: joiner.applied == 14, "the joiner", 5000.0)
    for task in tasks:
        task.cancel()


async def n06_a_joiner_whose_clock_is_late_keeps_what_it_fetches(world: World) -> None:
    """By its own clock its record is fresh, and by the collector's it expired long ago, each time."""
    world.timing = Timing(train=1.0)
    keeper = Keeper(world, 300.0)
    await _anchored(world, 5)
    joiner = SimulatedReader(world, "joiner", "a")
    joiner.slow, joiner.behind = 3000.0, world.random.choice((280.0, 7000.0))
    tasks = [asyncio.ensure_future(joiner.supervise())]
    await asyncio.sleep(60.0)
    collector = SimulatedCollector(world, "gc", "a", grace=300.0, every=30.0)
    tasks.append(asyncio.ensure_future(collector.supervise()))
    await _anchored_more(world, 14)
    await until(world, lambda: keeper.deleted > 0, "the collector", 5000.0)
    assert joiner.applied is None, "it was to be fetching still"
    await until(world, lambda: joiner.applied is not None, "the joiner", 90000.0)
    assert not joiner.errors, joiner.errors
    for task in tasks:
        task.cancel()


async def _anchored_more(world: World, versions: int) -> None:
    job, trainer = SimulatedAnchorJob(world, "anchor2", "a"), _trainer(world, "second", 0, 0.0)
    task = asyncio.ensure_future(job.supervise())
    for number in range(head_number(world) + 1, versions + 1):
        trainer.versions = number
        trainer.done.clear()
        await trainer.supervise()
        await asyncio.sleep(20.0)
    task.cancel()
    if job.process is not None:
        job.process.kill()


async def n02_a_stalled_reader_and_a_second_collector(world: World) -> None:
    """Stalled in the middle of its fetch, its record long expired: it meets a 404, and plans again."""
    world.timing = Timing(train=1.0)
    keeper = Keeper(world, 10.0)
    await _anchored(world, 4)
    reader = SimulatedReader(world, "r", "a")
    stalled: list[str] = []

    def stall(process: object, what: str, key: str) -> None:
        if what == "read" and reader.process is process and not stalled and world.random.random() < 0.4:
            stalled.append(key)
            assert reader.process is not None
            reader.process.stall(400.0)

    world.bucket.on_call = stall
    tasks = [asyncio.ensure_future(reader.supervise())]
    await until(world, lambda: bool(stalled) or reader.applied == 4, "the stall")
    await _anchored_more(world, 12)
    for i in range(2):
        collector = SimulatedCollector(world, f"gc{i}", "a", grace=10.0, every=3.0)
        tasks.append(asyncio.ensure_future(collector.supervise()))
    await until(world, lambda: keeper.deleted > 0, "the collectors")
    await until(world, lambda: reader.applied == 12, "the reader", 1000.0)
    for task in tasks:
        task.cancel()


async def n03_a_trainer_dies_and_its_leftovers_are_collected(world: World) -> None:
    """Killed in the middle of an upload; what it left is of an epoch that lost the run, and goes."""
    world.timing = Timing(train=1.0)
    Keeper(world, 10.0)
    trainer = _trainer(world, "t", 8, 0.0)
    killed = kill_at(world, trainer, run_prefix("a") + "e0001/weight_v000004/")
    task = asyncio.ensure_future(trainer.supervise())
    await killed.wait()
    left = [key for key in world.bucket.objects if "/e0001/weight_v000004/" in key]
    await until(world, lambda: head_number(world) == 8, "the next trainer")
    collecting = asyncio.ensure_future(SimulatedCollector(world, "gc", "a", grace=1e6, every=5.0).supervise())
    await until(world, lambda: not any(key in world.bucket.objects for key in left), "the collector")
    newest = world.judge.newest("a")
    assert newest is not None
    assert floor_number(newest) == 0
    for each in (task, collecting):
        each.cancel()


async def n04_a_channel_and_a_pin_keep_what_they_name(world: World) -> None:
    """Each with the floor and all that leads from there; a replica that is told to serves it."""
    world.timing = Timing(train=1.0)
    keeper = Keeper(world, 10.0)
    await _anchored(world, 12)
    pinned = world.judge.versions[PolicyVersion("a", 5)]
    world.bucket.put("channels/exact", Channel("a", 4).encode(), "operator")
    world.bucket.put(pin_key("keep"), Pin("a", 5, pinned.digest()).encode(), "operator")
    await asyncio.sleep(keeper.slack + 1)
    collector = SimulatedCollector(world, "gc", "a", grace=10.0, every=5.0)
    task = asyncio.ensure_future(collector.supervise())
    await until(world, lambda: keeper.deleted > 0, "the collector")
    await asyncio.sleep(60.0)
    low = floor_number(pinned)
    assert {low, *range(low + 1, 6)} <= _payload(world)
    assert 1 not in _payload(world)
    task.cancel()


async def n07_a_trainer_whose_clock_is_late_keeps_the_grace(world: World) -> None:
    """It dates its versions hours before it writes them, so that they look old at once."""
    world.timing = Timing(train=1.0)
    keeper = Keeper(world, 300.0)
    await _anchored(world, 12, behind=world.random.choice((280.0, 7000.0)))
    collector = SimulatedCollector(world, "gc", "a", grace=300.0, every=5.0)
    task = asyncio.ensure_future(collector.supervise())
    await until(world, lambda: keeper.deleted > 0, "the collector", 5000.0)
    task.cancel()


async def n08_records_of_replicas_that_are_gone(world: World) -> None:
    """One is killed for good, one stands still for longer than the grace, one has a late clock and lives."""
    world.timing = Timing(train=1.0)
    keeper = Keeper(world, 60.0)
    trainer = _trainer(world, "first", 2, 0.0)
    await trainer.supervise()
    killed, stalled, late = readers = [
        SimulatedReader(world, name, "a") for name in ("dead", "still", "late")
    ]
    late.behind = 7000.0
    tasks = [asyncio.ensure_future(reader.supervise()) for reader in readers]
    await until(world, lambda: all(reader.applied == 2 for reader in readers), "the readers")
    assert killed.process is not None
    assert stalled.process is not None
    tasks[0].cancel()
    killed.process.kill()
    stalled.process.stall(300.0)
    collectors = [SimulatedCollector(world, f"gc{i}", "a", grace=60.0, every=5.0) for i in range(2)]
    tasks += [asyncio.ensure_future(collector.supervise()) for collector in collectors]
    there = lambda reader: f"replicas/{reader.name}.json" in world.bucket.objects  # noqa: E731
    await until(world, lambda: not there(killed) and not there(stalled), "the collectors")
    assert keeper.forgotten == 2
    await until(world, lambda: there(stalled), "its record")
    await asyncio.sleep(300.0)
    assert (there(killed), there(stalled), there(late), keeper.forgotten) == (False, True, True, 2)
    for task in tasks:
        task.cancel()


async def c80_collectors_whose_clocks_are_days_ahead_and_behind(world: World) -> None:
    """The one would take floors and records that are a minute old for old ones, the other collect nothing."""
    world.timing = Timing(train=1.0)
    keeper = Keeper(world, 300.0)
    await _anchored(world, 12)
    reader = SimulatedReader(world, "r", "a")
    tasks = [asyncio.ensure_future(reader.supervise())]
    days = world.random.choice((2.0, 20.0)) * 86400.0
    for name, ahead in (("fast", days), ("slow", -days)):
        collector = SimulatedCollector(world, name, "a", grace=300.0, every=30.0, ahead=ahead)
        task = asyncio.ensure_future(collector.supervise())
        await until(world, lambda: keeper.deleted > 0, f"the {name} collector", 5000.0)
        task.cancel()
        assert collector.process is not None
        collector.process.kill()
        await _anchored_more(world, 24)
        keeper.deleted = 0
    assert keeper.forgotten == 0
    for task in tasks:
        task.cancel()


RETENTION_CASES = [
    retention,
    c10_a_replica_below_what_was_collected,
    c29_a_publisher_sleeps_longer_than_the_grace,
    c34_a_full_beside_the_chain_is_corrupt,
    s34_a_cheap_span_is_corrupt,
    n01_a_joiner_slower_than_the_grace,
    n02_a_stalled_reader_and_a_second_collector,
    n03_a_trainer_dies_and_its_leftovers_are_collected,
    n04_a_channel_and_a_pin_keep_what_they_name,
    n05_a_joiner_fetches_an_aggregate_that_was_replaced,
    n06_a_joiner_whose_clock_is_late_keeps_what_it_fetches,
    n07_a_trainer_whose_clock_is_late_keeps_the_grace,
    n08_records_of_replicas_that_are_gone,
    c80_collectors_whose_clocks_are_days_ahead_and_behind,
]
