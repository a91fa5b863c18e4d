"""PosixFiles keeps the contract of ports.Files."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy
import pytest

from stitch_core.files import PosixFiles
from stitch_core.ports import Files, write_atomic

files: Files = PosixFiles()
pytestmark = pytest.mark.usefixtures("real_fsync")


def test_read_is_short_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "f"
    files.write_new(path, b"0123456789")
    assert files.read(path) == b"0123456789"
    assert files.read(path, 4) == b"456789"
    assert files.read(path, 4, 3) == b"456"
    assert files.read(path, 8, 2**50) == b"89"  # allocates what there is
    assert files.read(path, 10) == files.read(path, 99, 5) == files.read(path, 0, 0) == b""
    for offset, length in ((-1, None), (0, -1)):
        with pytest.raises(ValueError, match="cannot read"):
            files.read(path, offset, length)
    with pytest.raises(FileNotFoundError):
        files.read(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        files.read(tmp_path)


def test_write_new_refuses_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "f"
    files.write_new(path, memoryview(b"abcd").cast("I"))
    with pytest.raises(FileExistsError):
        files.write_new(path, b"other")
    assert files.read(path) == b"abcd"
    os.symlink(tmp_path / "target", tmp_path / "dangling")
    with pytest.raises(FileExistsError):
        files.write_new(tmp_path / "dangling", b"")
    assert not (tmp_path / "target").exists()


def test_writes_are_whole_when_the_kernel_takes_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:7], offset))
    data = bytes(range(256))
    files.write_new(tmp_path / "f", data)
    files.write_at(tmp_path / "f", 100, data)
    assert files.read(tmp_path / "f") == data[:100] + data


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was '[Errno 28] No space left on device', of one of several disks."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "there").write_bytes(b"x")
    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(os, "fsync", full)
    for fails in (
        lambda: files.write_new(tmp_path / "new", b"x"),
        lambda: files.write_at(tmp_path / "there", 0, b"x"),
        lambda: files.sync(tmp_path / "there"),
    ):
        with pytest.raises(OSError, match=r"\[Errno 28\].*: '.*/(new|there)'"):
            fails()


def test_write_at_overwrites_and_extends(tmp_path: Path) -> None:
    path = tmp_path / "f"
    files.write_new(path, b"")
    files.write_at(path, 0, b"0123")
    files.write_at(path, 1, b"ab")
    files.write_at(path, 4, b"45")
    files.write_at(path, 6, memoryview(numpy.zeros((0, 3))))
    assert files.read(path) == b"0ab345"
    with pytest.raises(ValueError, match="hole"):
        files.write_at(path, 7, b"x")
    with pytest.raises(FileNotFoundError):
        files.write_at(tmp_path / "missing", 0, b"x")


def test_sizes_and_existence(tmp_path: Path) -> None:
    files.write_new(tmp_path / "b", b"12")
    files.make_dirs(tmp_path / "a" / "x")
    files.make_dirs(tmp_path / "a" / "x")
    assert files.size(tmp_path / "b") == 2
    assert files.list(tmp_path) == ["a", "b"]
    assert files.exists(tmp_path / "a")
    assert not files.exists(tmp_path / "c")
    assert not files.exists(tmp_path / "b" / "below a file")
    with pytest.raises(IsADirectoryError):
        files.size(tmp_path / "a")
    with pytest.raises(OSError, match="too long") as error:
        files.exists(tmp_path / ("x" * 300))  # an error is not an absence
    assert error.value.errno == errno.ENAMETOOLONG
    assert files.free_bytes(tmp_path) > 0


def test_links_and_renames(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    files.write_new(one, b"one")
    files.link(one, two)
    with pytest.raises(FileExistsError):
        files.link(one, two)
    files.write_new(tmp_path / "3", b"three")
    files.rename(tmp_path / "3", two)
    assert files.read(one) == b"one"
    assert files.read(two) == b"three"
    files.symlink("1", tmp_path / "s")
    assert files.read(tmp_path / "s") == b"one"
    files.remove(tmp_path / "s")
    files.sync(one)
    files.sync(tmp_path)
    assert files.list(tmp_path) == ["1", "2"]


def test_remove_tree_never_follows_links(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    files.make_dirs(kept)
    files.write_new(kept / "f", b"")
    files.make_dirs(tmp_path / "tree" / "x")
    files.write_new(tmp_path / "tree" / "x" / "f", b"")
    files.symlink(str(kept), tmp_path / "tree" / "inside")
    files.symlink(str(kept), tmp_path / "itself")
    for path in ("tree", "itself", "missing"):
        files.remove_tree(tmp_path / path)
    assert files.list(tmp_path) == ["kept"]
    assert files.list(kept) == ["f"]


def test_write_atomic_replaces(tmp_path: Path) -> None:
    (tmp_path / ".marker.tmp").write_bytes(b"of a process that died")
    for data in (b"1", b"2"):
        write_atomic(files, tmp_path / "marker", data)
        assert files.read(tmp_path / "marker") == data
    assert files.list(tmp_path) == ["marker"]


def test_lock_excludes_threads_and_times_out(tmp_path: Path) -> None:
    path, order = tmp_path / "lock", []
    inside, enough = threading.Event(), threading.Event()

    def hold() -> None:
        with files.lock(path, 1):
            inside.set()
            enough.wait()
            time.sleep(0.05)
            order.append("held")

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    with pytest.raises(TimeoutError, match="locked by another"), files.lock(path, 0.02):
        pytest.fail("two hold the lock")
    enough.set()
    with files.lock(path, 60):
        order.append("next")
    thread.join()
    assert order == ["held", "next"]


def test_lock_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        f"import sys, time, pathlib; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from stitch_core.files import PosixFiles\n"
        f"with PosixFiles().lock(pathlib.Path({str(path)!r}), 1):\n"
        "    print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(TimeoutError), files.lock(path, 0):
            pytest.fail("two hold the lock")
        process.kill()
        process.wait()
        with files.lock(path, 1):
            pass
