"""The policy: a Qwen3 of 0.4 million parameters with fp32 masters; replicas serve it as a BF16 checkpoint.

Module names are chosen so that ``named_parameters()`` are the Hugging Face tensor names: what is trained,
what the boot checkpoint holds and what is published are one list.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from stitch_core import safetensors

from . import task

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 128, 2, 4, 2, 32, 384
MAX_POSITIONS, ROPE_THETA, EPS = 64, 10000.0, 1e-6

HF_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": task.VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INTERMEDIATE,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_POSITIONS,
    "rope_theta": ROPE_THETA,
    "rms_norm_eps": EPS,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": task.BOS,
    "eos_token_id": task.EOS,
    "torch_dtype": "bfloat16",
}


class Attention(nn.Module):
    """Causal attention with grouped keys and values, norms on queries and keys, and rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.q_norm = nn.RMSNorm(HEAD_DIM, EPS)
        self.k_norm = nn.RMSNorm(HEAD_DIM, EPS)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, -1, HEAD_DIM).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotate(self.q_norm(q), cos, sin), _rotate(self.k_norm(k), cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """The gated feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.mlp = MLP()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """What Hugging Face calls `model`: everything but the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(task.VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, EPS)

    def forward(self, tokens: Tensor) -> Tensor:
        frequency = ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        angle = torch.outer(torch.arange(tokens.shape[1]).float(), frequency).repeat(1, 2)
        cos, sin = angle.cos(), angle.sin()
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Policy(nn.Module):
    """fp32 masters; called with token ids [batch, length], it gives logits [batch, length, vocab]."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.model = Decoder()
        self.lm_head = nn.Linear(HIDDEN, task.VOCAB, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim == 1:
                    continue  # norms start at one
                scale = 0.05 if "embed" in name else parameter.shape[1] ** -0.5
                if "o_proj" in name or "down_proj" in name:
                    scale /= (2 * LAYERS) ** 0.5  # what is added to the residual stream
                parameter.normal_(0.0, scale, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.model(tokens))

    def rollout_weights(self) -> dict[str, Tensor]:
        """The weights that replicas serve: a BF16 copy of every master, by its Hugging Face name."""
        return {name: p.detach().to(torch.bfloat16) for name, p in self.named_parameters()}


def to_publish(weights: dict[str, Tensor]) -> dict[str, safetensors.Tensor]:
    """BF16 weights as a publisher takes them: dtype, shape and bytes of each tensor, without a copy."""
    return {
        name: safetensors.Tensor("BF16", tuple(t.shape), t.view(torch.uint8).numpy().data)
        for name, t in weights.items()
    }


def write_checkpoint(directory: Path, weights: dict[str, Tensor]) -> None:
    """Write an HF checkpoint that transformers and any engine of Qwen3 load."""
    directory.mkdir(parents=True)
    file = "model.safetensors"
    save_file(weights, directory / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in weights.values())},
        "weight_map": dict.fromkeys(sorted(weights), file),
    }
    for name, content in (("config.json", HF_CONFIG), (f"{file}.index.json", index)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin
