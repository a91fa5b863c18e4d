"""Stages of a pipeline and experts on ranks of their own: Miles' real gather feeds Stitch's encoder.

Each published state is that of a Hugging Face checkpoint whose tensors were laid out over the ranks by other
code (`hf_load`), so what the ranks give back together has to be that checkpoint, to the bit.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from recipes.local.sglang_server import free_port
from recipes.miles.processes import World
from stitch_core.checkpoint import Checkpoint
from stitch_core.stores.local import LocalStore
from stitch_core.testing.checkpoints import random_tensors, write_checkpoint
from tests.small_run import FILES, chain_of

pytestmark = pytest.mark.real
LAYERS, HIDDEN, FFN, EXPERTS, INNER, VOCABULARY = 2, 64, 128, 4, 32, 256
STEPS = 2
Layout = dict[str, tuple[str, tuple[int, ...]]]
MIXTURE = [
    "--model-name", "qwen3moe", "--num-experts", str(EXPERTS), "--moe-ffn-hidden-size", str(INNER),
    "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall",
    # With tensor parallelism too Megatron wants sequence parallelism, which its layers for a CPU lack.
    "--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2",
    "--actor-num-gpus-per-node", "4",
]  # fmt: skip
OF_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": EXPERTS,
    "num_experts_per_tok": 2, "moe_intermediate_size": INNER, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
TIED = ["--pipeline-model-parallel-size", "2", "--actor-num-gpus-per-node", "2", "tied"]


def layout(experts: int, tied: bool) -> Layout:
    """A small Qwen3: names to (dtype, shape). ``experts``: of each layer, 0 for a dense one."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}{norm}_layernorm.weight": (HIDDEN,) for norm in ("input", "post_attention")}
        shapes |= {f"{at}self_attn.{part}_norm.weight": (16,) for part in "qk"}
        rows = {"q": 64, "k": 32, "v": 32, "o": HIDDEN}
        shapes |= {f"{at}self_attn.{part}_proj.weight": (count, 64) for part, count in rows.items()}
        networks = {f"{at}mlp.experts.{expert}.": INNER for expert in range(experts)} or {f"{at}mlp.": FFN}
        if experts:
            shapes[f"{at}mlp.gate.weight"] = (experts, HIDDEN)
        for which, inner in networks.items():
            shapes |= {f"{which}{part}_proj.weight": (inner, HIDDEN) for part in ("gate", "up")}
            shapes[f"{which}down_proj.weight"] = (HIDDEN, inner)
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def write_policies(root: Path, tensors: Layout, **changes: object) -> None:
    """``boot``, with Miles' tokenizer beside it, and what each step makes of it."""
    config = json.loads((root / "boot" / "config.json").read_text()) | changes
    (root / "boot" / "model.safetensors").unlink()
    rng = np.random.default_rng(0)
    for name in ("boot", *(f"policy-{step}" for step in range(STEPS))):
        write_checkpoint(root / name, FILES, random_tensors(rng, tensors), index=False)
    (root / "boot" / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("ranks", "tensors", "changes", "flags"),
    [
        (4, layout(EXPERTS, tied=False), OF_EXPERTS, MIXTURE),
        (2, layout(0, tied=True), {"tie_word_embeddings": True}, TIED),
    ],
    ids=["stages and experts", "stages with tied embeddings"],
)
def test_what_the_ranks_hold_is_published_as_one_policy(
    world: World, ranks: int, tensors: Layout, changes: dict[str, object], flags: list[str]
) -> None:
    root = world.root
    write_policies(root, tensors, **changes)
    actors = world.start(
        "actors", "-m", "tests.real.miles.layout_worker", str(root), str(ranks), str(free_port()),
        str(STEPS), *flags,
    )  # fmt: skip
    assert actors.wait() == 0, actors.text()[-6000:]
    for rank in range(ranks):
        assert f"rank {rank}: versions {list(range(1, STEPS + 2))}" in actors.text()
    versions = asyncio.run(chain_of(LocalStore(root / "store"), "math"))
    assert [(m.number, m.step) for m in versions] == [(0, None), (1, None), (2, 0), (3, 1)]
    # What the ranks gather at the start is the boot checkpoint, to the bit.
    names = ("boot", "boot", *(f"policy-{step}" for step in range(STEPS)))
    assert [m.state for m in versions] == [Checkpoint.open(root / name, FILES).state() for name in names]
    assert all(set(m.representation.changed) == set(tensors) for m in versions[2:])
