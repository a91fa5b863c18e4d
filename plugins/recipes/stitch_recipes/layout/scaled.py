"""The same model small enough for a laptop: the same names, dtypes and kinds of layers, narrower and fewer.

What decides how a size divides is kept: a multiple of 128 stays one, and an odd multiple of 64, which leaves
a ragged block of 128, stays odd. Sizes of a head stay as they are. The layers that are left are the dense
ones, then one of experts from the beginning, the middle and the end, and those for multi-token prediction, so
that a checkpoint that quantizes some layers and not others does so here too.
"""

from __future__ import annotations

import math
import re

from ..schema import Checkpoint
from .geometry import Experts, Geometry, Grouped, Hybrid, Latent, Vision

HIDDEN = 256
"""About the width of the small model."""

LAYERS = 3
"""Layers after the dense ones. In KDA models the last one is the one of full attention."""

VOCABULARY = 256
"""The vocabulary is this many times smaller."""


def scaled(geometry: Geometry, hidden: int = HIDDEN) -> Geometry:
    """The small model, about ``hidden`` wide. At 256 its checkpoints have 6 to 35 MB."""
    factor = max(1, geometry.hidden_size // hidden)
    layers = len(origins(geometry)) - _predicted(geometry)
    update: dict[str, object] = {
        "hidden_size": narrower(geometry.hidden_size, factor),
        "num_hidden_layers": layers,
        "intermediate_size": narrower(geometry.intermediate_size, factor),
        "vocab_size": narrower(geometry.vocab_size, VOCABULARY),
        "attention": _attention(geometry.attention, factor, layers),
        "experts": geometry.experts and _experts(geometry.experts, factor),
        "vision": geometry.vision and _vision(geometry.vision),
        # Token ids that the small vocabulary does not have.
        "config": {key: value for key, value in geometry.config.items() if not key.endswith("_token_id")},
    }
    return Geometry.model_validate({**geometry.model_dump(), **_dumped(update)})


def scaled_checkpoint(checkpoint: Checkpoint, geometry: Geometry) -> Checkpoint:
    """The checkpoint of the scaled ``geometry``: rules that name layers name those that are left of them."""
    small: dict[str, object] = {
        "not_quantized": [
            pattern
            for rule in checkpoint.not_quantized
            for pattern in (_patterns(rule, geometry) if "layers" in rule else [rule])
        ],
        "immutable": [
            prefix
            for rule in checkpoint.immutable
            for prefix in (_prefixes(rule, geometry) if "layers." in rule else [rule])
        ],
        "canonical_gb": None, "tensors": None, "image_gb": None, "image_ranks": None, "bytes_checked": False,
    }  # fmt: skip
    return checkpoint.model_copy(update=small)


def origins(geometry: Geometry) -> list[int]:
    """For each layer of the small model the large one's that it stands for, those for prediction included."""
    dense, all_of_them = geometry.first_k_dense_replace, geometry.num_hidden_layers
    span = all_of_them - 1 - dense
    later = [dense + round(span * index / (LAYERS - 1)) for index in range(LAYERS)]
    predicted = range(all_of_them, all_of_them + _predicted(geometry))
    return [*range(dense), *later, *predicted]


def narrower(size: int, factor: int) -> int:
    """About ``size / factor``, as divisible by powers of two up to 128 as ``size`` is, and no more."""
    unit = math.gcd(size, 128)
    parts = max(1, round(size / factor / unit))
    if unit < 128 and parts % 2 == 0:
        parts += 1
    return min(size, parts * unit)


def _predicted(geometry: Geometry) -> int:
    return geometry.prediction.num_nextn_predict_layers if geometry.prediction else 0


def _attention(kind: Grouped | Latent | Hybrid, factor: int, layers: int) -> Grouped | Latent | Hybrid:
    if isinstance(kind, Grouped):
        groups = max(1, kind.num_key_value_heads // factor)
        heads = groups * (kind.num_attention_heads // kind.num_key_value_heads)
        return kind.model_copy(update={"num_key_value_heads": groups, "num_attention_heads": heads})
    if isinstance(kind, Latent):
        return _latent(kind, factor)
    return kind.model_copy(
        update={
            "latent": _latent(kind.latent, factor),
            "num_heads": _heads(kind.num_heads, factor),
            "full_layers": [layers - 1],
        }
    )


def _latent(kind: Latent, factor: int) -> Latent:
    index = kind.indexer
    return kind.model_copy(
        update={
            "num_attention_heads": _heads(kind.num_attention_heads, factor),
            "q_lora_rank": kind.q_lora_rank and narrower(kind.q_lora_rank, factor),
            "kv_lora_rank": narrower(kind.kv_lora_rank, factor),
            "indexer": index
            and index.model_copy(update={"index_n_heads": _heads(index.index_n_heads, factor)}),
        }
    )


def _heads(heads: int, factor: int) -> int:
    return max(2, heads // factor)


def _experts(kind: Experts, factor: int) -> Experts:
    wide = kind.routed_expert_hidden_size
    return kind.model_copy(
        update={
            "n_routed_experts": max(16, kind.n_routed_experts // 16),
            "num_experts_per_tok": max(2, kind.num_experts_per_tok // 4),
            "moe_intermediate_size": narrower(kind.moe_intermediate_size, factor),
            "routed_expert_hidden_size": wide and narrower(wide, factor),
        }
    )


def _vision(kind: Vision) -> Vision:
    factor = kind.vt_hidden_size // 128
    return kind.model_copy(
        update={
            "vt_hidden_size": narrower(kind.vt_hidden_size, factor),
            "vt_num_hidden_layers": 2,
            "vt_num_attention_heads": 2,
            "vt_qkv_size": narrower(kind.vt_qkv_size, factor),
            "vt_intermediate_size": narrower(kind.vt_intermediate_size, factor),
            "init_pos_emb": 8,
        }
    )


def _dumped(update: dict[str, object]) -> dict[str, object]:
    return {
        key: value.model_dump() if hasattr(value, "model_dump") else value for key, value in update.items()
    }


def _patterns(rule: str, geometry: Geometry) -> list[str]:
    """A regular expression that names layers, as one for each layer that is left of them."""
    return [
        "^" + re.escape(f"{geometry.prefix}layers.{layer}.")
        for layer, origin in enumerate(origins(geometry))
        if re.search(rule, f"{geometry.prefix}layers.{origin}.")
    ]


def _prefixes(rule: str, geometry: Geometry) -> list[str]:
    return [
        f"{geometry.prefix}layers.{layer}."
        for layer, origin in enumerate(origins(geometry))
        if f"{geometry.prefix}layers.{origin}." == rule
    ]
