"""config.json of a checkpoint, and what it says of the quantization.

Sources: Miles' tools/convert_hf_to_nvfp4.py (NVFP4), slime's tools/convert_hf_to_int4_direct.py (INT4), the
published files of GLM-4.5-Air-FP8, GLM-5.2-FP8 and Kimi K3. Which modules the published files list as not
quantized is not known in full: here it is every linear module that the layout keeps in BF16.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..schema import Checkpoint
from .formats import group_of, scope
from .geometry import Geometry, Grouped, Hybrid, Latent, Vision
from .spec import Tensor
from .tensors import tensors

Json = dict[str, Any]

EXPERT_KEYS: Mapping[str, Mapping[str, str]] = {
    "qwen3_moe": {"n_routed_experts": "num_experts"},
    "kimi_linear": {
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "num_experts_per_tok": "num_experts_per_token",
    },
}
"""Keys of config.json that a model type calls otherwise than the others do."""

NOT_KEYS = {"kind", "correction_bias", "names", "indexer", "qk_norm"}
"""Fields of the geometry that are no keys of config.json."""

PACKED_IGNORED = (
    r"re:.*self_attn.*", r"re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"
)  # fmt: skip


def config_json(geometry: Geometry, checkpoint: Checkpoint) -> Json:
    """The model's numbers, with ``quantization_config`` where it is quantized."""
    text = _model(geometry)
    quantization = quantization_config(geometry, checkpoint)
    top = {"architectures": [geometry.architecture], "model_type": geometry.model_type, "dtype": "bfloat16"}
    if geometry.text_model_type is None:
        return {**top, **text, **({"quantization_config": quantization} if quantization else {})}
    text |= {"architectures": [geometry.text_architecture], "model_type": geometry.text_model_type}
    whole: Json = {**top, "text_config": text, "tie_word_embeddings": geometry.tie_word_embeddings}
    if geometry.vision is not None:
        whole["vision_config"] = _vision(geometry.vision, geometry.hidden_size)
    if quantization:  # Miles' converter writes it at the top, compressed-tensors models below
        at = whole if checkpoint.quantization == "nvfp4-modelopt" else text
        at["quantization_config"] = quantization
    return whole


def hf_quant_config(geometry: Geometry, checkpoint: Checkpoint) -> Json | None:
    """hf_quant_config.json, which ModelOpt checkpoints have beside config.json; None for others."""
    if checkpoint.quantization != "nvfp4-modelopt":
        return None
    return {
        "producer": {"name": "modelopt"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": group_of(checkpoint),
            "exclude_modules": _modelopt_ignored(geometry, checkpoint),
        },
    }


def quantization_config(geometry: Geometry, checkpoint: Checkpoint) -> Json | None:
    """What config.json says of the quantization; None for BF16."""
    how = checkpoint.quantization
    if how == "bf16":
        return None
    if how == "fp8-channel":
        return _compressed(
            "float-quantized", _plain_modules(geometry, checkpoint),
            {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None},
            {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True},
        )  # fmt: skip
    if how == "fp8-block128":
        kept = [f"{geometry.prefix}embed_tokens", *_plain_modules(geometry, checkpoint)]
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [group_of(checkpoint)] * 2,
            # The index's projections have a name of their own in this list.
            "modules_to_not_convert": [
                re.sub(r"indexer\.weights_proj$", "indexers_proj", one) for one in kept
            ],
        }
    if how == "nvfp4-modelopt":
        return {
            "quant_algo": "NVFP4",
            "quant_method": "modelopt",
            "group_size": group_of(checkpoint),
            "ignore": _modelopt_ignored(geometry, checkpoint),
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        }
    weights: Json = {"num_bits": 4, "strategy": "group", "group_size": group_of(checkpoint)}
    if how == "mxfp4-packed":
        weights |= {"type": "float", "scale_dtype": "torch.uint8", "zp_dtype": None}
        ignored = [*PACKED_IGNORED, "re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*"]
        return _compressed("mxfp4-pack-quantized", ignored, weights, None)
    return _compressed("pack-quantized", ["lm_head", *PACKED_IGNORED], weights | {"type": "int"}, None)


def _model(geometry: Geometry) -> Json:
    keys: Json = {
        "hidden_size": geometry.hidden_size,
        "num_hidden_layers": geometry.num_hidden_layers,
        "intermediate_size": geometry.intermediate_size,
        "vocab_size": geometry.vocab_size,
        "tie_word_embeddings": geometry.tie_word_embeddings,
        **_attention(geometry.attention, geometry.num_hidden_layers),
    }
    if geometry.attn_res_block_size is not None:
        keys["attn_res_block_size"] = geometry.attn_res_block_size
    if geometry.experts is not None:
        renamed = EXPERT_KEYS.get(geometry.text_model_type or geometry.model_type, {})
        experts = geometry.experts.model_dump(exclude_none=True, exclude=NOT_KEYS)
        keys |= {renamed.get(key, key): value for key, value in experts.items()}
        keys["first_k_dense_replace"] = geometry.first_k_dense_replace
    if geometry.prediction is not None:
        keys["num_nextn_predict_layers"] = geometry.prediction.num_nextn_predict_layers
    for key, value in geometry.config.items():
        below = keys.get(key)
        keys[key] = {**below, **value} if isinstance(below, dict) else value
    return keys


def _attention(kind: Grouped | Latent | Hybrid, layers: int) -> Json:
    if isinstance(kind, Grouped):
        return kind.model_dump(exclude=NOT_KEYS)
    if isinstance(kind, Latent):
        indexer = kind.indexer.model_dump() if kind.indexer else {}
        own = kind.model_dump(exclude={*NOT_KEYS, "mla_use_output_gate"})
        gate = {"mla_use_output_gate": True} if kind.mla_use_output_gate else {}
        # Every head has keys and values of its own, once they are unfolded.
        return {**own, **gate, "num_key_value_heads": kind.num_attention_heads, **indexer}
    linear = {
        "num_heads": kind.num_heads,
        "head_dim": kind.head_dim,
        "short_conv_kernel_size": kind.short_conv_kernel_size,
        "full_attn_layers": [layer + 1 for layer in kind.full_layers],
        "kda_layers": [layer + 1 for layer in range(layers) if layer not in kind.full_layers],
    }
    return {**_attention(kind.latent, layers), "linear_attn_config": linear}


def _vision(kind: Vision, hidden: int) -> Json:
    """Kimi K3 names its keys with ``vt_``, the class for K2.5 without."""
    sizes = {
        "hidden_size": kind.vt_hidden_size,
        "num_hidden_layers": kind.vt_num_hidden_layers,
        "num_attention_heads": kind.vt_num_attention_heads,
        "intermediate_size": kind.vt_intermediate_size,
    }
    return {
        **sizes,
        **{f"vt_{key}": value for key, value in sizes.items()},
        "qkv_hidden_size": kind.vt_qkv_size,
        "patch_size": kind.patch_size,
        "init_pos_emb_height": kind.init_pos_emb,
        "init_pos_emb_width": kind.init_pos_emb,
        "text_hidden_size": hidden,
    }


def _compressed(how: str, ignored: list[str], weights: Json, activations: Json | None) -> Json:
    """One group of compressed-tensors for every linear module but the ignored ones."""
    usual = {
        "symmetric": True, "dynamic": False, "observer": "minmax", "actorder": None, "block_structure": None
    }  # fmt: skip
    group = {
        "format": how,
        "targets": ["Linear"],
        "weights": {**usual, **weights},
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": how,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }


def _plain_modules(geometry: Geometry, checkpoint: Checkpoint) -> list[str]:
    """Linear modules that stay in BF16."""
    inside = scope(checkpoint)
    return [
        tensor.name.removesuffix(".weight")
        for tensor in tensors(geometry)
        if _linear(tensor) and not inside(tensor)
    ]


def _linear(tensor: Tensor) -> bool:
    table = tensor.name.endswith(("embed_tokens.weight", "pos_emb.weight"))
    return tensor.name.endswith(".weight") and len(tensor.shape) == 2 and not table


def _modelopt_ignored(geometry: Geometry, checkpoint: Checkpoint) -> list[str]:
    """Modules outside the experts, layers that stay in BF16 whole, and names that engines fuse modules to."""
    inside = scope(checkpoint)
    ignored: set[str] = set()
    for tensor in tensors(geometry):
        if not tensor.name.endswith(".weight") or inside(tensor):
            continue
        module = tensor.name.removesuffix(".weight")
        container, found, _ = module.partition(".experts.")
        if found:  # the layer's own prefix, from where the converter looks for it
            ignored |= {
                f"{container}.experts",
                container[container.index("model.layers.") :].removesuffix("mlp"),
            }
        else:
            ignored |= {module, re.sub(r"\.[qkv]_proj$", ".qkv_proj", module)}
    return sorted(ignored)
