"""A tiny Qwen3 with a tokenizer of single characters, and prompts for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

LAYOUT = [
    "--num-layers", "2", "--hidden-size", "64", "--ffn-hidden-size", "128", "--num-attention-heads", "4",
    "--group-query-attention", "--num-query-groups", "2", "--kv-channels", "16", "--qk-layernorm", "--swiglu",
    "--normalization", "RMSNorm", "--norm-epsilon", "1e-6", "--disable-bias-linear",
    "--untie-embeddings-and-output-weights", "--use-rotary-position-embeddings", "--rotary-base", "1000000",
    "--vocab-size", "256", "--max-position-embeddings", "512", "--seq-length", "128",
]  # fmt: skip


def make(root: Path) -> None:
    """Write ``root/boot`` and ``root/prompts.jsonl``. Needs transformers."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=False,
        rope_theta=1e6, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(root / "boot")
    vocabulary = {chr(i) if i > 31 else f"<{i}>": i for i in range(256)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<0>", eos_token="<1>", pad_token="<2>"
    )
    fast.save_pretrained(root / "boot")
    prompts = [{"input": f"{a}+{b}=", "label": str(a + b)} for a in range(4) for b in range(4)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
