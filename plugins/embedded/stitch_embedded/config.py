"""What the engine needs to know of a Hugging Face Qwen2 or Qwen3 `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """The checkpoint is missing or asks for something this engine does not compute."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one model. `qk_norm` is Qwen3's, `qkv_bias` is Qwen2's."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    eos_ids: tuple[int, ...] = ()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the model uses, by its Hugging Face name."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        table: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            p = f"model.layers.{layer}."
            table[p + "input_layernorm.weight"] = (self.hidden,)
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                table[p + f"self_attn.{name}_proj.weight"] = (rows, self.hidden)
                if self.qkv_bias:
                    table[p + f"self_attn.{name}_proj.bias"] = (rows,)
            if self.qk_norm:
                table[p + "self_attn.q_norm.weight"] = (self.head_dim,)
                table[p + "self_attn.k_norm.weight"] = (self.head_dim,)
            table[p + "self_attn.o_proj.weight"] = (self.hidden, q)
            table[p + "post_attention_layernorm.weight"] = (self.hidden,)
            table[p + "mlp.gate_proj.weight"] = (self.intermediate, self.hidden)
            table[p + "mlp.up_proj.weight"] = (self.intermediate, self.hidden)
            table[p + "mlp.down_proj.weight"] = (self.hidden, self.intermediate)
        table["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            table["lm_head.weight"] = (self.vocab, self.hidden)
        return table

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> ModelConfig:
        """Read a `config.json` object. Raises ConfigError for anything this engine would get wrong."""
        kind = raw.get("model_type")
        if kind not in ("qwen2", "qwen3"):
            raise ConfigError(f"model_type {kind!r}: the embedded engine runs qwen2 and qwen3 only")
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise ConfigError(f"rope type {rope_type!r} is not supported")
        layer_types = raw.get("layer_types") or ["full_attention"]
        if raw.get("use_sliding_window") or set(layer_types) != {"full_attention"}:
            raise ConfigError("sliding-window attention is not supported")
        if raw.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"hidden_act {raw['hidden_act']!r} is not supported")
        if kind == "qwen3" and raw.get("attention_bias"):
            raise ConfigError("qwen3 with attention_bias is not supported")
        if raw.get("quantization_config"):
            raise ConfigError("quantized checkpoints are not supported")
        try:
            heads = int(raw["num_attention_heads"])
            return ModelConfig(
                vocab=int(raw["vocab_size"]),
                hidden=int(raw["hidden_size"]),
                layers=int(raw["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(raw.get("num_key_value_heads") or heads),
                head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
                intermediate=int(raw["intermediate_size"]),
                max_positions=int(raw["max_position_embeddings"]),
                rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
                norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                tied=bool(raw.get("tie_word_embeddings", False)),
                qk_norm=kind == "qwen3",
                qkv_bias=kind == "qwen2",
                eos_ids=_ids(raw.get("eos_token_id")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"config.json: {type(error).__name__}: {error}") from error

    @staticmethod
    def read(directory: str | Path) -> ModelConfig:
        """Read `config.json` (and `generation_config.json`, which may name more end tokens)."""
        raw = _json(Path(directory) / "config.json")
        generation = Path(directory) / "generation_config.json"
        if generation.is_file():
            eos = _json(generation).get("eos_token_id")
            raw["eos_token_id"] = eos if eos is not None else raw.get("eos_token_id")
        return ModelConfig.from_dict(raw)


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)


def _json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no checkpoint: {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return raw
