"""Loads a Hugging Face Qwen3 into Megatron's model, for want of a bridge on PyPI."""

import torch


def install():
    import miles.backends.megatron_utils.checkpoint as checkpoint

    checkpoint._load_checkpoint_hf = load


def load(ddp_model, optimizer, args, load_path):
    from transformers import AutoModelForCausalLM

    source = AutoModelForCausalLM.from_pretrained(load_path, torch_dtype=torch.bfloat16).state_dict()
    groups = args.num_query_groups
    for name, parameter in ddp_model[0].named_parameters():
        name = name.removeprefix("module.").removeprefix("module.")
        value = shard(name, convert(name, source, groups), parameter)
        with torch.no_grad():
            parameter.copy_(value.to(parameter.dtype))
    if optimizer is not None:
        optimizer.reload_model_params()
    return 0, 0


def shard(name, value, parameter):
    """This tensor-parallel rank's part."""
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
        "output_layer.weight": "lm_head.weight",
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
        }[rest]
    ]
