"""Every recipe passes; each rule finds what it is there for, and names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stitch_core.cli.main import main
from stitch_recipes import catalogue
from stitch_recipes.check import problems
from stitch_recipes.footprint import memory_gib, needed
from stitch_recipes.schema import Recipe


def changed(name: str, path: str, value: Any) -> Recipe:
    """A recipe with one field replaced; ``None`` removes it."""
    tree = catalogue.load(name).model_dump()
    *above, last = path.split("/")
    part = tree
    for step in above:
        part = part[step]
    if value is None:
        del part[last]
    else:
        part[last] = value
    return Recipe.model_validate(tree)


LARGE = ("kimi-k2.6/nvfp4",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in LARGE else ()) for n in catalogue.names()]
)
def test_a_recipe_has_no_problems(name: str) -> None:
    assert problems(catalogue.load(name)) == []


AIR, FLASH, GLM, GLM8, NVFP4, K3, QWEN = (
    "glm-4.5-air/fp8", "glm-4.7-flash/code", "glm-5.2/nvfp4", "glm-5.2/fp8", "qwen3-30b-a3b/nvfp4",
    "kimi-k3/mxfp4-serve", "qwen3-235b-a22b/slime",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "path", "value", "message"),
    [
        (AIR, "engine/flags/mem-fraction-statik", 0.7, "engine.flags.mem-fraction-statik: sglang 0.5.23 has"),
        (AIR, "engine/flags/page-size", "much", "engine.flags.page-size: 'much' is no int"),
        (AIR, "engine/flags/kv-cache-dtype", "fp3", "engine.flags.kv-cache-dtype: 'fp3' is none of"),
        (AIR, "engine/flags/trust-remote-code", "yes", "engine.flags.trust-remote-code: it takes no value"),
        (AIR, "engine/flags/speculative-algorithm", "EAGLE", "engine.flags: the plugin refuses"),
        (AIR, "engine/flags/tp-size", 8, "engine.flags.tp-size: it follows from"),
        (AIR, "engine/release", "0.4.0", "engine.release: no flags of sglang 0.4.0 are known"),
        (AIR, "engine/memory_limit_gib", 100, "engine.memory_request_gib: 320, above its limit"),
        (
            K3,
            "engine/memory_request_gib",
            1024,
            "engine.memory_request_gib: 1024, but one replica takes 1,738",
        ),
        (AIR, "engine/memory_request_gib", 512, "engine.memory_request_gib: 512, but one replica takes 262"),
        (K3, "engine/disk_gib", 512, "engine.disk_gib: 512 GiB, but canonical"),
        (K3, "engine/gpus", 4, "engine.gpus: 4, but the image's size is known for 8 ranks"),
        (AIR, "trainer/revision", "main", "trainer.revision: no flags of miles main are known"),
        (AIR, "trainer/revision", "31f1ca961", "trainer.revision: 31f1ca961: a server gives a commit by all"),
        (AIR, "trainer/flags/tensor-model-parallel-size", 0, "trainer.flags: parallel sizes are at least 1"),
        (AIR, "trainer/environment/PYTHONPATH", "/x", "trainer.environment.PYTHONPATH: it follows from"),
        (AIR, "trainer/data", {}, "trainer.data: flags name {data}/dapo-math-17k/dapo-math-17k.jsonl"),
        (AIR, "trainer/flags/prompt-data", "/x", "trainer.data.dapo-math-17k/dapo-math-17k.jsonl: no flag"),
        (FLASH, "trainer/environment/AGENT_SERVER_URL", "x", "trainer.asks.AGENT_SERVER_URL: trainer.env"),
        (
            AIR,
            "checkpoints/fp8-block/prepared/command",
            "x {source}",
            "checkpoints.fp8-block.prepared.command",
        ),
        (
            AIR,
            "engine/gpus",
            4,
            "engine.gpus: 4 parts of model.layers.N.mlp.gate_proj.weight, of 10944, are no",
        ),
        (AIR, "checkpoints/fp8-block/group_size", None, "engine.gpus: 2 parts of"),
        (
            QWEN,
            "engine/gpus",
            8,
            "engine.gpus: 8 parts of model.layers.N.mlp.experts.N.gate_proj.weight, of 1536",
        ),
        (AIR, "trainer/model_script", "glm9", "trainer.model_script: miles 31f1ca961 has no glm9"),
        (AIR, "trainer/flags/rollout-external", True, "trainer.flags.rollout-external: it follows from"),
        (AIR, "trainer/flags/expert-model-parallel-size", 6, "trainer.flags.expert-model-parallel-size: 4 x"),
        (AIR, "trainer/nodes", 3, "trainer.flags.expert-model-parallel-size"),
        (AIR, "trainer/flags/global-batch-size", 48, "trainer.flags.global-batch-size: 64 samples a rollout"),
        (
            AIR,
            "trainer/flags/decoder-last-pipeline-num-layers",
            11,
            "trainer.flags.pipeline-model-parallel-size:",
        ),
        (FLASH, "trainer/flags/skip-actor-forward-only", True, "trainer.flags.skip-actor-forward-only:"),
        (AIR, "versions/max_staleness", 4, "versions.max_staleness: only Miles' --fully-async"),
        (FLASH, "versions/max_staleness", 1, "versions.max_staleness: 1, but answers may start 1"),
        (FLASH, "versions/lag", 0, "versions.lag: 0 with --fully-async"),
        (FLASH, "versions/step_seconds", 1.0, "versions.anchor_every: a replica joins in 62 s"),
        (AIR, "versions/save_every", None, "versions.save_every: nothing is saved"),
        (AIR, "versions/anchor_every", None, "versions.anchor_every: without fulls"),
        (GLM, "engine/environment/FLASHINFER_NVFP4_4OVER6_ERR_MODE", "MAE", "NVFP4_4OVER6_ERR_MODE: the"),
        (NVFP4, "trainer/flags/num-layers-at-end-in-bf16", 1, "trainer.flags.num-layers-at-end-in-bf16: 1,"),
        (NVFP4, "trainer/flags/megatron-to-hf-mode", "bridge", "trainer.flags.megatron-to-hf-mode: a model"),
        (GLM8, "serve", "fp8", "checkpoints.fp8.not_quantized: Miles exports the index's wk in BF16"),
        (
            GLM8,
            "trainer/environment",
            {},
            "trainer.environment.SGLANG_ENABLE_JIT_DEEPGEMM: it has to be 0 on B",
        ),
        (AIR, "unknown", {}, "checkpoints.fp8-block.image_gb: left out"),
        (K3, "unknown", {"checkpoints.mxfp4.image_gb": "why"}, "unknown.checkpoints.mxfp4.image_gb: the"),
        (K3, "unknown", {"engine.colour": "why"}, "unknown.engine.colour: there is no such field"),
        (AIR, "serve", "fp4", "serve, trainer.checkpoint: there is no checkpoints.fp4"),
        (AIR, "checkpoints/fp8-block/prepared", None, "checkpoints.fp8-block: it needs a source"),
    ],
)
def test_what_is_wrong_is_found_and_named(name: str, path: str, value: Any, message: str) -> None:
    found = problems(changed(name, path, value))
    assert any(problem.startswith(message) for problem in found), found


def test_a_misspelt_flag_is_told_with_its_nearest() -> None:
    (problem,) = problems(changed(AIR, "engine/flags/mem-fraction-statik", 0.7))
    assert problem.endswith("has no --mem-fraction-statik, did you mean --mem-fraction-static?")


def test_a_host_that_cannot_hold_checkpoint_and_images_is_told_both_numbers() -> None:
    tree = catalogue.load(K3).model_dump()
    tree["engine"] |= {"canonical_on": "memory", "memory_limit_gib": 2048}
    problem, request = problems(Recipe.model_validate(tree))
    assert request.startswith("engine.memory_request_gib: 1792, but one replica takes 3,221 GiB")
    assert "its host would have no room for what it certainly uses" in request
    assert problem.startswith(
        "engine.memory_limit_gib: 2048 GiB, but canonical checkpoint and images take 3,029"
    )


def test_kimi_k3_needs_the_memory_that_was_published() -> None:
    """3.22 TB with everything in memory (README of the public reference); two images are no part of that."""
    memory, disk = needed(changed(K3, "engine/canonical_on", "memory"))
    assert memory == pytest.approx(3.22e12, rel=0.02)
    assert disk == 0.0
    assert needed(catalogue.load(K3)) == (8 * 207.5e9, pytest.approx(1560.860324864e9 * 1.02))


@pytest.mark.parametrize("name", catalogue.names())
def test_a_replica_asks_for_what_it_uses_and_leaves_no_gpu_without_memory(name: str) -> None:
    """K3 asked for 1,024 GiB of the 1,546 that its images take; a Flash for 512 of a host's for each GPU."""
    recipe = catalogue.load(name)
    used, asked = memory_gib(recipe), recipe.engine.memory_request_gib
    assert used <= asked <= used * 1.25 + 32
    one_gpu = asked / recipe.engine.gpus
    assert one_gpu < 512  # of hosts of 8 B300, which have 4 TiB; the others' need far less


def test_the_command_tells_each_recipe_and_fails_for_a_file_that_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    assert main(["recipe", "check", "qwen3-4b/slime", "--no-rehearsal", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failed"] == []
    own = tmp_path / "own.toml"
    text = (catalogue.home() / "models" / "qwen3-0.6b.toml").read_text()
    own.write_text(text.replace("mem-fraction-static = 0.8", "mem-fraction = 0.8"))
    assert main(["recipe", "check", f"{own}/miles"]) == 1
    said = capsys.readouterr().out
    assert "own/miles: 1 problem(s)\n  engine.flags.mem-fraction: sglang 0.5.23 has no --mem-fraction" in said
    assert main(["recipe", "check"]) == 2
    assert "name recipes to check, or give --all" in capsys.readouterr().err
