"""The small Qwen3 that megatron-core trains here, in Hugging Face's names."""

from __future__ import annotations

import numpy as np

LAYERS, HIDDEN, FFN, HEADS, QUERY_GROUPS, KV_CHANNELS, VOCABULARY = 2, 64, 128, 4, 2, 16, 256


def layout() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names to (dtype, shape)."""
    q, kv = HEADS * KV_CHANNELS, QUERY_GROUPS * KV_CHANNELS
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (HIDDEN,),
            f"{at}post_attention_layernorm.weight": (HIDDEN,),
            f"{at}self_attn.q_proj.weight": (q, HIDDEN),
            f"{at}self_attn.k_proj.weight": (kv, HIDDEN),
            f"{at}self_attn.v_proj.weight": (kv, HIDDEN),
            f"{at}self_attn.o_proj.weight": (HIDDEN, q),
            f"{at}self_attn.q_norm.weight": (KV_CHANNELS,),
            f"{at}self_attn.k_norm.weight": (KV_CHANNELS,),
            f"{at}mlp.gate_proj.weight": (FFN, HIDDEN),
            f"{at}mlp.up_proj.weight": (FFN, HIDDEN),
            f"{at}mlp.down_proj.weight": (HIDDEN, FFN),
        }
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def from_shards(shards: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The whole policy, from what each tensor-parallel rank holds under Megatron's names."""
    first = shards[0]
    whole = {
        "model.embed_tokens.weight": _joined(shards, "embedding.word_embeddings.weight"),
        "lm_head.weight": _joined(shards, "output_layer.weight"),
        "model.norm.weight": first["decoder.final_layernorm.weight"],
    }
    queries, half = HEADS // QUERY_GROUPS * KV_CHANNELS, FFN // len(shards)
    for layer in range(LAYERS):
        ours, at = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        qkv = _joined(shards, f"{ours}self_attention.linear_qkv.weight")
        groups = np.split(qkv, QUERY_GROUPS)
        fc1 = [shard[f"{ours}mlp.linear_fc1.weight"] for shard in shards]
        whole |= {
            f"{at}self_attn.q_proj.weight": np.concatenate([g[:queries] for g in groups]),
            f"{at}self_attn.k_proj.weight": np.concatenate([g[queries:-KV_CHANNELS] for g in groups]),
            f"{at}self_attn.v_proj.weight": np.concatenate([g[-KV_CHANNELS:] for g in groups]),
            f"{at}self_attn.o_proj.weight": _joined(shards, f"{ours}self_attention.linear_proj.weight", 1),
            f"{at}mlp.gate_proj.weight": np.concatenate([part[:half] for part in fc1]),
            f"{at}mlp.up_proj.weight": np.concatenate([part[half:] for part in fc1]),
            f"{at}mlp.down_proj.weight": _joined(shards, f"{ours}mlp.linear_fc2.weight", 1),
        }
        # Every rank has the norms; with Transformer Engine's names two of them are in the layer behind.
        norms = {
            "input_layernorm": ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            "post_attention_layernorm": ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
            "self_attn.q_norm": ("self_attention.q_layernorm.weight",),
            "self_attn.k_norm": ("self_attention.k_layernorm.weight",),
        }
        for theirs, names in norms.items():
            name = next(ours + name for name in names if ours + name in first)
            assert all(np.array_equal(shard[name], first[name]) for shard in shards), name
            whole[f"{at}{theirs}.weight"] = first[name]
    return whole


def _joined(shards: list[dict[str, np.ndarray]], name: str, axis: int = 0) -> np.ndarray:
    return np.concatenate([shard[name] for shard in shards], axis)
