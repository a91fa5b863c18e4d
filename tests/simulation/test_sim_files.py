"""The simulated file system: what a process's death keeps, what a machine's death may lose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from stitch_core.files import PosixFiles
from stitch_core.ports import Files, write_atomic
from stitch_core.testing.faults import FaultPlan, Faults
from stitch_core.testing.loop import SimulatedLoop, simulated_loop
from stitch_core.testing.process import Crash, SimulatedProcess
from stitch_core.testing.sim_files import SimulatedMachine

TOP = Path("/disk")


class World(NamedTuple):
    loop: SimulatedLoop
    machine: SimulatedMachine

    def files(self, name: str = "p") -> Files:
        return self.machine.files(SimulatedProcess(self.loop, name))


@pytest.fixture
def world() -> Iterator[World]:
    with simulated_loop(Random(1)) as loop:
        yield make_world(loop)


def make_world(loop: SimulatedLoop, plan: FaultPlan | None = None, **options: object) -> World:
    faults = Faults(plan or FaultPlan(), loop.random, loop.time)
    world = World(loop, SimulatedMachine("host", faults, page=4, **options))  # type: ignore[arg-type]
    files = world.files("setup")
    files.make_dirs(TOP)
    files.sync(TOP.parent)
    return world


@pytest.mark.parametrize("kind", ["posix", "simulated"])
def test_behaves_as_posix_does(kind: str, world: World, tmp_path: Path) -> None:
    files: Files = PosixFiles() if kind == "posix" else world.files()
    top = tmp_path if kind == "posix" else TOP
    a, b, sub = top / "a", top / "b", top / "x" / "y"
    files.write_new(a, b"hello")
    with pytest.raises(FileExistsError):
        files.write_new(a, b"")
    files.write_at(a, 5, b" world")
    files.write_at(a, 0, memoryview(b"J"))
    with pytest.raises(ValueError, match="hole"):
        files.write_at(a, 100, b"")
    assert files.read(a) == b"Jello world"
    assert (files.read(a, 6), files.read(a, 9, 100), files.read(a, 50)) == (b"world", b"ld", b"")
    files.link(a, b)
    with pytest.raises(FileExistsError):
        files.link(a, b)
    files.write_at(b, 0, b"C")
    assert (files.read(a, 0, 2), files.size(a)) == (b"Ce", 11)
    files.make_dirs(sub)
    files.make_dirs(sub)
    with pytest.raises(FileExistsError):
        files.make_dirs(a)
    with pytest.raises(NotADirectoryError):
        files.list(a)
    with pytest.raises(IsADirectoryError):
        files.size(sub)
    with pytest.raises(IsADirectoryError):
        files.read(sub)
    files.symlink("x/y", top / "s")
    files.rename(b, top / "s" / "c")
    assert files.read(sub / "c") == files.read(a)
    assert not files.exists(b)
    assert files.list(top) == ["a", "s", "x"]
    files.symlink("nowhere", top / "dangling")
    assert not files.exists(top / "dangling")
    assert not files.exists(a / "below a file")
    files.remove(top / "dangling")
    files.remove_tree(top / "s")
    files.remove_tree(top / "not there")
    assert files.exists(sub / "c")
    files.rename(top / "x", top / "z")
    with pytest.raises(OSError, match="not empty"):
        files.rename(_made(files, top / "w"), top / "z")
    files.remove_tree(top / "z")
    for missing in (files.read, files.size, files.list, files.remove, files.sync):
        with pytest.raises(FileNotFoundError):
            missing(top / "z")
    assert files.free_bytes(top) > 0
    write_atomic(files, a, b"new")
    assert (files.read(a), files.list(top)) == (b"new", ["a", "w"])


def _made(files: Files, path: Path) -> Path:
    files.make_dirs(path)
    return path


def test_a_dead_process_changes_nothing_and_its_locks_are_free(world: World) -> None:
    process = SimulatedProcess(world.loop, "p")
    files, other = world.machine.files(process), world.files("q")

    def work() -> None:
        with files.lock(TOP / "lock", 1.0):
            files.write_new(TOP / "a", b"kept")
            with pytest.raises(TimeoutError), other.lock(TOP / "lock", 1.0):
                pass
            process.kill()
            files.write_new(TOP / "b", b"")

    with pytest.raises(Crash):
        work()
    assert other.read(TOP / "a") == b"kept"
    assert not other.exists(TOP / "b")
    with other.lock(TOP / "lock", 1.0):
        pass


@pytest.mark.parametrize(
    ("moment", "left"),
    [("before", {b"old..."}), ("partial", {b"old...", b"new", b"newer!"}), ("after", {b"newer!"})],
)
def test_a_crash_point_at_every_change(moment: str, left: set[bytes]) -> None:
    found = set()
    for seed in range(40):
        with simulated_loop(Random(seed)) as loop:
            world = make_world(loop)
            files = world.files()
            files.write_new(TOP / "a", b"old...")
            world.machine.crash_at = (world.machine.operations, moment)  # type: ignore[assignment]
            with pytest.raises(Crash):
                files.write_at(TOP / "a", 0, b"newer!")
            found.add(world.files("next").read(TOP / "a"))
    partial = {b"newer!"[:n] + b"old..."[n:] for n in range(7)}
    assert found == (partial if moment == "partial" else left)


def crashed(seed: int, volatile: bool = False) -> dict[str, bytes]:
    """What is left of synced and unsynced work after the machine died."""
    with simulated_loop(Random(seed)) as loop:
        world = make_world(loop, volatile=[TOP] if volatile else [])
        files = world.files()
        files.write_new(TOP / "durable", b"0123456789ab")
        files.sync(TOP / "durable")
        files.write_new(TOP / "unsynced", b"unsynced")
        files.sync(TOP)
        files.write_at(TOP / "durable", 0, b"ABCDEFGH")
        files.write_new(TOP / "unlisted", b"x")
        files.sync(TOP / "unlisted")
        files.rename(TOP / "unlisted", TOP / "renamed")
        world.machine.crash()
        after = world.files("next")
        return {name: after.read(TOP / name) for name in after.list(TOP)}


def test_the_death_of_a_machine_loses_each_unsynced_page_and_entry_or_not() -> None:
    outcomes = [crashed(seed) for seed in range(200)]
    assert outcomes == [crashed(seed) for seed in range(200)]
    assert {o["durable"] for o in outcomes} == {
        b"0123456789ab", b"ABCD456789ab", b"0123EFGH89ab", b"ABCDEFGH89ab",
    }  # fmt: skip
    assert {o["unsynced"] for o in outcomes} == {b"", b"unsy", b"\0\0\0\0nced", b"unsynced"}
    entries = {frozenset(o) & {"unlisted", "renamed"} for o in outcomes}
    assert entries == {frozenset(), frozenset({"unlisted"}), frozenset({"renamed"})}
    assert {o["renamed"] for o in outcomes if "renamed" in o} == {b"x"}


def test_ram_is_empty_after_the_death_of_its_machine() -> None:
    assert all(crashed(seed, volatile=True) == {} for seed in range(10))


def test_a_synced_rename_survives_and_leaves_one_whole_file() -> None:
    for seed in range(100):
        with simulated_loop(Random(seed)) as loop:
            world = make_world(loop)
            files = world.files()
            write_atomic(files, TOP / "a", b"version 1")
            world.machine.crash_at = (
                world.machine.operations + seed % 5,
                ("before", "after", "partial")[seed % 3],
            )  # type: ignore[assignment]
            world.machine.crash_host = True
            try:
                write_atomic(files, TOP / "a", b"version 2!")
            except Crash:
                assert world.files("next").read(TOP / "a") in (b"version 1", b"version 2!")


def test_a_full_disk() -> None:
    with simulated_loop(Random(1)) as loop:
        world = make_world(loop, capacity=10)
        files = world.files()
        files.write_new(TOP / "a", b"12345678")
        assert files.free_bytes(TOP) == 2
        with pytest.raises(OSError, match="No space"):
            files.write_new(TOP / "b", b"123")
        assert files.size(TOP / "b") <= 2
        files.remove(TOP / "a")
        files.write_at(TOP / "b", 0, b"12345678")
