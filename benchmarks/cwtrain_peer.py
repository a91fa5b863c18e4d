"""Beside ``cwtrain`` (on PyPI, Apache-2.0, Python 3.12 or newer), where it is installed. Part of delta.py.

It writes a delta from two checkpoint directories (whole-tensor XOR, zstd level 1, Adler-32), and has a copy
that it moves by deltas through a journal, as a host's copy here is. Both do the same work from the same
files, in memory, without fsync, on one thread as far as they can be told; CPU of the process, least of the
rounds.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.harness import Row, say
from stitch_core.checkpoint import Checkpoint
from stitch_core.delta.encoder import DeltaEncoder
from stitch_core.files import PosixFiles
from stitch_core.host_checkpoint import HostCheckpoint
from stitch_core.lineage import Plan
from stitch_core.safetensors import Tensor
from stitch_core.testing.checkpoints import write_checkpoint
from stitch_core.testing.runs import RunBuilder


class WithoutSync(PosixFiles):
    def sync(self, path: Path) -> None:
        pass


FILES = WithoutSync()
TENSOR = 16 << 20


def rows(work: Path, size: int, rounds: int) -> Iterator[Row]:
    """No row where it cannot be imported, which is said."""
    try:
        delta, hotload = (importlib.import_module(f"cwtrain.hotload{name}") for name in (".delta", ""))
    except ImportError as error:
        say(f"no rows beside cwtrain: {error} (pip install cwtrain, with Python 3.12 or newer)")
        return
    layout = {f"layer.{i}": ("BF16", (TENSOR // 2,)) for i in range(size // TENSOR)}
    run = RunBuilder(work / "run", FILES, layout=layout)
    run.delta(density=0.01, encoding="sparse")
    after = work / "after"
    write_checkpoint(after, FILES, run.tensors[1], shards=2)
    run.tensors.clear()
    with mock.patch("os.fsync", return_value=None):
        yield from encode(run, after, work, delta, rounds)
        yield from apply(run, work, hotload, rounds)


def least(
    calls: dict[str, Callable[[], object]], before: dict[str, Callable[[], object]], rounds: int
) -> dict[str, float]:
    """CPU seconds of each call, in turns; ``before`` is what comes before each and is not timed."""
    found = dict.fromkeys(calls, math.inf)
    for _ in range(rounds):
        for name, call in calls.items():
            before[name]()
            start = time.process_time()
            call()
            found[name] = min(found[name], time.process_time() - start)
    return found


def encode(run: RunBuilder, after: Path, work: Path, delta: Any, rounds: int) -> Iterator[Row]:
    theirs, ours = work / "theirs", work / "ours"

    def stitch() -> None:
        encoder = DeltaEncoder.from_checkpoint(Checkpoint.open(run.boot, FILES), "sparse")
        new = Checkpoint.open(after, FILES)
        tensors = {name: Tensor(ref.dtype, ref.shape, new.read(name)) for name, ref in new.tensors.items()}
        encoder.encode(tensors, ours, FILES, number=1, base_number=0)

    def cwtrain() -> None:
        delta.write_delta(run.boot, after, theirs, version="000001", base_version="000000", workers=1)

    clean = {
        "stitch": lambda: FILES.remove_tree(ours),
        "cwtrain": lambda: FILES.remove_tree(theirs),
    }
    times = least({"stitch": stitch, "cwtrain": cwtrain}, clean, rounds)
    sizes = [sum(path.stat().st_size for path in found.iterdir()) for found in (ours, theirs)]
    what = "two checkpoints to a delta at 1 %, files to files"
    yield Row("CW1", f"x cwtrain's speed, {what}", times["cwtrain"] / times["stitch"], excludes="fsync")
    yield Row("CW2", "x cwtrain's bytes, that delta", sizes[0] / sizes[1])


def apply(run: RunBuilder, work: Path, hotload: Any, rounds: int) -> Iterator[Row]:
    v, root = run.versions, work / "mirror"
    kept: dict[str, Any] = {}

    def mirror() -> None:
        kept["mirror"] = hotload.WeightMirror.create(run.boot, root, version="000000", workers=1)

    def host() -> None:
        with contextlib.suppress(KeyError):
            kept.pop("host").close()
        shutil.rmtree(work / "host", ignore_errors=True)
        kept["host"] = HostCheckpoint(work / "host", FILES, workers=1)
        kept["host"].open()
        kept["host"].seed(run.boot, v[0])

    plan = Plan(v[1], v[0].state, None, (v[1],))
    times = least(
        {
            "stitch": lambda: kept["host"].apply(plan, run.directory_of),
            "cwtrain": lambda: kept["mirror"].apply_delta(work / "theirs"),
        },
        {"stitch": host, "cwtrain": mirror},
        rounds,
    )
    assert Checkpoint.open(kept["host"].directory, FILES).state() == v[1].state
    assert Checkpoint.open(root, FILES).state() == v[1].state
    kept["host"].close()
    yield Row(
        "CW3", "x cwtrain's speed, that delta into a copy on files, verified and journaled",
        times["cwtrain"] / times["stitch"], excludes="fsync",
    )  # fmt: skip
