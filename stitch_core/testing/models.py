"""A Qwen2 checkpoint of a chosen size that engines load, for measuring; its weights mean nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..ports import Files, write_atomic
from ..safetensors import Tensor
from .checkpoints import write_checkpoint

VOCAB = 2048
HEAD_DIM = 64
_NOISE = 1 << 20

Layout = dict[str, tuple[int, ...]]


def qwen2_config(nbytes: int) -> dict[str, object]:
    """The config.json of a Qwen2 of at least ``nbytes`` in bf16, and at most a layer more."""
    hidden = 1536 if nbytes >= 1 << 29 else 768
    heads = hidden // HEAD_DIM
    config: dict[str, object] = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "torch_dtype": "bfloat16",
        "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": 1,
        "num_attention_heads": heads, "num_key_value_heads": heads // 3, "hidden_act": "silu",
        "max_position_embeddings": 4096, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "use_sliding_window": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    one = _nbytes(qwen2_shapes(config))
    layer = _nbytes(qwen2_shapes({**config, "num_hidden_layers": 2})) - one
    return {**config, "num_hidden_layers": 1 + max(0, -(-(nbytes - one) // layer))}


def qwen2_shapes(config: Mapping[str, object]) -> Layout:
    """Every tensor of the checkpoint, by its Hugging Face name."""
    number = {key: value for key, value in config.items() if isinstance(value, int)}
    hidden, inner = number["hidden_size"], number["intermediate_size"]
    kv = HEAD_DIM * number["num_key_value_heads"]
    shapes: Layout = {"model.embed_tokens.weight": (number["vocab_size"], hidden)}
    for layer in range(number["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, hidden)
            shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    return {**shapes, "model.norm.weight": (hidden,), "lm_head.weight": (number["vocab_size"], hidden)}


def qwen2_tensors(config: Mapping[str, object], seed: int) -> dict[str, Tensor]:
    """Random weights of a size at which tokens differ: one block of noise, in each from another place."""
    rng = np.random.default_rng(seed)
    noise = (rng.standard_normal(_NOISE, dtype=np.float32) * 0.05).view(np.uint32)
    block = (noise >> 16).astype("<u2")
    tensors = {}
    for name, shape in qwen2_shapes(config).items():
        count = int(np.prod(shape))
        values = np.resize(np.roll(block, -int(rng.integers(_NOISE))), count)
        if "norm" in name:
            values = np.full(count, 0x3F80, "<u2")  # 1.0
        tensors[name] = Tensor("BF16", shape, values.tobytes())
    return tensors


def nudge(tensors: Mapping[str, Tensor], start: int, stride: int = 100) -> dict[str, Tensor]:
    """The next version: in every tensor one element of ``stride`` moves by one unit in the last place.

    From element ``start`` on (of ``stride``; 0 in tensors that are shorter). Twice is none.
    """
    result = {}
    for name, tensor in tensors.items():
        words = np.frombuffer(tensor.data, "<u2").copy()
        words[start % min(stride, len(words)) :: stride] ^= 1
        result[name] = tensor._replace(data=words.tobytes())
    return result


def write_qwen2(
    directory: Path, files: Files, config: Mapping[str, object], tensors: Mapping[str, Tensor]
) -> None:
    """A checkpoint directory with a tokenizer of one token a character (SGLang asks for one)."""
    write_checkpoint(directory, files, tensors, shards=4)
    vocabulary = {f"<{i}>" if i < 32 or i > 126 else chr(i): i for i in range(VOCAB)}
    tokenizer: dict[str, object] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {
            "type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False,
        },
        "post_processor": None, "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<0>"},
    }  # fmt: skip
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<0>", "eos_token": "<2>"}
    for name, document in (
        ("config.json", config), ("tokenizer.json", tokenizer), ("tokenizer_config.json", settings),
        ("generation_config.json", {"eos_token_id": 2}),
    ):  # fmt: skip
        write_atomic(files, directory / name, json.dumps(document).encode())


def _nbytes(shapes: Layout) -> int:
    return sum(2 * int(np.prod(shape)) for shape in shapes.values())
