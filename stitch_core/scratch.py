"""Scratch directories: in RAM where there is room, one for each process, and gone when their process is.

A process that is killed cannot take its directory away, so the next one does. Whose a directory is says its
file ``.stitch-owner``: locked for as long as the process lives, it holds its host, number and start. It
gets this name only after it was locked, so there is no moment in which a new directory looks left.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .ports import Files

TMPFS = Path("/dev/shm")
PROC = Path("/proc")
OWN, TEMPORARY = "process-", "stitch-"
OWNER = ".stitch-owner"
ROOM_FOR_JOURNAL = 192 << 20
MOST_SWEPT, SWEEP_SECONDS = 32, 10.0
"""Of what dead processes left, so much is removed at a start; the next one goes on."""


def scratch_parent(checkpoint: Path) -> Path | None:
    """The parent for a temporary host checkpoint of ``checkpoint``'s size; None: the system's default."""
    try:
        size = sum(path.stat().st_size for path in checkpoint.iterdir() if path.is_file())
        # A full version is built beside the one that it replaces.
        if shutil.disk_usage(TMPFS).free >= 2 * size + ROOM_FOR_JOURNAL:
            return TMPFS
    except OSError:
        pass
    return None


_removed: set[Path] = set()
"""This process' own ones that are gone."""


def remove_rest() -> None:
    """Remove what threads have still written to scratch directories that were gone, as after Ctrl-C.

    To be called when they have ended. Never raises OSError.
    """
    for path in _removed:
        shutil.rmtree(path, ignore_errors=True)
    _removed.clear()


@contextlib.contextmanager
def own_directory(parent: Path, files: Files) -> Iterator[Path]:
    """A new directory below ``parent`` for this process alone, removed in the end.

    Processes may share ``parent``: a stalled one and its successor would otherwise write into each other's
    files. What dead ones have left there is removed.
    """
    files.make_dirs(parent)
    _sweep(parent, OWN, files)
    path = parent / (OWN + secrets.token_hex(8))
    files.make_dirs(path)
    with _owned(path, files):
        yield path


@contextlib.contextmanager
def temporary_directory(files: Files, checkpoint: Path | None = None) -> Iterator[Path]:
    """A new directory that only this user may look into, removed in the end.

    With ``checkpoint`` it is in RAM if what is built from that fits there, else where the system's are. What
    dead processes have left in either is removed first, since it may be what takes the room.
    """
    system = Path(tempfile.gettempdir())
    for parent in {system, TMPFS}:
        _sweep(parent, TEMPORARY, files)
    chosen = None if checkpoint is None else scratch_parent(checkpoint)
    path = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=chosen or system))
    with _owned(path, files):
        yield path


@contextlib.contextmanager
def _owned(path: Path, files: Files) -> Iterator[None]:
    """Hold the directory ``path``, which is new, and remove it in the end."""
    with contextlib.ExitStack() as held:
        held.callback(_give_up, path, files)
        new = path / f"{OWNER}.new"
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": started(os.getpid())}
        files.write_new(new, json.dumps(owner).encode())
        try:
            held.enter_context(files.lock(new, 0.0))
        except TimeoutError:
            raise
        except OSError:  # no locks here: nobody can tell when this process is gone
            files.remove(new)
        else:
            files.rename(new, path / OWNER)
        yield


def _sweep(parent: Path, prefix: str, files: Files) -> None:
    """Remove what processes that are gone have left below ``parent``. Never raises OSError."""
    try:
        names = [name for name in files.list(parent) if name.startswith(prefix)]
    except OSError:
        return
    deadline, removed = time.monotonic() + SWEEP_SECONDS, 0
    for path in (parent / name for name in names):
        if removed == MOST_SWEPT or time.monotonic() > deadline:
            return
        # What cannot be looked at or removed is another user's, or another process is removing it.
        with contextlib.suppress(OSError):
            if _may_be_left(path, files):
                # The lock comes second: it makes a file, also in what a living process is just removing.
                with files.lock(path / OWNER, 0.0):
                    _remove(path, files)
                    removed += 1


def _may_be_left(path: Path, files: Files) -> bool:
    """Whether it is a directory of this user's (no link to one) whose owner does not run here."""
    status = os.lstat(path)
    mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return mine and not _may_run(files.read(path / OWNER))


def _give_up(path: Path, files: Files) -> None:
    """Remove what this process owns, or leave it to ``remove_rest``, else to the next sweep.

    A thread may still be writing and renaming there, or, where only locks tell who lives, a sweeping process
    has made a file to lock.
    """
    _removed.add(path)
    for _ in range(2):
        with contextlib.suppress(OSError):
            _remove(path, files)
            return


def _remove(path: Path, files: Files) -> None:
    """The owner's file last: whatever is left when this process dies is still known as left."""
    with contextlib.suppress(FileNotFoundError):
        for name in files.list(path):
            if not name.startswith(OWNER):
                try:
                    files.remove(path / name)
                except IsADirectoryError:
                    files.remove_tree(path / name)
    files.remove_tree(path)


def _may_run(owner: bytes) -> bool:
    """Whether the process that wrote this runs here, or may run on another host.

    On some network mounts a lock holds on one host only, or not at all: then this is what tells.
    """
    try:
        value = json.loads(owner)
        host, pid, began = value["host"], int(value["pid"]), value["started"]
    except (ValueError, TypeError, KeyError):
        return False
    return host != socket.gethostname() or (began is not None and started(pid) == began)


def started(pid: int) -> str | None:
    """When process ``pid`` began, as no other of its number did; None if it is gone, or nothing tells.

    From proc(5): the boot's id, and the ticks since then.
    """
    try:
        # The name, in parentheses, may hold anything.
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except (OSError, ValueError):
        return None
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"
