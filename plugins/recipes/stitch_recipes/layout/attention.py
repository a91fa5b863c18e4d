"""Tensors of attention. Names and shapes: the loader classes of SGLang 0.5.23, ``sglang/srt/models``
(glm4_moe, glm4_moe_lite, deepseek_v2, kimi_k3, qwen3, qwen3_moe)."""

from __future__ import annotations

from .geometry import Grouped, Hybrid, Indexer, Latent
from .spec import Tensor, Tensors, weight


def attention(kind: Grouped | Latent | Hybrid, hidden: int, layer: int, at: str) -> Tensors:
    """Of one layer; ``at`` is its ``….self_attn``, ``layer`` counts from 0."""
    if isinstance(kind, Grouped):
        yield from grouped(kind, hidden, at)
    elif isinstance(kind, Latent):
        yield from latent(kind, hidden, layer, at)
    elif layer in kind.full_layers:
        yield from latent(kind.latent, hidden, layer, at)
    else:
        yield from linear(kind, hidden, at)


def grouped(kind: Grouped, hidden: int, at: str) -> Tensors:
    queries = kind.num_attention_heads * kind.head_dim
    keys = kind.num_key_value_heads * kind.head_dim
    for name, out in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield weight(f"{at}.{name}", out, hidden)
        if kind.attention_bias:
            yield Tensor(f"{at}.{name}.bias", "BF16", (out,))
    yield weight(f"{at}.o_proj", hidden, queries)
    if kind.qk_norm:
        yield weight(f"{at}.q_norm", kind.head_dim)
        yield weight(f"{at}.k_norm", kind.head_dim)


def latent(kind: Latent, hidden: int, layer: int, at: str) -> Tensors:
    heads, rank = kind.num_attention_heads, kind.kv_lora_rank
    queries = heads * (kind.qk_nope_head_dim + kind.qk_rope_head_dim)
    if kind.q_lora_rank is None:
        yield weight(f"{at}.q_proj", queries, hidden)
    else:
        yield weight(f"{at}.q_a_proj", kind.q_lora_rank, hidden)
        yield weight(f"{at}.q_a_layernorm", kind.q_lora_rank)
        yield weight(f"{at}.q_b_proj", queries, kind.q_lora_rank)
    yield weight(f"{at}.kv_a_proj_with_mqa", rank + kind.qk_rope_head_dim, hidden)
    yield weight(f"{at}.kv_a_layernorm", rank)
    yield weight(f"{at}.kv_b_proj", heads * (kind.qk_nope_head_dim + kind.v_head_dim), rank)
    yield weight(f"{at}.o_proj", hidden, heads * kind.v_head_dim)
    if kind.mla_use_output_gate:
        yield weight(f"{at}.g_proj", heads * kind.v_head_dim, hidden)
    if kind.indexer is not None and kind.indexer.in_layer(layer):
        yield from indexer(kind.indexer, hidden, kind.q_lora_rank or hidden, f"{at}.indexer")


def indexer(kind: Indexer, hidden: int, queries: int, at: str) -> Tensors:
    dim = kind.index_head_dim
    yield weight(f"{at}.wq_b", kind.index_n_heads * dim, queries)
    yield weight(f"{at}.wk", dim, hidden)
    yield weight(f"{at}.weights_proj", kind.index_n_heads, hidden)
    yield weight(f"{at}.k_norm", dim)
    yield Tensor(f"{at}.k_norm.bias", "BF16", (dim,))


def linear(kind: Hybrid, hidden: int, at: str) -> Tensors:
    """KDA. ``A_log`` has ``head_dim`` entries in the file, more than there are heads."""
    heads, dim = kind.num_heads, kind.head_dim
    wide = heads * dim
    for name in "qkv":
        yield weight(f"{at}.{name}_proj", wide, hidden)
        yield Tensor(f"{at}.{name}_conv1d.weight", "F32", (wide, 1, kind.short_conv_kernel_size))
    yield weight(f"{at}.f_a_proj", dim, hidden)
    yield weight(f"{at}.f_b_proj", wide, dim)
    yield weight(f"{at}.b_proj", heads, hidden)
    yield weight(f"{at}.g_proj", wide, hidden)
    yield weight(f"{at}.o_proj", hidden, wide)
    yield Tensor(f"{at}.A_log", "F32", (dim,))
    yield Tensor(f"{at}.dt_bias", "F32", (wide,))
    yield Tensor(f"{at}.o_norm.weight", "F32", (dim,))
