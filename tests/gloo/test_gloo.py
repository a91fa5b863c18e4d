"""C06, C07, C27 and one outcome on every rank, over the group that the frameworks really use.

Four processes on two hosts. Whoever is killed, at whichever step: the others end in time and name the rank,
the head names only what is whole, and a restart goes on with no version lost or doubled.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stitch_core.chain import ChainReader
from stitch_core.checkpoint import Checkpoint
from stitch_core.host_checkpoint import HostCheckpoint
from stitch_core.ports import SystemClock
from stitch_core.replica.staging import Stager
from stitch_core.safetensors import Tensor
from stitch_core.state import state_digest
from stitch_core.stores.local import LocalStore
from stitch_core.testing.checkpoints import random_tensors, table_of, write_checkpoint
from tests.gloo.worker import SIZE, STEPS, trained
from tests.small_run import FILES, chain_of, inline

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = {
    "a": ("BF16", (16, 4)),
    "b": ("F32", (8,)),
    "c": ("F32", ()),
    "d": ("BF16", (3,)),
    "e": ("F32", (40,)),
}
ENDS_WITHIN = 10.0


@pytest.fixture(scope="module")
def forge() -> Iterator[subprocess.Popen[str]]:
    """The process that has imported torch, and forks ranks."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gloo.worker"], cwd=ROOT, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    yield process
    process.communicate(timeout=30)
    assert process.returncode == 0


@dataclass(frozen=True)
class Ended:
    """How the ranks of one start ended: exit codes, what each said, and seconds."""

    codes: list[int | None]
    said: list[list[dict[str, Any]]]
    seconds: float

    def all_said(self, key: str) -> list[list[Any]]:
        return [[line[key] for line in lines if key in line] for lines in self.said]


class Trainer:
    """A store, and a boot checkpoint on each of two hosts."""

    def __init__(self, root: Path, forge: subprocess.Popen[str]) -> None:
        self.root, self._forge, self._starts = root, forge, 0
        self.boot = random_tensors(np.random.default_rng(0), LAYOUT)
        for name in ("host0", "host1"):
            write_checkpoint(root / name / "boot", FILES, self.boot, shards=2)

    def start(self, first: int, steps: int, **more: Any) -> Ended:
        self._starts += 1
        name = f"start{self._starts}"
        scenario = {"root": str(self.root), "name": name, "first": first, "steps": steps, **more}
        assert self._forge.stdin
        assert self._forge.stdout
        began = time.monotonic()
        print(json.dumps(scenario), file=self._forge.stdin, flush=True)
        codes = json.loads(self._forge.stdout.readline())
        seconds = time.monotonic() - began
        said = [
            [json.loads(line) for line in (self.root / f"{name}-{rank}.jsonl").read_text().splitlines()]
            for rank in range(SIZE)
        ]
        return Ended(codes, said, seconds)

    def weights(self, step: int) -> dict[str, Tensor]:
        return {name: trained(name, tensor, step) for name, tensor in self.boot.items()}

    def check(self) -> list[tuple[int, int | None]]:
        """(number, step) of every version; each has its step's state, and the head can be rebuilt."""

        async def check() -> list[tuple[int, int | None]]:
            store = LocalStore(self.root / "store")
            chain = await chain_of(store, "r")
            for manifest in chain[1:]:
                assert manifest.step is not None
                assert manifest.state == state_digest(table_of(self.weights(manifest.step)))
            host = HostCheckpoint(self.root / "replica", FILES)
            stager = Stager(
                store, ChainReader(store), host, self.root / "host0/boot", files=FILES, clock=SystemClock(),
                rng=random.Random(0), run_blocking=inline, activity=lambda _: None,
            )  # fmt: skip
            try:
                await stager.stage(chain[-1])
                assert Checkpoint.open(host.directory, FILES).state() == chain[-1].state
            finally:
                host.close()
            return [(manifest.number, manifest.step) for manifest in chain]

        return asyncio.run(check())


@pytest.fixture
def trainer(tmp_path: Path, forge: subprocess.Popen[str]) -> Trainer:
    return Trainer(tmp_path, forge)


@pytest.mark.slow
@pytest.mark.parametrize("async_", [False, True])
def test_ranks_publish_together_and_fail_together(trainer: Trainer, async_: bool) -> None:
    ended = trainer.start(0, 3, async_=async_, broken=not async_)
    assert ended.codes == [0] * SIZE, ended.said
    assert ended.all_said("published") == [[1, 2, 3]] * SIZE
    assert trainer.check() == [(0, None), (1, 0), (2, 1), (3, 2)]
    files = [path.name for path in (trainer.root / "store/runs/r").glob("e*/weight_v000003/*")]
    assert len({name.partition("-of-")[0] for name in files if "rank" in name}) == SIZE
    for failed in [] if async_ else ended.all_said("failed"):
        assert len(failed) == 1
        assert failed[0].startswith("publishing weight_v000004 of run r (uploading) failed on 1 of 4 ranks")
        assert "rank 2: CheckpointError: " in failed[0], "the uploader of that host reads it"
        assert "cut short, no safetensors header in 3 bytes" in failed[0]


def kill(trainer: Trainer, rank: int, step: str, async_: bool) -> None:
    """Version 3 of 4 is the one in which ``rank`` dies."""
    ended = trainer.start(0, 4, async_=async_, kill=(rank, step, 3))
    others = [other for other in range(SIZE) if other != rank]
    assert ended.codes[rank] == -9, ended.said
    assert [ended.codes[other] for other in others] == [0] * 3, ended.said
    assert ended.seconds < ENDS_WITHIN
    for other in others:
        (error,) = ended.all_said("error")[other]
        assert f"rank {rank} is gone" in error, error
        if rank == 0 or step != "swapped":  # else it is missed at the next version
            where = {"listing": "listing", "upload": "uploading", "receipts": "uploading"}
            assert f"publishing weight_v000003 of run r ({where.get(step, 'moving the head')}): " in error
    moved = step == "swapped" or (rank != 0 and step in ("manifest", "swap"))  # rank 0 went on meanwhile
    before = trainer.check()
    if not async_:
        assert before == [(0, None), (1, 0), (2, 1), *([(3, 2)] if moved else [])]
    acknowledged = {
        number for published in ended.all_said("published") for number in published[:-1] if number
    } if not async_ else set()  # fmt: skip
    assert acknowledged <= {number for number, _ in before}

    again = trainer.start(before[-1][1] or 0, 3, async_=async_)
    assert again.codes == [0] * SIZE, again.said
    head = before[-1][0]
    # It goes on from the head's own weights, which have a number of its own as well.
    assert again.all_said("claimed") == [[head]] * SIZE
    assert again.all_said("published") == [[head + 1, head + 2, head + 3]] * SIZE
    after = trainer.check()
    assert after[: len(before)] == before
    assert [number for number, _ in after[len(before) :]] == [head + 1, head + 2, head + 3]


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_and_a_restart_goes_on(trainer: Trainer) -> None:
    kill(trainer, 2, "upload", async_=False)


OTHERS = [(1, "listing"), (1, "upload"), (3, "receipts"), (3, "manifest"), (3, "swapped")]
BEHIND = [(0, "upload"), (0, "swapped"), (2, "listing"), (2, "receipts"), (3, "manifest")]


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("rank", [0, 2])  # one on each host
def test_c06_a_rank_is_killed_at_each_step(trainer: Trainer, rank: int, step: str) -> None:
    kill(trainer, rank, step, async_=False)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "step"), OTHERS)
def test_c06_another_rank_of_the_host_is_killed(trainer: Trainer, rank: int, step: str) -> None:
    kill(trainer, rank, step, async_=False)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "step"), BEHIND)
def test_c06_a_rank_is_killed_behind_the_step(trainer: Trainer, rank: int, step: str) -> None:
    kill(trainer, rank, step, async_=True)
