"""A host's copy whose process is really killed, at any moment, on a disk and in RAM."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stitch_core.checkpoint import Checkpoint
from stitch_core.files import PosixFiles
from stitch_core.host_checkpoint import HostCheckpoint
from stitch_core.lineage import Plan, Undo
from stitch_core.testing.runs import RunBuilder

FILES = PosixFiles()
SHM = Path("/dev/shm")
LAYOUT: dict[str, tuple[str, tuple[int, ...]]] = {
    **{f"layer.{i}": ("BF16", (1024, 700)) for i in range(6)},
    **{f"norm.{i}": ("F32", (999,)) for i in range(6)},
}
BATCH = 100_000
"""Bytes of a record of the journal: a plan takes several, which end within tensors."""


@pytest.fixture(params=["disk", "tmpfs"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access(SHM, os.W_OK):
        pytest.skip("platform: no tmpfs")
    path = Path(tempfile.mkdtemp(prefix="stitch-kills-", dir=SHM))
    yield path
    shutil.rmtree(path)


def build(root: Path) -> RunBuilder:
    """The same run whoever builds it: two sparse deltas, one XOR delta."""
    run = RunBuilder(root, FILES, layout=LAYOUT)
    for encoding in ("sparse", "sparse", "xor"):
        run.delta(density=0.02, encoding=encoding)
    return run


def plans(run: RunBuilder) -> tuple[Plan, Plan]:
    """From 0 to 3, and back."""
    v = run.versions
    there = Plan(v[3], v[0].state, None, tuple(v[1:]))
    return there, Plan(v[0], v[3].state, None, tuple(Undo(each) for each in reversed(v[1:])))


def move_for_ever(root: Path, seeds: Path) -> None:
    """What the child does."""
    run = build(seeds)
    host = HostCheckpoint(root / "host", FILES, batch_bytes=BATCH, part_bytes=1 << 16, workers=2)
    host.open()
    print("open", flush=True)
    while True:
        for plan in plans(run):
            if host.holding is None or host.holding.state == plan.base:
                host.apply(plan, run.directory_of)
                print(plan.target.number, flush=True)


@pytest.mark.slow
def test_kill_9_at_any_moment(root: Path) -> None:
    """Whatever was under way is finished from the journal, or the plan's files; nothing is ever torn."""
    run = build(root / "run")
    host = HostCheckpoint(root / "host", FILES, batch_bytes=BATCH, part_bytes=1 << 16, workers=2)
    host.open()
    host.seed(run.boot, run.versions[0])
    host.close()
    states = {manifest.state for manifest in run.versions}
    rng, interrupted, moved = random.Random(0), 0, 0
    command = [sys.executable, "-c", f"import sys; from tests.test_host_kills import *; "
               f"move_for_ever(Path({str(root)!r}), Path({str(root)!r}) / sys.argv[1])"]  # fmt: skip
    for i in range(8):
        child = subprocess.Popen(
            [*command, f"child{i}"], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])},
        )  # fmt: skip
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "open\n"
            for _ in range(rng.randrange(3)):
                moved += bool(child.stdout.readline())
            time.sleep(rng.uniform(0, 0.2))
        finally:
            child.kill()
            child.wait()
            child.stdout.close()
        shutil.rmtree(root / f"child{i}")
        host.open()
        if host.holding is None:
            assert host.interrupted is not None
            interrupted += 1
            plan = next(plan for plan in plans(run) if host.interrupted.fits(plan))
            host.apply(plan, run.directory_of)
        assert host.holding is not None
        assert Checkpoint.open(host.directory, FILES).state() == host.holding.state
        assert host.holding.state in states
        host.close()
    assert moved, "it never got as far as a whole apply"
