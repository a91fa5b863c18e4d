"""The engine's flags: known to its release, not refused by the plugin, and not Stitch's own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace

from stitch_sglang.refuse import NotCovered, refuse

from ..errors import RecipeError
from ..layout.formats import group_of, quantized
from ..layout.tensors import tensors
from ..schema import Engine, Recipe
from . import flags

OURS = ("model-path", "host", "port", "tp-size", "tensor-parallel-size")
"""Set by processes.replica."""


def problems(recipe: Recipe) -> Iterator[str]:
    """Against the list of the release, and the plugin's own list of what it does not cover."""
    engine = recipe.engine
    try:
        yield from flags.problems("engine.flags", engine.flags, flags.flag_list("sglang", engine.release))
    except RecipeError as error:
        yield f"engine.release: {error}"
    for name in engine.flags:
        if name in OURS or name.startswith("stitch-"):
            yield f"engine.flags.{name}: it follows from other fields of the recipe"
    given = {name.replace("-", "_"): value for name, value in engine.flags.items() if value is not False}
    try:
        refuse(SimpleNamespace(**given), engine.environment)
    except NotCovered as error:
        yield f"engine.flags: the plugin refuses {error}"
    if recipe.serve in recipe.checkpoints and recipe.served.quantization == "fp8-block128":
        yield from _blocks(recipe)
    for name in engine.environment:
        if name.startswith("STITCH_"):
            yield f"engine.environment.{name}: it follows from other fields of the recipe"


def _blocks(recipe: Recipe) -> Iterator[str]:
    """Parts of a weight that are no whole blocks: SGLang refuses them as it makes the layer.

    sglang.srt.layers.quantization.fp8: validate_block_quant_shapes, and the same for experts.
    """
    block, heads = (
        group_of(recipe.served),
        getattr(recipe.model.geometry.attention, "num_key_value_heads", None),
    )
    geometry, told = recipe.model.geometry, set()
    # One expert and one layer of each kind: the others are as large.
    few = {"num_hidden_layers": min(geometry.num_hidden_layers, geometry.first_k_dense_replace + 1)}
    one = geometry.experts and geometry.experts.model_copy(update={"n_routed_experts": 1})
    small = geometry.model_copy(update={**few, "experts": one})
    for tensor in quantized(tensors(small), recipe.served):
        kind = re.sub(r"\.\d+\.", ".N.", tensor.name)
        split = re.search(r"\.(gate|up|q|k|v|down|o)_proj\.weight$", kind)
        if tensor.dtype != "F8_E4M3" or split is None or kind in told:
            continue
        told.add(kind)
        size = tensor.shape[1] if split[1] in ("down", "o") else tensor.shape[0]
        ranks = _ranks(recipe.engine, kind)
        if split[1] in ("k", "v") and heads is not None:
            ranks = min(ranks, heads)
        if size % ranks or size // ranks % block:
            yield (
                f"engine.gpus: {ranks} parts of {kind}, of {size}, are no whole blocks of {block}: SGLang "
                f"refuses them; take other ranks, or checkpoints.{recipe.serve}.group_size"
            )


def _ranks(engine: Engine, kind: str) -> int:
    """Ranks that share a weight."""

    def number(flag: str, otherwise: int) -> int:
        value = engine.flags.get(flag)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else otherwise

    if ".experts." in kind:
        return max(1, engine.gpus // number("ep-size", 1))
    if ".mlp." in kind and ".shared_experts." not in kind:
        return number("moe-dense-tp-size", engine.gpus)
    return engine.gpus
