"""Every tensor of a model in BF16, as it is published before quantization."""

from __future__ import annotations

from .attention import attention
from .feed_forward import gated, mixture
from .geometry import Geometry, Prediction
from .spec import Tensor, Tensors, weight
from .vision import vision

__all__ = ["Tensor", "tensors"]


def tensors(geometry: Geometry) -> Tensors:
    """The tensors in the order of the layers, those for multi-token prediction after them.

    What training keeps in F32 is F32 here. Nothing is allocated: a full-size model takes a second.
    """
    hidden, prefix = geometry.hidden_size, geometry.prefix
    yield weight(f"{prefix}embed_tokens", geometry.vocab_size, hidden)
    for layer in range(geometry.num_hidden_layers):
        yield from _layer(geometry, layer, f"{prefix}layers.{layer}.")
    yield weight(f"{prefix}norm", hidden)
    if geometry.attn_res_block_size is not None:
        yield from _residual(hidden, f"{prefix}output_attn")
    if not geometry.tie_word_embeddings or geometry.tied_head_stored:
        yield weight(geometry.head.rstrip("."), geometry.vocab_size, hidden)
    if geometry.prediction is not None:
        yield from _prediction(geometry, geometry.prediction)
    if geometry.vision is not None:
        yield from vision(geometry.vision, hidden)


def _layer(geometry: Geometry, layer: int, at: str) -> Tensors:
    hidden = geometry.hidden_size
    yield weight(f"{at}input_layernorm", hidden)
    yield weight(f"{at}post_attention_layernorm", hidden)
    if geometry.attn_res_block_size is not None:
        yield from _residual(hidden, f"{at}self_attention")
        yield from _residual(hidden, f"{at}mlp")
    yield from attention(geometry.attention, hidden, layer, f"{at}self_attn")
    if geometry.experts is None or layer < geometry.first_k_dense_replace:
        yield from gated(hidden, geometry.intermediate_size, f"{at}mlp")
    else:
        yield from mixture(geometry.experts, hidden, at)


def _residual(hidden: int, at: str) -> Tensors:
    """Of the attention residual of Kimi K3."""
    yield weight(f"{at}_res_norm", hidden)
    yield weight(f"{at}_res_proj", 1, hidden)


def _prediction(geometry: Geometry, kind: Prediction) -> Tensors:
    hidden = geometry.hidden_size
    for index in range(kind.num_nextn_predict_layers):
        layer = geometry.num_hidden_layers + index
        at = f"{geometry.prefix}layers.{layer}."
        yield from _layer(geometry, layer, at)
        yield weight(f"{at}enorm", hidden)
        yield weight(f"{at}hnorm", hidden)
        yield weight(f"{at}eh_proj", hidden, 2 * hidden)
        yield weight(f"{at}shared_head.norm", hidden)
        if kind.own_embeddings:
            yield weight(f"{at}embed_tokens", geometry.vocab_size, hidden)
            yield weight(f"{at}shared_head.head", geometry.vocab_size, hidden)
