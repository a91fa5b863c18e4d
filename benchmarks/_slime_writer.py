"""Stock slime's delta updater on one rank and a CPU, with and without Stitch's hook: for publish.py.

``_slime_writer.py CHECKOUT [--quick]`` prints the median ratio, both medians in seconds and the model's size.
"""

# ruff: noqa: E402 - the stand-ins come before what needs them
from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHECKOUT, QUICK = sys.argv[1], "--quick" in sys.argv
sys.path[:0] = [CHECKOUT, str(ROOT), *(str(p) for p in (ROOT / "plugins").iterdir())]
sys.path.insert(0, str(ROOT / "tests" / "real" / "trainers_cpu"))
os.environ |= {"SLIME_ACCELERATOR": "cputest", "TORCHDYNAMO_DISABLE": "1"}

import missing_modules

missing_modules.install()
import cuda_calls

cuda_calls.install()
import framework

framework.install()

import torch
import torch.distributed
from cpu_model import Attention, NormThenLinear
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import save_file
from slime.backends.megatron_utils.update_weight import update_weight_from_disk_delta as stock
from slime.utils.distributed_utils import get_gloo_group, init_gloo_group

from benchmarks.harness import interleaved, median_ratio
from stitch_core.trainers import hooks
from stitch_core.trainers.group import ProcessGroup

HIDDEN, FFN, HEADS, GROUPS, CHANNELS = 1024, 3072, 16, 8, 64
LAYERS, VOCABULARY, ROUNDS = (2, 16384, 3) if QUICK else (6, 32768, 9)
DENSITY = 0.01


class Wrapped(torch.nn.Module):
    """As Megatron wraps a model."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module, self.config = module, module.config


class Engine:
    """An engine that does at once what it is asked."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args, **kwargs: {"success": True})


def build() -> Wrapped:
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=HEADS,
        num_query_groups=GROUPS, kv_channels=CHANNELS, use_cpu_initialization=True, bf16=True,
        params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, normalization="RMSNorm",
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        qk_layernorm=True, bias_activation_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, bias_dropout_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
    layer.self_attention.submodules.linear_qkv = NormThenLinear
    layer.self_attention.submodules.core_attention = Attention
    layer.mlp.submodules.linear_fc1 = NormThenLinear
    gpt = GPTModel(
        config, spec, vocab_size=VOCABULARY, max_sequence_length=64, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    model = Wrapped(gpt).to(torch.bfloat16)
    for parameter in model.parameters():
        if not hasattr(parameter, "tensor_model_parallel"):
            parameter.tensor_model_parallel = False
    return model


def learn(model: Wrapped, generator: torch.Generator) -> None:
    """About one element in a hundred moves by one unit in the last place."""
    for parameter in model.parameters():
        flat = parameter.data.view(torch.int16).view(-1)
        count = max(1, int(flat.numel() * DENSITY))
        flat[torch.randint(0, flat.numel(), (count,), generator=generator)] ^= 1


def updater(kind: type, root: Path, name: str, model: Wrapped, hook: str | None) -> Any:
    args = SimpleNamespace(
        update_weight_disk_dir=str(root / name), update_weight_delta_encoding="xor",
        update_weight_delta_checksum="xxh3-128", custom_update_weight_post_write_path=hook,
        update_weight_buffer_size=512 << 20, hf_checkpoint=str(root / "boot"), num_experts=None,
        update_weight_local_checkpoint_dir=str(root / "unused"), vocab_size=VOCABULARY,
        kv_channels=CHANNELS, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS,
        q_lora_rank=None, megatron_to_hf_mode="raw", stitch_run="bench", stitch_store=f"file:{root}/store",
        stitch_work=str(root / "work"),
    )  # fmt: skip
    made = kind(args, [model], dict, model_name="qwen3", quantization_config=None)
    made.connect_rollout_engines([Engine()], None)
    return made


def main(root: Path) -> None:
    torch.distributed.init_process_group("gloo", f"file://{root}/rendezvous", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    init_gloo_group()
    stock.ray = SimpleNamespace(get=lambda value: value)
    generator = torch.Generator().manual_seed(0)
    model = build()
    bare = updater(stock.UpdateWeightFromDiskDelta, root, "bare", model, None)
    (root / "boot").mkdir()
    boot = {name: tensor.detach().clone() for name, tensor in bare._iter_hf_tensors()}
    save_file(boot, root / "boot" / "model.safetensors")
    stitched = type("Stitched", (stock.UpdateWeightFromDiskDelta,), {})
    hooked = updater(stitched, root, "hooked", model, "stitch_slime.hooks.post_write")
    hooks.set_up(hooked.args, ProcessGroup(torch.distributed, get_gloo_group), "slime", lambda: None)
    hooks.start_through_stitch(stitched, lambda _: None)
    for one in (bare, hooked):
        one.update_weights()  # takes the snapshot, and claims
    times: dict[str, list[float]] = {"bare": [], "hooked": []}
    for number in range(ROUNDS + 1):
        learn(model, generator)
        sides = {"bare": bare.update_weights, "hooked": hooked.update_weights}
        order = sides if number % 2 else dict(reversed(sides.items()))
        for name, took in interleaved(order, 1).items():
            if number:  # the first round warms up
                times[name] += took
    megabytes = sum(tensor.nbytes for tensor in boot.values()) / 1e6
    medians = [statistics.median(times[name]) for name in ("bare", "hooked")]
    print(median_ratio(times["hooked"], times["bare"]), *medians, megabytes, flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="stitch-bench-") as directory:
        main(Path(directory))
    os._exit(0)  # gloo's threads have nothing more to do
