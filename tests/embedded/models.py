"""Small random Qwen checkpoints for the tests of the embedded engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from stitch_embedded.config import ModelConfig
from stitch_embedded.weights import Weights


def config_json(kind: str = "qwen3", **changes: Any) -> dict[str, Any]:
    raw = {
        "model_type": kind,
        "vocab_size": 37,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": kind == "qwen3",
        "eos_token_id": 2,
    }
    return raw | changes


def random_tensors(config: ModelConfig, seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Weights large enough that the model's outcomes differ clearly from seed to seed."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in config.shapes().items():
        noise = torch.randn(shape, generator=generator)
        out[name] = (1 + noise / 10 if "norm" in name else noise / 6).to(dtype)
    return out


def nudged(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The next version of `tensors`: every element moves a little."""
    generator = torch.Generator().manual_seed(seed)
    return {k: (t + torch.randn(t.shape, generator=generator) / 100).to(t.dtype) for k, t in tensors.items()}


def live(config: ModelConfig, tensors: dict[str, Tensor]) -> Weights:
    weights = Weights(config, next(iter(tensors.values())).dtype)
    weights.copy_from(tensors)
    return weights


def save(directory: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
