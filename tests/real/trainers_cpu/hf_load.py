"""Loads a Hugging Face Qwen3, dense or of experts, into Megatron's model, for want of a bridge on PyPI."""

import re
from pathlib import Path

import torch
from safetensors.torch import load_file


def install():
    import miles.backends.megatron_utils.checkpoint as checkpoint

    checkpoint._load_checkpoint_hf = load


def load(ddp_model, optimizer, args, load_path):
    fill(ddp_model[0], args, load_file(Path(load_path) / "model.safetensors"))
    if optimizer is not None:
        optimizer.reload_model_params()
    return 0, 0


def fill(model, args, source):
    """Set this rank's parameters from the whole policy in Hugging Face's names."""
    from megatron.core import mpu
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    layers = get_transformer_layer_offset(model.config)
    experts = 0
    if args.num_experts:
        experts = mpu.get_expert_model_parallel_rank() * args.num_experts // args.expert_model_parallel_size

    def globally(match):
        return f".layers.{int(match[1]) + layers}."

    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.").removeprefix("module.")
        name = re.sub(r"\.layers\.(\d+)\.", globally, name)
        name = re.sub(r"(experts.*\.weight)(\d+)$", lambda m: f"{m[1]}{int(m[2]) + experts}", name)
        value = shard(name, convert(name, source, args.num_query_groups), parameter)
        with torch.no_grad():
            parameter.copy_(value.to(parameter.dtype))


def shard(name, value, parameter):
    """This tensor-parallel rank's part. Experts are not cut."""
    from megatron.core import mpu

    size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return value
    if name.endswith("linear_fc1.weight"):  # gate and up are cut one by one
        return torch.cat([half.chunk(size)[rank] for half in value.chunk(2)])
    return value.chunk(size, dim=parameter.partition_dim)[rank]


def convert(name, source, groups):
    """One Megatron parameter, from Hugging Face's tensors."""
    whole = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight"
        if "lm_head.weight" in source
        else "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
    }
    if name in whole:
        return source[whole[name]]
    _, _, layer, rest = name.split(".", 3)
    at = f"model.layers.{layer}."
    attention, mlp = f"{at}self_attn.", f"{at}mlp."
    if rest == "self_attention.linear_qkv.weight":
        q, k, v = (source[f"{attention}{part}_proj.weight"] for part in "qkv")
        # Megatron keeps each group's queries beside the key and value that they share.
        return torch.cat([t.view(groups, -1, t.shape[-1]) for t in (q, k, v)], 1).reshape(-1, q.shape[-1])
    expert = re.match(r"mlp\.experts\.linear_fc([12])\.weight(\d+)", rest)
    if expert:
        which = f"{mlp}experts.{expert[2]}."
        if expert[1] == "1":
            return torch.cat([source[f"{which}gate_proj.weight"], source[f"{which}up_proj.weight"]])
        return source[f"{which}down_proj.weight"]
    if rest == "mlp.linear_fc1.weight":
        return torch.cat([source[f"{mlp}gate_proj.weight"], source[f"{mlp}up_proj.weight"]])
    return source[
        {
            "self_attention.linear_qkv.layer_norm_weight": f"{at}input_layernorm.weight",
            "self_attention.linear_proj.weight": f"{attention}o_proj.weight",
            "self_attention.q_layernorm.weight": f"{attention}q_norm.weight",
            "self_attention.k_layernorm.weight": f"{attention}k_norm.weight",
            "mlp.linear_fc1.layer_norm_weight": f"{at}post_attention_layernorm.weight",
            "mlp.linear_fc2.weight": f"{mlp}down_proj.weight",
            "pre_mlp_layernorm.weight": f"{at}post_attention_layernorm.weight",
            "mlp.router.weight": f"{mlp}gate.weight",
        }[rest]
    ]
