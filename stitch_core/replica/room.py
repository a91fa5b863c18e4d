"""How much room there is: memory, of the machine and of this process's control groups, and disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..mounts import mount_kind

V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be allocated now without pushing others out; ``root``: where proc and sys are.

    Sources: MemAvailable of proc_meminfo(5); memory.max, memory.current and inactive_file, which is page
    cache that a limit gives back first, of cgroups(7), every group up to the root.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    (free,) = (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return max(0, min(free, *_groups(root), free))


def _groups(root: Path) -> Iterator[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            base, names = root / "sys/fs/cgroup", V2
        elif "memory" in kinds.split(","):
            base, names = root / "sys/fs/cgroup/memory", V1
        else:
            continue
        group = base / path.lstrip("/")
        while group == base or base in group.parents:
            yield from _headroom(group, *names)
            group = group.parent


def _headroom(group: Path, limit: str, usage: str, cache: str) -> Iterator[int]:
    try:
        most = (group / limit).read_text().strip()
        used = int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:  # the root group has no limit; in a container outer groups are not shown
        return
    if most != "max":
        yield int(most) - used + int(stat.get(cache, 0))


def free_room(path: Path, root: Path = Path("/")) -> int:
    """Bytes that can be written below ``path``: no more than the memory, where that is a tmpfs."""
    status = os.statvfs(path)
    free, kind = status.f_bavail * status.f_frsize, mount_kind(path, root / "proc/self/mounts")
    return min(free, available_memory(root)) if kind in ("tmpfs", "ramfs") else free


def gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
