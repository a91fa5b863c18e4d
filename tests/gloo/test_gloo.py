"""C27 and one outcome on every rank, over the group that the frameworks really use."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np

from stitch_core.stores.local import LocalStore
from stitch_core.testing.checkpoints import random_tensors, write_checkpoint
from tests.small_run import FILES, chain_of

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = {"a": ("BF16", (16, 4)), "b": ("F32", (8,)), "c": ("F32", ()), "d": ("BF16", (3,))}


def test_ranks_publish_together_and_fail_together(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "boot", FILES, random_tensors(np.random.default_rng(0), LAYOUT))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gloo.worker", str(tmp_path), str(rank), "2"],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    output = [process.communicate(timeout=120)[0] for process in ranks]
    for rank, text in enumerate(output):
        assert ranks[rank].returncode == 0, text
        assert "published [None, 1, 2]" in text
        assert "failed publishing weight_v000003 of run r (uploading) failed on 1 of 2 ranks; rank" in text
        assert "cut short, no safetensors header in 3 bytes" in text
    assert "rank 1 is gone" in output[0]
    chain = asyncio.run(chain_of(LocalStore(tmp_path / "store"), "r"))
    assert [(m.number, m.step) for m in chain] == [(0, None), (1, 0), (2, 1)]
    assert set(chain[1].representation.changed) == set(LAYOUT)
