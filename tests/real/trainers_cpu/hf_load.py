"""Loads a Hugging Face Qwen3 into Megatron's model, for want of a bridge on PyPI. One TP rank."""

import torch


def install():
    import miles.backends.megatron_utils.checkpoint as checkpoint

    checkpoint._load_checkpoint_hf = load


def load(ddp_model, optimizer, args, load_path):
    from transformers import AutoModelForCausalLM

    source = AutoModelForCausalLM.from_pretrained(load_path, torch_dtype=torch.bfloat16).state_dict()
    groups = args.num_query_groups
    for name, parameter in ddp_model[0].named_parameters():
        value = convert(name.removeprefix("module.").removeprefix("module."), source, groups)
        with torch.no_grad():
            parameter.copy_(value.to(parameter.dtype))
    if optimizer is not None:
        optimizer.reload_model_params()
    return 0, 0


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
