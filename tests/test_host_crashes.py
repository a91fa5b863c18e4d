"""The local copy under crashes of the process and the machine at every change to a file, and full disks."""

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stitch_core import applying
from stitch_core.checkpoint import Checkpoint
from stitch_core.delta import fold, segments
from stitch_core.delta.stream import PART_BYTES
from stitch_core.host_checkpoint import HostCheckpoint
from stitch_core.lineage import Plan, Undo, cheapest_plan
from stitch_core.testing.faults import FaultPlan, Faults, Moment
from stitch_core.testing.process import Crash, SimulatedProcess
from stitch_core.testing.runs import RunBuilder
from stitch_core.testing.sim_files import SimulatedMachine

ROOT = Path("/host")
SEEDS = [*range(20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 60))]
LAYOUT: dict[str, tuple[str, tuple[int, ...]]] = {
    "a": ("BF16", (40,)), "b": ("F32", ()), "c/ü": ("U8", (30,)), "d": ("BF16", (0, 2)),
}  # fmt: skip


class World:
    """A machine with a run on it and a host checkpoint; pages of 16 bytes, so that tensors tear."""

    def __init__(
        self, seed: int, batch_bytes: int, faults: FaultPlan | None = None, part_bytes: int = PART_BYTES
    ) -> None:
        self.faults = Faults(faults or FaultPlan(), Random(seed), lambda: 0.0)
        self.faults.armed = False
        self.machine = SimulatedMachine("host", self.faults, page=16)
        self.batch_bytes, self.part_bytes = batch_bytes, part_bytes
        self._nonces = iter(range(1000))
        self.start()
        self.run = RunBuilder(Path("/run"), self.files, layout=LAYOUT, seed=seed)
        self.run.delta(density=0.5)
        self.run.delta(density=0.5, encoding="overwrite")
        self.run.delta(density=0.5, encoding="sparse")
        self.run.full()
        self.run.delta(density=0.5)
        self._sync_all(Path("/"))
        self.faults.armed = True

    def start(self) -> None:
        """A new process, with the copy not yet open."""
        process = SimulatedProcess(cast(Any, SimpleNamespace()), "replica")
        self.files = self.machine.files(process)
        self.host = HostCheckpoint(
            ROOT, self.files, nonce=lambda: str(next(self._nonces)), batch_bytes=self.batch_bytes, workers=1,
            part_bytes=self.part_bytes,
        )  # fmt: skip

    def _sync_all(self, path: Path) -> None:
        for name in self.files.list(path):
            try:
                self._sync_all(path / name)
            except NotADirectoryError:
                self.files.sync(path / name)
        self.files.sync(path)

    def check(self) -> int | None:
        """What is held is what it is said to be; its number."""
        holding, links = self.host.holding, []
        if self.files.exists(ROOT):
            links = [name for name in self.files.list(ROOT) if name.startswith("weight_v")]
        if holding is None:
            assert links == []
            return None
        number = holding.version.number
        assert links == [f"weight_v{number:06d}"]
        assert holding.manifest_digest == self.run.versions[number].digest()
        checkpoint = Checkpoint.open(self.host.directory, self.files)
        assert checkpoint.state() == holding.state == self.run.versions[number].state
        assert self.host.table == checkpoint.table()
        return number

    def arrive(self, plan: Plan) -> None:
        """What a replica does to reach the plan's target, whatever it holds."""
        target, versions = plan.target, self.run.versions
        interrupted = self.host.interrupted
        if self.host.holding is None and (interrupted is None or not interrupted.fits(plan)):
            self.host.seed(self.run.boot, versions[0])
        if self.host.holding is not None:
            plan = cheapest_plan(target, versions, {self.host.holding.state})
        self.host.apply(plan, self.run.directory_of)
        assert self.check() == target.number
        data = [name for name in self.files.list(ROOT) if name.startswith("data-")]
        assert len(data) == 1


def in_place(world: World) -> Plan:
    v = world.run.versions
    return Plan(v[3], v[0].state, None, (v[1], v[2], v[3]))


def full(world: World) -> Plan:
    v = world.run.versions
    return Plan(v[5], None, v[4], (v[5],))


def back(world: World) -> Plan:
    """XOR deltas undone, over a version that has the weights of the one before it."""
    v = world.run.versions
    if world.check() == 0:
        world.host.apply(full(world), world.run.directory_of)
    return Plan(v[2], v[5].state, None, (Undo(v[5]), Undo(v[3])))


def relabel(world: World) -> Plan:
    v = world.run.versions
    return Plan(v[0], v[0].state, None, ())


def seeded(seed: int, batch_bytes: int, part_bytes: int = PART_BYTES) -> World:
    world = World(seed, batch_bytes, part_bytes=part_bytes)
    world.host.open()
    world.host.seed(world.run.boot, world.run.versions[0])
    return world


@pytest.mark.parametrize("host_crash", [False, True], ids=["process", "machine"])
@pytest.mark.parametrize(
    ("batch_bytes", "part_bytes"),
    [
        pytest.param(1, PART_BYTES, marks=pytest.mark.slow), (100, PART_BYTES),
        pytest.param(1 << 20, PART_BYTES, marks=pytest.mark.slow),
        pytest.param(1, 16, marks=pytest.mark.slow), pytest.param(60, 16, marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.parametrize("make_plan", [in_place, back, full, relabel])
def test_a_crash_at_every_change_of_an_apply(
    make_plan: Any, batch_bytes: int, part_bytes: int, host_crash: bool
) -> None:
    """Also where a record of the journal ends within a tensor."""
    seen = set()
    moments: list[Moment] = ["before", "partial", "after"]
    for offset in range(1000):
        for moment in moments:
            world = seeded(offset, batch_bytes, part_bytes)
            plan = make_plan(world)
            start = world.check()
            world.machine.crash_at = (world.machine.operations + offset, moment)
            world.machine.crash_host = host_crash
            try:
                world.host.apply(plan, world.run.directory_of)
            except Crash:
                pass
            else:
                assert offset > 3
                assert seen >= {start, plan.target.number}
                return
            world.machine.crash_at = None
            world.start()
            world.host.open()
            number = world.check()
            seen.add(number)
            assert number in {None, start, plan.target.number}
            if number is None:  # not lost: the same plan goes on
                assert world.host.interrupted is not None
                assert world.host.interrupted.fits(plan)
                assert plan.full is None
            world.arrive(plan)
    raise AssertionError("the apply never ended")


@pytest.mark.slow
def test_a_crash_at_every_change_where_tensors_are_taken_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applying, "SMALL_BYTES", 0)
    monkeypatch.setattr(fold, "LARGE_BYTES", 1)
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 32)

    def sparse(world: World) -> Plan:
        v = world.run.versions
        world.host.apply(Plan(v[2], v[0].state, None, (v[1], v[2])), world.run.directory_of)
        return Plan(v[3], v[2].state, None, (v[3],))

    for host_crash in (False, True):
        test_a_crash_at_every_change_of_an_apply(sparse, 1, 16, host_crash)


@pytest.mark.parametrize("host_crash", [False, True], ids=["process", "machine"])
def test_a_crash_at_every_change_of_a_seed(host_crash: bool) -> None:
    for offset in range(1000):
        world = World(offset, 100)
        world.host.open()
        world.machine.crash_at = (world.machine.operations + offset, "partial")
        world.machine.crash_host = host_crash
        try:
            world.host.seed(world.run.boot, world.run.versions[0])
        except Crash:
            pass
        else:
            return
        world.machine.crash_at = None
        world.start()
        assert (world.host.open() is None) == (world.check() is None)
        assert world.host.interrupted is None
        world.arrive(in_place(world))
    raise AssertionError("the seed never ended")


@pytest.mark.parametrize("seed", SEEDS)
def test_crash_after_crash_also_while_recovering(seed: int) -> None:
    random = Random(seed)
    world = seeded(seed, random.choice([1, 100, 1 << 20]), random.choice([16, PART_BYTES]))
    plan = random.choice([in_place, in_place, full, back])(world)
    for _ in range(random.randint(2, 6)):
        moment: Moment = random.choice(["before", "partial", "after"])
        world.machine.crash_at = (world.machine.operations + random.randrange(25), moment)
        world.machine.crash_host = random.random() < 0.5
        try:
            world.host.open()
            world.check()
            world.arrive(plan)
        except Crash:
            world.start()
    world.machine.crash_at = None
    world.host.open()
    world.check()
    world.arrive(plan)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_disk_that_is_full_now_and_then(seed: int) -> None:
    random = Random(seed)
    part_bytes = random.choice([16, PART_BYTES])
    world = World(seed, random.choice([1, 100, 1 << 20]), FaultPlan(disk_full=0.1), part_bytes)
    plan = random.choice([in_place, in_place, full, back])(world)
    failures = 0
    for _ in range(100):
        try:
            if world.host.holding is None:
                world.host.open()
            world.arrive(plan)
            break
        except OSError:
            failures += 1
            world.faults.armed = failures < 8
            if world.host.holding is not None and world.files.exists(world.host.directory):
                checkpoint = Checkpoint.open(world.host.directory, world.files)
                assert checkpoint.state() == world.host.holding.state
    assert world.check() == plan.target.number


def test_an_interrupted_step_may_go_on_to_a_later_version() -> None:
    """What was begun is finished by a plan for any version, as long as it starts at the same base."""
    for target in (1, 2, 3):
        world = seeded(target, 1)
        versions = world.run.versions
        world.machine.crash_at = (world.machine.operations + 9, "after")
        with pytest.raises(Crash):
            world.host.apply(
                Plan(versions[1], versions[0].state, None, (versions[1],)), world.run.directory_of
            )
        world.machine.crash_at = None
        world.start()
        assert world.host.open() is None
        later = Plan(versions[target], versions[0].state, None, tuple(versions[1 : target + 1]))
        assert world.host.interrupted is not None
        assert world.host.interrupted.fits(later)
        world.host.apply(later, world.run.directory_of)
        assert world.check() == target


@pytest.mark.slow
def test_a_step_that_was_interrupted_within_a_tensor_may_go_on_to_a_later_version() -> None:
    """And again: then one tensor has bytes of three versions, or two have bytes of two.

    Found by this test: the later plan comes to other tensors first, and stops within one of those, while the
    first is still partial.
    """
    zones = tensors = 0
    for offset in range(6, 200):
        world = seeded(7, 1, 16)
        versions = world.run.versions
        for target in (1, 3):
            plan = Plan(versions[target], versions[0].state, None, tuple(versions[1 : target + 1]))
            steps = offset if target == 1 else 20 + offset % 31
            world.machine.crash_at = (world.machine.operations + steps, "after")
            try:
                world.host.apply(plan, world.run.directory_of)
            except Crash:
                pass
            else:
                if target == 1:
                    assert (zones, tensors) == (3, 2)
                    return
            world.machine.crash_at = None
            world.start()
            if world.host.open() is not None:
                break
            assert world.host.interrupted is not None
            assert world.host.interrupted.fits(plan)
            partials = world.host._partials
            zones = max([zones, *map(len, partials.values())])
            tensors = max(tensors, len(partials))
        if world.host.holding is None:
            world.host.apply(plan, world.run.directory_of)
        assert world.check() in (0, 1, 3)
    raise AssertionError("the apply never ended")


def test_an_interrupted_step_whose_plan_is_lost_is_rebuilt() -> None:
    world = seeded(0, 1)
    versions = world.run.versions
    world.machine.crash_at = (world.machine.operations + 9, "after")
    with pytest.raises(Crash):
        world.host.apply(in_place(world), world.run.directory_of)
    world.machine.crash_at = None
    world.start()
    assert world.host.open() is None
    interrupted = world.host.interrupted
    assert interrupted is not None
    assert interrupted.base_state == versions[0].state
    assert interrupted.fits(full(world))
    assert not interrupted.fits(relabel(world))
    assert not interrupted.fits(Plan(versions[3], versions[2].state, None, (versions[3],)))
    world.host.seed(world.run.boot, versions[0])
    assert world.check() == 0
