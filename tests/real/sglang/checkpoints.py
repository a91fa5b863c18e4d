"""A small random Qwen3 with a tokenizer and a chat template, and the versions that follow it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from stitch_core import safetensors

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 128, 64, 2, 4, 2, 16, 96
END = 2
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INTERMEDIATE,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": END,
    "torch_dtype": "bfloat16",
}

Weights = dict[str, torch.Tensor]


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint."""
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        result |= {
            f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.self_attn.q_norm.weight": (HEAD_DIM,),
            f"{prefix}.self_attn.k_norm.weight": (HEAD_DIM,),
            f"{prefix}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
        }
    return {**result, "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}


def random_weights(seed: int) -> Weights:
    """Weights so large that what a seed says differs clearly from what another does."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, shape in shapes().items():
        noise = torch.randn(shape, generator=generator)
        result[name] = (1 + noise / 10 if "norm" in name else noise / 6).to(torch.bfloat16)
    return result


def to_publish(weights: Weights) -> dict[str, safetensors.Tensor]:
    """As a publisher takes them."""
    return {
        name: safetensors.Tensor("BF16", tuple(t.shape), t.contiguous().view(torch.uint8).numpy().tobytes())
        for name, t in weights.items()
    }


def write(directory: Path, weights: Weights) -> Path:
    """A checkpoint that SGLang loads, with a tokenizer of one token a character."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    vocabulary = {f"<{i}>" if i < 32 or i == 127 else chr(i): i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<0>",
        "bos_token": "<1>",
        "eos_token": f"<{END}>",
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    return directory
