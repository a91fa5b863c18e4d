"""Memory and disk that there is to take: limits of control groups, a tmpfs, and a refusal with numbers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stitch_core.replica.room import available_memory, free_room

GIB = 2**30


def machine(root: Path, cgroup: str, groups: dict[str, dict[str, str]], free: int = 64 * GIB) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {free >> 10} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for group, files in groups.items():
        (root / "sys/fs/cgroup" / group).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (root / "sys/fs/cgroup" / group / name).write_text(text)
    return root


def v2(limit: int | str, used: int, cache: int = 0) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n", "memory.current": f"{used}\n",
        "memory.stat": f"anon 5\ninactive_file {cache}\nactive_file 7\n",
    }  # fmt: skip


def test_the_machines_where_there_is_no_limit(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, "0::/\n", {})) == 64 * GIB
    assert available_memory() > 0


def test_the_tightest_group_up_to_the_root_counts(tmp_path: Path) -> None:
    groups = {"a": v2(8 * GIB, 6 * GIB), "a/b": v2("max", GIB), "a/c": v2(1, 1)}
    assert available_memory(machine(tmp_path, "0::/a/b\n", groups)) == 2 * GIB


def test_page_cache_that_a_limit_gives_back_is_free(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, "0::/a\n", {"a": v2(8 * GIB, 8 * GIB, 3 * GIB)})) == 3 * GIB


def test_a_limit_that_is_exceeded_leaves_nothing(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, "0::/a\n", {"a": v2(8 * GIB, 9 * GIB)})) == 0


def test_the_older_kind_of_groups(tmp_path: Path) -> None:
    group = {
        "memory.limit_in_bytes": f"{4 * GIB}\n", "memory.usage_in_bytes": f"{3 * GIB}\n",
        "memory.stat": f"total_inactive_file {GIB // 2}\n",
    }  # fmt: skip
    cgroup = "5:cpu,cpuacct:/x\n4:memory:/a\n"
    assert available_memory(machine(tmp_path, cgroup, {"memory/a": group})) == 3 * GIB // 2


def test_c42_a_mount_whose_name_is_not_utf8_or_has_a_tab_ended_staging(tmp_path: Path) -> None:
    root = machine(tmp_path / "root", "0::/\n", {}, free=1 << 20)
    place = tmp_path / "a\tb"
    place.mkdir()
    at = os.fsencode(tmp_path) + b"/a\\011b"
    lines = b"/dev/a / ext4 rw 0 0\nx /mnt/\xff\xfe zfs rw 0 0\nx " + at + b" tmpfs rw 0 0\n"
    (root / "proc/self/mounts").write_bytes(lines)
    assert free_room(place, root) == 1 << 20


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_tmpfs_has_no_more_than_the_memory(tmp_path: Path, kind: str) -> None:
    root = machine(tmp_path / "root", "0::/\n", {}, free=1 << 20)
    (root / "proc/self/mounts").write_text(f"/dev/a / ext4 rw 0 0\nx {tmp_path} {kind} rw 0 0\n")
    assert (free_room(tmp_path, root) == 1 << 20) == (kind == "tmpfs")
