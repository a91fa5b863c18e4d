"""Scratch directories: in RAM where there is room, and one for each process."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from .ports import Files

TMPFS = Path("/dev/shm")
OWN = "process-"
ROOM_FOR_JOURNAL = 192 << 20


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


@contextlib.contextmanager
def own_directory(parent: Path, files: Files) -> Iterator[Path]:
    """A new directory below ``parent`` for this process alone, removed in the end.

    Processes may share ``parent``: a stalled one and its successor would otherwise write into each other's
    files. What dead ones have left there is removed.
    """
    files.make_dirs(parent)
    for name in files.list(parent):
        if name.startswith(OWN):
            with contextlib.suppress(TimeoutError, OSError), files.lock(parent / name / "lock", 0.0):
                files.remove_tree(parent / name)
    path = parent / (OWN + secrets.token_hex(8))
    files.make_dirs(path)
    with files.lock(path / "lock", 0.0):
        try:
            yield path
        finally:
            files.remove_tree(path)
