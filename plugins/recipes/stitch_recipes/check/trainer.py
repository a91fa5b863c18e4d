"""The trainer's flags: known to its revision, whole groups and batches, and one rounding on both sides."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .. import training
from ..errors import RecipeError
from ..layout.formats import scope
from ..layout.spec import Tensor
from ..schema import Recipe, Trainer
from ..site import read_site
from . import flags

BRIDGE = "trainer.flags.megatron-to-hf-mode"
DATA = "{data}/"
ERROR_MODE = "NVFP4_4OVER6_ERR_MODE"

FLOAT_SCALES = {"SGLANG_ENABLE_JIT_DEEPGEMM": "0", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
"""With which Miles exports scales of FP8 blocks in F32 on Blackwell; on Hopper it does anyway."""

# What a framework's parser takes and its own validation refuses beside a flag that Stitch adds: Miles'
# validate_skip_actor_forward_only (miles/utils/arguments.py at 31f1ca961).
REFUSED = {"miles": {"skip-actor-forward-only": "custom-megatron-before-train-step-hook-path"}}


def problems(recipe: Recipe) -> Iterator[str]:
    """Nothing for a recipe that only serves."""
    trainer = recipe.trainer
    if trainer is None:
        return
    try:
        known = flags.flag_list(trainer.framework, trainer.revision).with_functions(
            trainer.functions.values()
        )
    except RecipeError as error:
        yield f"trainer.revision: {error}"
        return
    if re.fullmatch(r"[0-9a-f]{7,39}", trainer.revision):
        yield f"trainer.revision: {trainer.revision}: a server gives a commit by all of its 40 digits only"
    yield from flags.problems("trainer.flags", trainer.flags, known)
    if trainer.model_script not in known.scripts:
        yield f"trainer.model_script: {trainer.framework} {known.revision} has no {trainer.model_script}"
    stitch = training.stitch(recipe, trainer, "gateway", "/configuration")
    yield from flags.problems("what Stitch adds", stitch, known)
    placed = training.placement(recipe, trainer, read_site(None))
    yield from flags.problems("what places the trainer", placed, known)
    for name in sorted(set(trainer.flags) & (set(stitch) | set(placed))):
        yield f"trainer.flags.{name}: it follows from other fields of the recipe"
    for name in sorted(set(trainer.files) - set(known.flags)):
        yield f"trainer.files.{name}: {trainer.framework} {known.revision} has no --{name}"
    for name, hook in REFUSED.get(trainer.framework, {}).items():
        if trainer.flags.get(name, False) is not False and hook in stitch:
            yield f"trainer.flags.{name}: {trainer.framework} refuses it beside --{hook}, which Stitch adds"
    if trainer.flags.get("megatron-to-hf-mode") == "bridge" and "te-precision-config-file" in trainer.files:
        # _apply_bridge_runtime_config of miles/backends/megatron_utils/model_provider.py at 31f1ca961
        yield f"{BRIDGE}: a model of Megatron-Bridge gets no te-precision-config-file, and trains in BF16"
    yield from flags.problems("trainer.conversion.flags", trainer.conversion.flags, known)
    if "PYTHONPATH" in trainer.environment:
        yield "trainer.environment.PYTHONPATH: it follows from trainer.modules"
    for name in sorted(set(trainer.asks) & set(trainer.environment)):
        yield f"trainer.asks.{name}: trainer.environment says it already"
    yield from _data(trainer)
    yield from _parallel(recipe, trainer)
    yield from _batches(trainer)
    yield from _rounding(recipe, trainer)
    yield from _exported(recipe, trainer)


def _data(trainer: Trainer) -> Iterator[str]:
    """Every file that flags name is made by somebody, and the other way round."""
    lists = [value if isinstance(value, list) else [value] for value in trainer.flags.values()]
    words = [word for values in lists for word in values if isinstance(word, str)]
    named = {word.removeprefix(DATA) for word in words if word.startswith(DATA)}
    for name in sorted(named - set(trainer.data)):
        yield f"trainer.data: flags name {DATA}{name}, and nothing says what it is"
    for name in sorted(set(trainer.data) - named):
        yield f"trainer.data.{name}: no flag names {DATA}{name}"
    for name, data in trainer.data.items():
        if data.command is not None and "{target}" not in data.command:
            yield f"trainer.data.{name}.command: it does not say {{target}}, the file that it has to write"


def _number(trainer: Trainer, name: str, otherwise: int = 1) -> int:
    value = trainer.flags.get(name, otherwise)
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise


def _parallel(recipe: Recipe, trainer: Trainer) -> Iterator[str]:
    world = trainer.nodes * trainer.gpus_per_node
    tensor, pipeline, context, experts = (
        _number(trainer, f"{name}-parallel-size")
        for name in ("tensor-model", "pipeline-model", "context", "expert-model")
    )
    if min(tensor, pipeline, context, experts) < 1:
        yield "trainer.flags: parallel sizes are at least 1"
        return
    if world % (tensor * pipeline * context):
        yield f"trainer.nodes: {world} GPUs are not whole groups of {tensor} x {pipeline} x {context}"
    if world % (pipeline * experts):
        yield f"trainer.flags.expert-model-parallel-size: {pipeline} x {experts} does not divide {world}"
    geometry = recipe.model.geometry
    if geometry.experts is not None and geometry.experts.n_routed_experts % experts:
        yield f"trainer.flags.expert-model-parallel-size: {experts} does not divide the model's experts"
    first = _number(trainer, "decoder-first-pipeline-num-layers", 0)
    last = _number(trainer, "decoder-last-pipeline-num-layers", 0)
    stages = pipeline - bool(first) - bool(last)
    if (geometry.num_hidden_layers - first - last) % max(1, stages):
        yield f"trainer.flags.pipeline-model-parallel-size: inner layers are not whole for {stages}"


def _batches(trainer: Trainer) -> Iterator[str]:
    rollout = _number(trainer, "rollout-batch-size", 0) * _number(trainer, "n-samples-per-prompt")
    batch = _number(trainer, "global-batch-size", 0)
    if not rollout or not batch:
        yield "trainer.flags: rollout-batch-size and global-batch-size have to be there"
    elif rollout % batch:
        yield f"trainer.flags.global-batch-size: {rollout} samples a rollout are not whole batches of {batch}"


def _exported(recipe: Recipe, trainer: Trainer) -> Iterator[str]:
    """What Miles exports in FP8 has to have the layout of what is served, or no delta can be made.

    miles/backends/megatron_utils/megatron_to_hf/processors/quantizer_fp8.py at 31f1ca961.
    """
    if recipe.serve not in recipe.checkpoints or trainer.framework != "miles":
        return
    if recipe.served.quantization != "fp8-block128":
        return
    config, attention = recipe.model.geometry.config, recipe.model.geometry.attention
    index = getattr(attention, "indexer", None)
    wk = Tensor("a.0.self_attn.indexer.wk.weight", "BF16", (1, 1))
    if index is not None and config.get("indexer_rope_interleave") and scope(recipe.served)(wk):
        yield (
            f"checkpoints.{recipe.serve}.not_quantized: Miles exports the index's wk in BF16 where its "
            r"rotary pairs are interleaved: add '\.indexer\.wk$', and convert it so"
        )
    if trainer.gpu.startswith(("B", "GB")):
        for name, value in FLOAT_SCALES.items():
            if trainer.environment.get(name) != value:
                yield (
                    f"trainer.environment.{name}: it has to be {value} on {trainer.gpu}, where Miles would "
                    "export scales that are no F32 as the checkpoint's"
                )


def _rounding(recipe: Recipe, trainer: Trainer) -> Iterator[str]:
    """Checkpoint, trainer and engine have to round NVFP4 alike, or the first delta does not fit its base."""
    engine = recipe.engine.environment
    sides = {
        "trainer": trainer.environment.get(f"NVTE_{ERROR_MODE}"),
        "engine": engine.get(f"FLASHINFER_{ERROR_MODE}"),
    }
    if len(set(sides.values())) != 1:
        yield f"{ERROR_MODE}: the trainer's is {sides['trainer']}, the engine's {sides['engine']}"
    prepared = recipe.served.prepared if recipe.serve in recipe.checkpoints else None
    if recipe.serve not in recipe.checkpoints or recipe.served.quantization != "nvfp4-modelopt":
        return
    for end in ("start", "end"):
        flag = f"num-layers-at-{end}-in-bf16"
        made = re.search(rf"--{flag} (\d+)", prepared.command) if prepared else None
        converted = int(made.group(1)) if made else 0
        if prepared and _number(trainer, flag, 0) != converted:
            yield f"trainer.flags.{flag}: {_number(trainer, flag, 0)}, the checkpoint's is {converted}"
