"""One tensor-parallel rank: megatron-core trains a small GPT, a plain gather feeds Stitch's own encoder.

``worker.py ROOT RANK SIZE STEPS``. After each step it leaves its own shards, as Megatron holds them, in
``ROOT/shards``: what is published is compared with those.
"""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file

from stitch_core.files import PosixFiles
from stitch_core.safetensors import Tensor
from stitch_core.trainers.group import ProcessGroup
from stitch_core.trainers.own_delta import OwnDelta
from stitch_core.trainers.publication import GroupPublisher
from stitch_core.trainers.settings import TrainerSettings
from stitch_core.trainers.torch_bytes import as_tensor
from tests.tensor_parallel.policy import FFN, HEADS, HIDDEN, KV_CHANNELS, LAYERS, QUERY_GROUPS, VOCABULARY

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "real" / "trainers_cpu"))
import cuda_calls
from hf_load import convert, shard

# What local layers call their norms, and what the loader knows, where Transformer Engine fuses them.
NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def build(size: int) -> DistributedDataParallel:
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=HEADS,
        num_query_groups=QUERY_GROUPS, kv_channels=KV_CHANNELS, tensor_model_parallel_size=size,
        use_cpu_initialization=True, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, qk_layernorm=True,
        bias_activation_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, persist_layer_norm=False, apply_rope_fusion=False,
    )  # fmt: skip
    gpt = GPTModel(
        config, get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"), vocab_size=VOCABULARY,
        max_sequence_length=64, share_embeddings_and_output_weights=False, position_embedding_type="rope",
    ).to(torch.bfloat16)  # fmt: skip
    return DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)


def known_name(name: str) -> str:
    for ours, theirs in NORMS.items():
        name = name.replace(ours, theirs)
    return name


def load(gpt: GPTModel, checkpoint: Path) -> None:
    source = load_file(checkpoint)
    for name, parameter in gpt.named_parameters():
        whole = convert(known_name(name), source, QUERY_GROUPS)
        with torch.no_grad():
            parameter.copy_(shard(name, whole, parameter))


def gather(gpt: GPTModel) -> dict[str, Tensor]:
    """The whole policy under Hugging Face's names, on rank 0; nothing on the others."""
    group = parallel_state.get_tensor_model_parallel_group()
    size, rank = group.size(), group.rank()
    whole: dict[str, torch.Tensor] = {}
    for name, parameter in gpt.named_parameters():
        value = parameter.detach()
        if getattr(parameter, "tensor_model_parallel", False):
            parts = [torch.empty_like(value) for _ in range(size)]
            torch.distributed.all_gather(parts, value.contiguous(), group=group)
            if name.endswith("linear_fc1.weight"):  # each rank has its part of the gate, then of up
                halves = [part.chunk(2) for part in parts]
                parts = [half[i] for i in range(2) for half in halves]
            value = torch.cat(parts, dim=parameter.partition_dim)
        if rank == 0:
            whole |= to_hugging_face(known_name(name), value)
    return {name: as_tensor(value) for name, value in whole.items()}


def to_hugging_face(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    top = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
    }
    if name in top:
        return {top[name]: value}
    _, _, layer, rest = name.split(".", 3)
    at = f"model.layers.{layer}."
    if rest == "self_attention.linear_qkv.weight":
        per_group = HEADS // QUERY_GROUPS
        grouped = value.view(QUERY_GROUPS, (per_group + 2) * KV_CHANNELS, HIDDEN)
        sizes = [per_group * KV_CHANNELS, KV_CHANNELS, KV_CHANNELS]
        parts = zip("qkv", grouped.split(sizes, dim=1), strict=True)
        return {f"{at}self_attn.{kind}_proj.weight": part.reshape(-1, HIDDEN) for kind, part in parts}
    if rest == "mlp.linear_fc1.weight":
        gate, up = value.chunk(2)
        return {f"{at}mlp.gate_proj.weight": gate, f"{at}mlp.up_proj.weight": up}
    names = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    }
    return {at + names[rest]: value}


def main(root: Path, rank: int, size: int, steps: int) -> None:
    torch.distributed.init_process_group(
        "gloo", f"file://{root}/rendezvous", timedelta(seconds=120), size, rank
    )
    cuda_calls.install()
    CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    torch.manual_seed(0)
    model = build(size)
    load(model.module, root / "boot" / "model.safetensors")
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16), [model]
    )
    settings = TrainerSettings("r", f"file:{root}/store", root / "boot", root / "work")
    publisher = GroupPublisher(settings, ProcessGroup(torch.distributed), producer={"name": "megatron-core"})
    publisher.claim()
    delta = OwnDelta(publisher, PosixFiles())
    numbers = [delta.publish(gather(model.module))]
    ids = torch.randint(0, VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(32).expand(2, 32)
    mask = torch.triu(torch.ones(1, 1, 32, 32, dtype=torch.bool), 1)
    for step in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(ids, positions, mask, labels=ids.roll(-1, 1)).float().mean()
        loss.backward()
        finalize_model_grads([model])  # norms of queries and keys, among others, are summed over ranks
        succeeded, _, _ = optimizer.step()
        assert succeeded
        local = {name: p.detach().clone() for name, p in model.module.named_parameters()}
        torch.save(local, root / "shards" / f"{step + 1}-{rank}.pt")
        numbers.append(delta.publish(gather(model.module), step=step))
        print(f"loss {loss.item():.4f}", flush=True)
    print("published", numbers, flush=True)
    os._exit(0)  # gloo's own threads may outlive the other rank


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(word) for word in sys.argv[2:5]))
