"""Scratch directories: one for each process, gone with it, and never taken from one that lives."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stitch_core import scratch
from stitch_core.files import PosixFiles
from stitch_core.scratch import MOST_SWEPT, OWNER, own_directory, scratch_parent, started, temporary_directory

ROOT = Path(__file__).parents[1]
DIES = """
import os, signal, sys
from pathlib import Path
from stitch_core.files import PosixFiles
from stitch_core.scratch import own_directory
with own_directory(Path(sys.argv[1]), PosixFiles()) as mine:
    (mine / "delta").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
COMES_AND_GOES = """
import sys
from pathlib import Path
from stitch_core.files import PosixFiles
from stitch_core.scratch import own_directory
for _ in range(100):
    with own_directory(Path(sys.argv[1]), PosixFiles()) as mine:
        (mine / "a").mkdir()
        (mine / "a" / "file").write_bytes(b"mine")
        assert (mine / "a" / "file").read_bytes() == b"mine"
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the temporary directories of this test are."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "TMPFS", tmp_path / "shm")
    return tmp_path


def left(parent: Path, name: str, pid: int, began: str | None, host: str | None = None) -> Path:
    """A directory as a process leaves it."""
    path = parent / name
    path.mkdir(parents=True)
    (path / OWNER).write_text(
        json.dumps({"host": host or socket.gethostname(), "pid": pid, "started": began})
    )
    (path / "host").mkdir()
    (path / "host" / "data").write_bytes(b"weights")
    return path


def gone_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_stalled_process_and_its_successor_do_not_share_files(tmp_path: Path) -> None:
    with own_directory(tmp_path, PosixFiles()) as stalled, own_directory(tmp_path, PosixFiles()) as successor:
        assert stalled != successor
        assert stalled.is_dir()
    assert not list(tmp_path.iterdir())


def test_what_a_dead_process_left_is_removed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], cwd=ROOT, timeout=30)
    assert done.returncode == -9
    assert len(list(tmp_path.iterdir())) == 1
    with own_directory(tmp_path, PosixFiles()) as mine:
        assert list(tmp_path.iterdir()) == [mine]


@pytest.mark.slow
def test_many_that_come_and_go_take_nothing_from_each_other(tmp_path: Path) -> None:
    """A directory that was made and not yet locked looked like one that was left."""
    command = [sys.executable, "-c", COMES_AND_GOES, str(tmp_path)]
    processes = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) for _ in range(6)]
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err.decode()
    assert not list(tmp_path.iterdir())


def test_what_a_thread_writes_after_ctrl_c_goes_with_the_process(place: Path) -> None:
    """The command had given its directory up, and a thread made it anew: it stayed for good."""
    gone = threading.Event()

    def work(directory: Path) -> None:
        gone.wait(30)
        (directory / "host").mkdir(parents=True)

    with ThreadPoolExecutor(1) as threads:
        with temporary_directory(PosixFiles()) as mine:
            writing = threads.submit(work, mine)
        gone.set()
        writing.result()
    assert mine.exists()
    scratch.remove_rest()
    assert not list(place.iterdir())


def test_a_temporary_directory_is_this_users_alone_and_removed(place: Path) -> None:
    with temporary_directory(PosixFiles()) as mine:
        assert mine.parent == place
        assert mine.stat().st_mode & 0o777 == 0o700
        (mine / "host").mkdir()
        with temporary_directory(PosixFiles()) as other:
            assert other != mine
        assert mine.is_dir()
    assert not list(place.iterdir())


def test_what_the_dead_left_in_ram_is_removed_before_the_room_there_is_looked_at(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = left(place / "shm", "stitch-dead", gone_pid(), "boot:1")
    rooms: list[bool] = []
    monkeypatch.setattr(scratch, "scratch_parent", lambda checkpoint: rooms.append(dead.exists()))
    with temporary_directory(PosixFiles(), place):
        pass
    assert rooms == [False]


def test_a_process_of_the_same_number_is_not_the_owner(place: Path) -> None:
    """Numbers come again after a while: a left directory whose number lives on would have stayed for good."""
    reused = left(place, "stitch-reused", os.getpid(), "another boot:1")
    with temporary_directory(PosixFiles()):
        assert not reused.exists()


def test_without_locks_that_hold_a_process_that_runs_keeps_its_directory(place: Path) -> None:
    """On some mounts everybody gets the lock."""
    living = left(place, "stitch-living", os.getpid(), started(os.getpid()))
    with temporary_directory(PosixFiles()):
        assert (living / "host" / "data").read_bytes() == b"weights"


def test_what_another_host_has_on_a_shared_mount_is_its_own(place: Path) -> None:
    """Its locks may not be seen here, and its processes are not."""
    other = left(place, "stitch-other", gone_pid(), "boot:1", host="another")
    with temporary_directory(PosixFiles()):
        assert (other / "host" / "data").read_bytes() == b"weights"


def test_a_dead_process_that_nobody_waited_for_is_dead(place: Path) -> None:
    """In a container whose first process reaps nobody, the killed ones stay in the table as zombies."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    began = started(process.pid)
    path = left(place, "stitch-zombie", process.pid, began)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert began is not None
    assert started(process.pid) is None
    with temporary_directory(PosixFiles()):
        assert not path.exists()
    process.wait()


def test_what_is_not_known_as_left_is_never_touched(place: Path) -> None:
    theirs = place / "stitch-of-somebody"  # a host checkpoint has a lock too
    theirs.mkdir()
    (theirs / "lock").write_bytes(b"")
    (place / "stitch-new").mkdir()
    target = left(place, "elsewhere", gone_pid(), "boot:1")
    (place / "stitch-link").symlink_to(target)
    (place / "stitch-file").write_bytes(b"x")
    before = sorted(place.rglob("*"))
    with temporary_directory(PosixFiles()):
        pass
    assert sorted(place.rglob("*")) == before


def test_a_start_removes_so_many_and_the_next_goes_on(place: Path) -> None:
    pid = gone_pid()
    for number in range(MOST_SWEPT + 3):
        left(place, f"stitch-{number:03}", pid, "boot:1")
    with temporary_directory(PosixFiles()):
        assert len(list(place.glob("stitch-[0-9][0-9][0-9]"))) == 3
    with temporary_directory(PosixFiles()):
        assert not list(place.glob("stitch-[0-9][0-9][0-9]"))


def test_a_sweep_that_is_cut_off_is_gone_on_with(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = left(place, "stitch-dead", gone_pid(), "boot:1")
    monkeypatch.setattr(
        PosixFiles, "remove_tree", lambda self, path: (_ for _ in ()).throw(OSError("cut off"))
    )
    scratch._sweep(place, "stitch-", PosixFiles())
    assert (dead / OWNER).exists()
    monkeypatch.undo()
    scratch._sweep(place, "stitch-", PosixFiles())
    assert not dead.exists()


def test_no_room_in_ram_means_the_default_place(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1 << 41)
    assert scratch_parent(tmp_path) is None
    assert scratch_parent(tmp_path / "missing") is None
