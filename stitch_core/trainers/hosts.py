"""What is on a rank's host: which that is, what others left there, whether two looks saw the same file."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from ..delta.wire import DeltaError
from ..ports import Files

VERSION_DIRECTORY = re.compile(r"weight_v([0-9]{6,18})\Z")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Mark = tuple[int, ...]
"""Inode, size and times of the last changes, equal for one file that hosts share.

Unlike ``Files.mark`` it has nothing that each host numbers by itself.
"""


def clear_versions(directory: Path, files: Files) -> None:
    """Remove all versions' directories from where a framework writes them; it need not be there."""
    for name in files.list(directory) if files.exists(directory) else []:
        if VERSION_DIRECTORY.match(name):
            files.remove_tree(directory / name)


def host_of(directory: Path) -> str:
    """Names the host that ``directory`` is on: ranks with one name see one disk there."""
    status = os.stat(directory)
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    # Containers of one machine may mount different disks under one path: the inode tells them apart.
    return f"{socket.gethostname()} {boot} {status.st_dev}:{status.st_ino}"


@contextlib.contextmanager
def naming_host() -> Iterator[None]:
    """A DeltaError of what was read here says on which host that is."""
    try:
        yield
    except DeltaError as error:
        raise DeltaError(f"on host {socket.gethostname()}: {error}") from error


def mark_of(file: Path) -> Mark:
    """The mark of a file, symbolic links followed. Raises OSError."""
    status = os.stat(file)
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
