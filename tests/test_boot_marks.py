"""C77: a change of a boot checkpoint shows in its marks, also if it was undone; reading does not show."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from stitch_core.checkpoint import CheckpointError, first_change, marks_of
from stitch_core.files import PosixFiles
from stitch_core.ports import FileMarks, Files
from stitch_core.testing.faults import FaultPlan, Faults
from stitch_core.testing.loop import simulated_loop
from stitch_core.testing.process import SimulatedProcess
from stitch_core.testing.sim_files import SimulatedMachine
from tests.small_run import tick

WEIGHTS = "model.safetensors"


class Cache:
    """A checkpoint as in Hugging Face's cache, ``models/base/snapshots/1``, whose files are links to blobs.

    ``directory`` is how an engine was told of it: by a link.
    """

    def __init__(self, files: Files, top: Path) -> None:
        self.files, self.top = files, top
        self.snapshot = top / "models" / "base" / "snapshots" / "1"
        self.blobs = self.snapshot.parents[1] / "blobs"
        self.directory = top / "current"
        for directory in (self.snapshot, self.blobs, top / "elsewhere"):
            files.make_dirs(directory)
        files.write_new(self.blobs / "a", b"weights 1")
        files.write_new(self.blobs / "b", b"weights 2")
        files.write_new(self.snapshot / "config.json", b"{}")
        files.symlink("../../blobs/a", self.snapshot / WEIGHTS)
        files.symlink("models/base/snapshots/1", self.directory)

    def marks(self) -> FileMarks:
        return marks_of(self.directory, self.files)

    def point(self, link: Path, target: str) -> None:
        """In one step, as ``ln -sfn`` and deployments do."""
        self.files.symlink(target, self.top / "new link")
        self.files.rename(self.top / "new link", link)


@pytest.fixture(params=["posix", "simulated"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "posix":
        yield Cache(PosixFiles(), tmp_path)
        return
    with simulated_loop(Random(1)) as loop:
        machine = SimulatedMachine("m", Faults(FaultPlan(), loop.random, loop.time))
        files = machine.files(SimulatedProcess(loop, "p"))
        files.make_dirs(Path("/top"))
        yield Cache(files, Path("/top"))


def overwritten(cache: Cache) -> None:
    """By bytes of the same length."""
    cache.files.write_at(cache.blobs / "a", 0, b"W")


def overwritten_and_back(cache: Cache) -> None:
    overwritten(cache)
    cache.files.write_at(cache.blobs / "a", 0, b"w")


def replaced(cache: Cache) -> None:
    cache.files.rename(cache.blobs / "b", cache.blobs / "a")


def pointed_elsewhere_and_back(cache: Cache) -> None:
    """The link to a blob."""
    cache.point(cache.snapshot / WEIGHTS, "../../blobs/b")
    cache.point(cache.snapshot / WEIGHTS, "../../blobs/a")


def deployed_and_rolled_back(cache: Cache) -> None:
    """The link to the directory."""
    cache.point(cache.directory, "elsewhere")
    cache.point(cache.directory, "models/base/snapshots/1")


def moved_away_and_back(cache: Cache) -> None:
    """The directory."""
    cache.files.rename(cache.snapshot, cache.top / "aside")
    cache.files.rename(cache.top / "aside", cache.snapshot)


def a_shard_more(cache: Cache) -> None:
    cache.files.write_new(cache.snapshot / "more.safetensors", b"")


def a_shard_less(cache: Cache) -> None:
    cache.files.remove(cache.snapshot / "config.json")


ALL = {"", WEIGHTS, "config.json"}
CHANGES: list[tuple[Callable[[Cache], None], set[str]]] = [
    (overwritten, {WEIGHTS}),
    (overwritten_and_back, {WEIGHTS}),
    (replaced, {WEIGHTS}),
    (pointed_elsewhere_and_back, {"", WEIGHTS}),
    (deployed_and_rolled_back, ALL),
    (moved_away_and_back, {""}),
    (a_shard_more, {"", "more.safetensors"}),
    (a_shard_less, {"", "config.json"}),
]


@pytest.mark.parametrize(("change", "names"), CHANGES)
def test_a_change_shows_with_the_name(
    cache: Cache, change: Callable[[Cache], None], names: set[str], tmp_path: Path
) -> None:
    before = cache.marks()
    assert first_change(before, cache.marks()) is None
    tick(tmp_path)
    change(cache)
    after = cache.marks()
    assert changed(before, after) == names
    # A file tells more than its directory.
    assert first_change(before, after) == min(names, key=lambda name: (not name, name))


def changed(before: FileMarks, after: FileMarks) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def test_a_write_shows_whatever_time_it_is_given(tmp_path: Path) -> None:
    """As ``touch -r`` and ``rsync --times`` do; only the kernel sets the time of the change."""
    cache = Cache(PosixFiles(), tmp_path)
    blob = cache.blobs / "a"
    before, status = cache.marks(), os.stat(blob)
    tick(tmp_path)
    overwritten(cache)
    os.utime(blob, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert os.stat(blob).st_mtime_ns == status.st_mtime_ns
    assert changed(before, cache.marks()) == {WEIGHTS}


def test_what_only_reads_changes_nothing(cache: Cache, tmp_path: Path) -> None:
    before = cache.marks()
    tick(tmp_path)
    assert cache.files.read(cache.directory / WEIGHTS) == b"weights 1"
    assert cache.files.list(cache.directory) == ["config.json", WEIGHTS]
    assert cache.marks() == before


def test_what_is_not_there(cache: Cache) -> None:
    files = cache.files
    with pytest.raises(CheckpointError):
        marks_of(cache.top / "no such", files)
    with pytest.raises(FileNotFoundError):
        files.mark(cache.top / "no such")
    files.symlink("no such", cache.snapshot / "dangling")
    before = cache.marks()
    assert "dangling" not in before
    files.write_new(cache.snapshot / "no such", b"")
    assert {"dangling", "no such"} <= changed(before, cache.marks())
    files.symlink("loop", cache.snapshot / "loop")
    with pytest.raises(OSError) as raised:  # noqa: PT011 - its number is checked
        files.mark(cache.snapshot / "loop")
    assert raised.value.errno == errno.ELOOP
    assert "loop" not in cache.marks()
