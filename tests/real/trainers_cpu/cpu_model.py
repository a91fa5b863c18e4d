"""A GPT of plain torch layers, under the parameter names of Transformer Engine that the converters know.

Passed by `--custom-model-provider-path cpu_model.provider`.
"""

import itertools

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from torch.nn.functional import scaled_dot_product_attention


class NormThenLinear(ColumnParallelLinear):
    """RMS norm and a column-parallel linear layer, the norm's weight in the layer."""

    def __init__(self, input_size, output_size, *, config, **kwargs):
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.tensor_model_parallel = False
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel
        self.epsilon = config.layernorm_epsilon

    def forward(self, x, *args, **kwargs):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return super().forward(h.to(x.dtype) * self.layer_norm_weight.to(x.dtype), *args, **kwargs)


class Attention(torch.nn.Module):
    """Causal attention over one batch, or over sequences packed one behind the other."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, *args, **kwargs):
        super().__init__()
        self.config = config

    def forward(self, q, k, v, attention_mask=None, packed_seq_params=None, **kwargs):
        k, v = (t.repeat_interleave(q.shape[-2] // t.shape[-2], dim=-2) for t in (k, v))
        if packed_seq_params is None:
            heads_first = (t.permute(1, 2, 0, 3) for t in (q, k, v))
            out = scaled_dot_product_attention(*heads_first, is_causal=True).permute(2, 0, 1, 3)
            return out.reshape(out.shape[0], out.shape[1], -1)
        ends = packed_seq_params.cu_seqlens_q.tolist()
        rows = []
        for start, end in itertools.pairwise(ends):
            if end > start:
                part = (t[start:end].transpose(0, 1)[None] for t in (q, k, v))
                rows.append(scaled_dot_product_attention(*part, is_causal=True)[0].transpose(0, 1))
        if ends[-1] < q.shape[0]:
            rows.append(torch.zeros_like(q[ends[-1] :]))
        out = torch.cat(rows)
        return out.reshape(out.shape[0], -1)


class Experts(torch.nn.Module):
    """What this rank holds of a layer's experts, named as Transformer Engine's grouped layers are."""

    def __init__(self, num_local_experts, config, *args, **kwargs):
        super().__init__()
        inner, outer = config.moe_ffn_hidden_size, config.hidden_size
        shapes = {"linear_fc1": (2 * inner, outer), "linear_fc2": (outer, inner)}
        for name, shape in shapes.items():
            layer = torch.nn.Module()
            for expert in range(num_local_experts):
                weight = torch.nn.Parameter(torch.zeros(shape, dtype=config.params_dtype))
                weight.allreduce = config.expert_model_parallel_size == 1
                weight.tensor_model_parallel = False
                layer.register_parameter(f"weight{expert}", weight)
            setattr(self, name, layer)


def provider(pre_process=True, post_process=True, vp_stage=None):
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    spec = get_gpt_layer_local_spec(
        num_experts=args.num_experts, qk_layernorm=args.qk_layernorm, normalization="RMSNorm"
    )
    layer = spec.submodules
    layer.input_layernorm = IdentityOp
    layer.self_attention.submodules.linear_qkv = NormThenLinear
    layer.self_attention.submodules.core_attention = Attention
    if args.num_experts:
        layer.mlp.submodules.experts = ModuleSpec(module=Experts)
    else:
        layer.pre_mlp_layernorm = IdentityOp
        layer.mlp.submodules.linear_fc1 = NormThenLinear
    return GPTModel(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
    )
