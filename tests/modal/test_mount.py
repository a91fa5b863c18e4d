"""The mount between the threads of a process: uses, reloads and commits, on a handle that a test holds up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from stitch_core.ports import Unavailable
from stitch_modal.mount import Mount, MountedFiles


class Volume:
    """Reloads and commits take until ``go`` is set; ``errors`` are raised first."""

    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        self.calls: list[str] = []
        self.errors: list[Exception] = []

    def reload(self) -> None:
        self._call("reload")

    def commit(self) -> None:
        self._call("commit")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.errors:
            raise self.errors.pop(0)
        self.began.set()
        assert self.go.wait(10)


@pytest.fixture
def volume() -> Volume:
    return Volume()


@pytest.fixture
def files(volume: Volume, tmp_path: Path) -> MountedFiles:
    (tmp_path / "k").write_bytes(b"data")
    return MountedFiles(Mount(str(tmp_path), volume, deadline=5.0, sleep=lambda seconds: None), "")


@pytest.fixture
def start() -> Iterator[Callable[..., Future[object]]]:
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


def waits(*calls: Future[object]) -> bool:
    time.sleep(0.05)
    return not any(call.done() for call in calls)


@pytest.mark.parametrize("what", ["refresh", "commit"])
def test_nothing_is_used_while_it_may_look_empty(
    files: MountedFiles, volume: Volume, start: Callable[..., Future[object]], what: str
) -> None:
    away = start(files.refresh, 0.0) if what == "refresh" else start(files.commit)
    assert volume.began.wait(5)
    uses = [start(files.read, "k"), start(files.size, "k"), start(files.names, ""), start(files.walk, ""),
            start(files.write, "new", b"x"), start(files.remove, "none")]  # fmt: skip
    assert waits(away, *uses)
    volume.go.set()
    assert [use.result(5) for use in uses[:2]] == [b"data", 4]
    away.result(5)


def test_a_use_holds_up_reloads_and_they_hold_up_new_uses(
    files: MountedFiles, volume: Volume, start: Callable[..., Future[object]]
) -> None:
    volume.go.set()
    with files._mount.using():
        reload = start(files.refresh, 0.0)
        assert waits(reload)
        late = start(files.read, "k")
        assert waits(reload, late)
        assert volume.calls == []
    assert late.result(5) == b"data"
    reload.result(5)


def test_a_use_without_end(tmp_path: Path, volume: Volume) -> None:
    mount = Mount(str(tmp_path), volume, deadline=0.05)
    with mount.using(), pytest.raises(Unavailable, match="this process has used the mount"):
        mount.reload(0.0)
    with pytest.raises(Unavailable, match="a reload or commit has not ended"), mount._gate.alone(1.0):  # noqa: SIM117
        with mount.using():
            pass


def test_a_commit_is_of_all_that_was_written_before_it_began(
    files: MountedFiles, volume: Volume, start: Callable[..., Future[object]]
) -> None:
    first = start(files.commit)
    assert volume.began.wait(5)
    # These may have written since it began: it is not theirs.
    others = [start(files.commit) for _ in range(5)]
    assert waits(first, *others)
    volume.go.set()
    for call in (first, *others):
        call.result(5)
    assert volume.calls == ["commit"] * 2


def test_who_joined_a_commit_that_fails_is_told(
    files: MountedFiles, volume: Volume, start: Callable[..., Future[object]]
) -> None:
    first = start(files.commit)
    assert volume.began.wait(5)
    others = [start(files.commit) for _ in range(3)]
    assert waits(first, *others)
    volume.errors = [OSError("no way to the server")]
    volume.go.set()
    first.result(5)
    for other in others:
        with pytest.raises(Unavailable, match="no way to the server"):
            other.result(5)
    files.commit()
    assert volume.calls == ["commit"] * 3


def test_what_others_have_open_is_waited_for_and_named(files: MountedFiles, volume: Volume) -> None:
    volume.go.set()
    volume.errors = [RuntimeError("there are open files") for _ in range(3)]
    files.refresh(0.0)
    assert volume.calls == ["reload"] * 4
    ticks = iter(range(10**6))
    impatient = Mount(
        files.root, volume, monotonic=lambda: next(ticks), sleep=lambda seconds: None, deadline=9
    )
    volume.errors = [RuntimeError("path log is open") for _ in range(20)]
    with pytest.raises(Unavailable, match="path log is open; close what is open below it"):
        impatient.reload(0.0)


def test_reloads_that_meet_are_one(
    files: MountedFiles, volume: Volume, start: Callable[..., Future[object]]
) -> None:
    calls = [start(files.refresh, 1.0) for _ in range(4)]
    assert volume.began.wait(5)
    volume.go.set()
    for call in calls:
        call.result(5)
    assert volume.calls == ["reload"]
