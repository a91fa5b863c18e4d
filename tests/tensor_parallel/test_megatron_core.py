"""megatron-core from PyPI on two tensor-parallel ranks: what they publish is what one process would write.

Promise 1: the published states are those of Hugging Face checkpoints put together from the ranks' shards by
other code, in numpy, with no group.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from stitch_core.chain import ChainReader
from stitch_core.checkpoint import Checkpoint
from stitch_core.host_checkpoint import HostCheckpoint
from stitch_core.manifest import Manifest
from stitch_core.ports import SystemClock
from stitch_core.replica.staging import Stager
from stitch_core.safetensors import Tensor
from stitch_core.stores.local import LocalStore
from stitch_core.testing.checkpoints import random_tensors, write_checkpoint
from tests.small_run import FILES, chain_of, inline
from tests.tensor_parallel.policy import FFN, HIDDEN, KV_CHANNELS, LAYERS, layout

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
RANKS, STEPS = 2, 3
QUERIES, GROUP = 2, 4 * KV_CHANNELS  # heads of a query group, and rows of its queries, key and value


def shards(root: Path, step: int) -> list[dict[str, np.ndarray]]:
    """Each rank's parameters, BF16 as 16-bit integers."""
    files = [root / "shards" / f"{step}-{rank}.pt" for rank in range(RANKS)]
    return [{n: v.view(torch.int16).numpy() for n, v in torch.load(file).items()} for file in files]


def joined(a: dict[str, np.ndarray], b: dict[str, np.ndarray], name: str, axis: int = 0) -> np.ndarray:
    return np.concatenate([a[name], b[name]], axis)


def from_shards(root: Path, step: int) -> dict[str, np.ndarray]:
    """The whole policy in Hugging Face's names, from what each rank held."""
    a, b = shards(root, step)
    whole = {
        "model.embed_tokens.weight": np.concatenate(
            [part["embedding.word_embeddings.weight"] for part in (a, b)]
        ),
        "lm_head.weight": np.concatenate([part["output_layer.weight"] for part in (a, b)]),
        "model.norm.weight": a["decoder.final_layernorm.weight"],
    }
    for layer in range(LAYERS):
        ours, at = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        qkv = joined(a, b, f"{ours}self_attention.linear_qkv.weight")
        groups = [qkv[start : start + GROUP] for start in range(0, len(qkv), GROUP)]
        cut = QUERIES * KV_CHANNELS
        fc1 = [part[f"{ours}mlp.linear_fc1.weight"] for part in (a, b)]
        half = FFN // RANKS
        whole |= {
            f"{at}self_attn.q_proj.weight": np.concatenate([g[:cut] for g in groups]),
            f"{at}self_attn.k_proj.weight": np.concatenate([g[cut : cut + KV_CHANNELS] for g in groups]),
            f"{at}self_attn.v_proj.weight": np.concatenate([g[cut + KV_CHANNELS :] for g in groups]),
            f"{at}mlp.gate_proj.weight": np.concatenate([part[:half] for part in fc1]),
            f"{at}mlp.up_proj.weight": np.concatenate([part[half:] for part in fc1]),
            f"{at}self_attn.o_proj.weight": joined(a, b, f"{ours}self_attention.linear_proj.weight", axis=1),
            f"{at}mlp.down_proj.weight": joined(a, b, f"{ours}mlp.linear_fc2.weight", axis=1),
        }
        norms = {
            "input_layernorm": "input_layernorm",
            "pre_mlp_layernorm": "post_attention_layernorm",
            "self_attention.q_layernorm": "self_attn.q_norm",
            "self_attention.k_layernorm": "self_attn.k_norm",
        }
        for name, theirs in norms.items():
            assert np.array_equal(a[f"{ours}{name}.weight"], b[f"{ours}{name}.weight"])
            whole[f"{at}{theirs}.weight"] = a[f"{ours}{name}.weight"]
    return whole


def rebuilt(root: Path, manifest: Manifest) -> dict[str, bytes]:
    """A version's tensors, from the boot checkpoint and the store alone."""
    store, host = LocalStore(root / "store"), HostCheckpoint(root / f"host-{manifest.number}", FILES)
    stager = Stager(
        store, ChainReader(store), host, root / "boot", files=FILES, clock=SystemClock(),
        rng=random.Random(0), run_blocking=inline, activity=lambda _: None,
    )  # fmt: skip
    asyncio.run(stager.stage(manifest))
    checkpoint = Checkpoint.open(host.directory, FILES)
    try:
        return {name: checkpoint.read(name) for name in checkpoint.tensors}
    finally:
        host.close()


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
        # What was gathered at start is version 0, to the bit: it is not published again.
        assert "published [None, 1, 2, 3]" in text
    chain = asyncio.run(chain_of(LocalStore(tmp_path / "store"), "r"))
    assert [(m.number, m.step) for m in chain] == [(0, None), (1, 0), (2, 1), (3, 2)]
    assert len({m.state for m in chain}) == 4
    for manifest in chain[1:]:
        whole = from_shards(tmp_path, manifest.number)
        tensors = {n: Tensor("BF16", v.shape, np.ascontiguousarray(v).tobytes()) for n, v in whole.items()}
        alone = tmp_path / f"alone-{manifest.number}"
        write_checkpoint(alone, FILES, tensors, index=False)
        assert Checkpoint.open(alone, FILES).state() == manifest.state
        assert set(manifest.representation.changed) == set(layout())
    assert rebuilt(tmp_path, chain[3]) == {name: bytes(tensor.data) for name, tensor in tensors.items()}
    assert tensors["lm_head.weight"].shape == (256, HIDDEN)
