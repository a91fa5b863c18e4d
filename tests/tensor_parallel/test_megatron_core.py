"""megatron-core from PyPI on two tensor-parallel ranks: what they publish is what one process would write.

Promise 1: the published states are those of Hugging Face checkpoints put together from the ranks' shards by
other code, in numpy, with no group.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from stitch_core.checkpoint import Checkpoint
from stitch_core.safetensors import Tensor
from stitch_core.stores.local import LocalStore
from stitch_core.testing.checkpoints import random_tensors, write_checkpoint
from tests.rebuild import rebuilt
from tests.small_run import FILES, chain_of
from tests.tensor_parallel.policy import HIDDEN, from_shards, layout

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
RANKS, STEPS = 2, 3


def shards(root: Path, step: int) -> list[dict[str, np.ndarray]]:
    """Each rank's parameters, BF16 as 16-bit integers."""
    files = [root / "shards" / f"{step}-{rank}.pt" for rank in range(RANKS)]
    return [{n: v.view(torch.int16).numpy() for n, v in torch.load(file).items()} for file in files]


def test_two_ranks_publish_the_checkpoint_that_one_process_writes(tmp_path: Path) -> None:
    boot = random_tensors(np.random.default_rng(0), layout())
    write_checkpoint(tmp_path / "boot", FILES, boot, index=False)
    (tmp_path / "shards").mkdir()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.tensor_parallel.worker", str(tmp_path), str(rank),
             str(RANKS), str(STEPS)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    output = [process.communicate(timeout=300)[0] for process in ranks]
    for rank, text in enumerate(output):
        assert ranks[rank].returncode == 0, text
        assert "published [1, 2, 3, 4]" in text
    chain = asyncio.run(chain_of(LocalStore(tmp_path / "store"), "r"))
    assert [(m.number, m.step) for m in chain] == [(0, None), (1, None), (2, 0), (3, 1), (4, 2)]
    # What was gathered at start is version 0, to the bit: version 1 changes no tensor.
    assert (chain[1].state, dict(chain[1].representation.changed)) == (chain[0].state, {})
    assert len({m.state for m in chain}) == 4
    for manifest in chain[2:]:
        assert manifest.step is not None
        whole = from_shards(shards(tmp_path, manifest.step + 1))
        tensors = {n: Tensor("BF16", v.shape, np.ascontiguousarray(v).tobytes()) for n, v in whole.items()}
        alone = tmp_path / f"alone-{manifest.number}"
        write_checkpoint(alone, FILES, tensors, index=False)
        assert Checkpoint.open(alone, FILES).state() == manifest.state
        assert set(manifest.representation.changed) == set(layout())
    assert rebuilt(tmp_path, chain[4]) == {name: bytes(tensor.data) for name, tensor in tensors.items()}
    assert tensors["lm_head.weight"].shape == (256, HIDDEN)
