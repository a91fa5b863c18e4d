"""How much memory a local server takes, from proc(5): the process that listens on a port, and all below."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
_LISTEN = "0A"


def listening_process(port: int) -> int | None:
    """The process that listens on TCP ``port`` of this machine; None if there is none that we may see."""
    inodes = {f"socket:[{inode}]" for inode in _listeners(port)}
    found: list[int] = []
    for process in _processes() if inodes else ():
        with contextlib.suppress(OSError):  # gone, or another user's
            descriptors = list((PROC / str(process) / "fd").iterdir())
            if any(_link(descriptor) in inodes for descriptor in descriptors):
                found.append(process)
    # A forked child may hold the socket too: the parent is the one whose parent does not.
    parents = _parents()
    return next((process for process in found if parents.get(process) not in found), None)


def process_tree(root: int) -> list[int]:
    """``root`` and all that descend from it, now."""
    children: dict[int, list[int]] = {}
    for process, parent in _parents().items():
        children.setdefault(parent, []).append(process)
    tree = [root]
    for process in tree:
        tree += children.get(process, [])
    return tree


def resident(processes: Iterable[int]) -> int:
    """Resident bytes in sum; what processes share, such as a mapped checkpoint on tmpfs, counts in each."""
    pages = 0
    for process in processes:
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages += int((PROC / str(process) / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _listeners(port: int) -> set[str]:
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found


def _processes() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]
    return []


def _parents() -> dict[int, int]:
    result = {}
    for process in _processes():
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name, in parentheses, may hold anything.
            result[process] = int((PROC / str(process) / "stat").read_text().rpartition(")")[2].split()[1])
    return result


def _link(path: Path) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""
