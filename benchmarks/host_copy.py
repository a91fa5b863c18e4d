"""A host's copy of a model of which one tensor is nine tenths: threads, fsync, hashing. Part of delta.py.

Wall clock, in turns and in one run, least of the rounds: other work on the machine can only add. The copy
lies in memory, and for fsync in the temporary directory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.harness import Row, at_most, interleaved, say
from stitch_core.checkpoint import Checkpoint
from stitch_core.files import PosixFiles
from stitch_core.host_checkpoint import HostCheckpoint
from stitch_core.in_place import BATCH_SHARE
from stitch_core.lineage import Plan, Undo
from stitch_core.parallel import default_workers
from stitch_core.testing.runs import RunBuilder


class WithoutSync(PosixFiles):
    def sync(self, path: Path) -> None:
        pass


def rows(memory: Path, size: int, rounds: int) -> Iterator[Row]:
    """``memory`` is a directory in RAM, ``size`` the bytes of the model."""
    large = size * 9 // 20
    layout = {
        "embed": ("BF16", (large,)),
        **{f"layer.{i}": ("BF16", (size // 320,)) for i in range(16)},
    }
    run = RunBuilder(memory / "copied", PosixFiles(), layout=layout)
    run.delta(density=0.01, encoding="sparse")
    run.tensors.clear()
    yield from threads(run, memory, rounds)
    yield from hashing(run, rounds)
    disk = Path(tempfile.mkdtemp(prefix="stitch-copy-"))
    try:
        yield from fsync(run, disk, rounds, size)
    finally:
        shutil.rmtree(disk)


def opened(root: Path, run: RunBuilder, files: PosixFiles, workers: int) -> HostCheckpoint:
    host = HostCheckpoint(root, files, workers=workers)
    host.open()
    host.seed(run.boot, run.versions[0])
    return host


def there_and_back(host: HostCheckpoint, run: RunBuilder) -> None:
    v = run.versions
    host.apply(Plan(v[1], v[0].state, None, (v[1],)), run.directory_of)
    host.apply(Plan(v[0], v[1].state, None, (Undo(v[1]),)), run.directory_of)


def threads(run: RunBuilder, memory: Path, rounds: int) -> Iterator[Row]:
    many = default_workers()
    hosts = {count: opened(memory / f"copy-{count}", run, PosixFiles(), count) for count in {1, many}}
    times = interleaved(
        {str(count): partial(there_and_back, host, run) for count, host in hosts.items()}, rounds
    )
    state = {Checkpoint.open(host.directory, host.files).state() for host in hosts.values()}
    assert state == {run.versions[0].state}
    for host in hosts.values():
        host.close()
        shutil.rmtree(host.root)
    what = f"x as fast: a sparse delta into one large tensor by {many} threads, beside one thread"
    yield Row("H1", what, min(times["1"]) / min(times[str(many)]), excludes="the download")


def hashing(run: RunBuilder, rounds: int) -> Iterator[Row]:
    """As at the start of a process. The large tensor is one thread's, so others are as large together."""
    many = default_workers()
    layout = {f"layer.{i}": ("BF16", (8 << 20,)) for i in range(8)}
    other = RunBuilder(run.root.parent / "even", PosixFiles(), layout=layout)
    checkpoint = Checkpoint.open(other.boot, PosixFiles())
    assert checkpoint.state(1) == checkpoint.state(many)
    sides = {str(count): partial(checkpoint.table, count) for count in {1, many}}
    times = interleaved(sides, 8 * rounds)
    what = f"x as fast: hashing a checkpoint by {many} threads, beside one thread"
    yield Row("H2", what, min(times["1"]) / min(times[str(many)]))


def fsync(run: RunBuilder, disk: Path, rounds: int, size: int) -> Iterator[Row]:
    many = default_workers()
    sides: dict[str, PosixFiles] = {"durable": PosixFiles(), "not": WithoutSync()}
    hosts = {name: opened(disk / name, run, files, many) for name, files in sides.items()}
    os.sync()
    times = interleaved({name: partial(there_and_back, host, run) for name, host in hosts.items()}, rounds)
    journal = max((host.root / "journal").stat().st_size for host in hosts.values())
    for host in hosts.values():
        host.close()
    seconds = {name: min(values) / 2 for name, values in times.items()}
    say(
        f"{size / 2**20:.0f} MiB on disk: a version takes {seconds['durable']:.2f} s, without fsync "
        f"{seconds['not']:.2f} s; the journal had {100 * journal / size:.2f} % of the model"
    )
    yield Row(
        "H3", "x the time: a version applied durably on disk, beside without fsync (every page changes)",
        min(times["durable"]) / min(times["not"]),
    )  # fmt: skip
    limit = 100 * max(1 / BATCH_SHARE, (64 << 20) / size)
    yield at_most("H4", "% of the model's bytes, the journal's largest size", 100 * journal / size, limit)
