"""The small Qwen3 that megatron-core trains here, in Hugging Face's names."""

from __future__ import annotations

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
