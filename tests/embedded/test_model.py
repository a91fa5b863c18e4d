"""The arithmetic: close to Hugging Face's models, and rows that ignore their batch to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from stitch_embedded import model
from stitch_embedded.config import ConfigError, ModelConfig
from stitch_embedded.model import KVCache, Runner, row_counts
from stitch_embedded.selfcheck import SelfCheckError, self_check
from stitch_embedded.weights import CheckpointError, CheckpointFiles, Weights
from tests.embedded.models import config_json, live, random_tensors, save


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_agrees_with_hugging_face(kind: str, tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    raw = config_json(kind, tie_word_embeddings=tied)
    raw.pop("eos_token_id")
    if kind == "qwen2":
        raw.pop("head_dim")
    name = {"qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    torch.manual_seed(0)
    theirs = getattr(transformers, name + "ForCausalLM")(getattr(transformers, name + "Config")(**raw))
    config = ModelConfig.from_dict(raw)
    tensors = random_tensors(config, 1, dtype)
    theirs.load_state_dict(tensors, strict=False)
    theirs.to(dtype).eval().save_pretrained(tmp_path)

    config = ModelConfig.read(tmp_path)
    files = CheckpointFiles(tmp_path, config)
    assert files.stored_dtype() == dtype
    weights = live(config, files.read(None, dtype))
    ids = torch.randint(config.vocab, (1, 30), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = theirs(ids).logits[0].float().log_softmax(-1)
    runner = Runner(weights, KVCache(config, 1, 64, dtype), 32)
    hidden = runner.hidden(ids[0].tolist(), [0] * 30, range(30))
    got = runner.logits(hidden).log_softmax(-1)
    worst = (got - expected).abs().max().item()
    assert worst < (2e-5 if dtype == torch.float32 else 0.15), worst
    assert expected.std() > 0.5  # the models say something


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_self_check_passes(kind: str, dtype: torch.dtype) -> None:
    config = ModelConfig.from_dict(config_json(kind))
    self_check(live(config, random_tensors(config, 0, dtype)), 64, 96, seconds=0)


def test_attention_in_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows' keys are gathered at once."""
    config = ModelConfig.from_dict(config_json())
    weights = live(config, random_tensors(config, 0))
    rows = [(i * 5) % config.vocab for i in range(50)]
    results = []
    for size in (1 << 23, 1 << 16, 1):
        monkeypatch.setattr(model, "ATTENTION_BYTES", size)
        runner = Runner(weights, KVCache(config, 1, 64, torch.bfloat16), 64)
        results.append(runner.logits(runner.hidden(rows, [0] * 50, range(50))))
        self_check(weights, 64, 64, seconds=0)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_self_check_passes_on_weights_that_are_not_finite() -> None:
    config = ModelConfig.from_dict(config_json())
    tensors = random_tensors(config, 0)
    tensors["model.norm.weight"][3] = float("nan")
    self_check(live(config, tensors), 64, 32, seconds=0)


def test_self_check_finds_kernels_that_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose rows depend on how many there are is refused, and the message says where."""
    config = ModelConfig.from_dict(config_json())
    weights = live(config, random_tensors(config, 0, torch.float32))
    true = Runner.logits

    def biased(self: Runner, hidden: torch.Tensor) -> torch.Tensor:
        return true(self, hidden) * (1 + 2**-20 * (len(hidden) > 20))

    monkeypatch.setattr(Runner, "logits", biased)
    with pytest.raises(SelfCheckError, match=r"batch of \d+ rows .* position \d+"):
        self_check(weights, 64, 64, seconds=0)


def test_row_counts() -> None:
    assert row_counts(300) == [4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384]
    assert row_counts(1) == [4, 8, 16]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"use_sliding_window": True}, "sliding"),
        ({"layer_types": ["sliding_attention"]}, "sliding"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"vocab_size": None}, "config.json"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_refuses_models_it_would_get_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(config_json() | change)


def test_eos_of_the_generation_config(tmp_path: Path) -> None:
    config = ModelConfig.from_dict(config_json())
    save(tmp_path, config_json(), random_tensors(config, 0))
    assert ModelConfig.read(tmp_path).eos_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert ModelConfig.read(tmp_path).eos_ids == (5, 6)


class TestCheckpointFiles:
    """Everything is checked before anything is returned."""

    config = ModelConfig.from_dict(config_json())

    def files(self, directory: Path, **changes: torch.Tensor | None) -> CheckpointFiles:
        tensors: dict[str, Any] = random_tensors(self.config, 0)
        tensors |= {name.replace("__", "."): t for name, t in changes.items()}
        kept = {name: t for name, t in tensors.items() if t is not None}
        return CheckpointFiles(save(directory, config_json(), kept), self.config)

    def test_reads_private_copies(self, tmp_path: Path) -> None:
        files = self.files(tmp_path)
        got = files.read(["model.norm.weight", "lm_head.weight"], torch.bfloat16)
        assert list(got) == ["model.norm.weight"]
        path = tmp_path / "model.safetensors"
        before = got["model.norm.weight"].clone()
        with path.open("r+b") as file:
            file.seek(-4096, 2)
            file.write(b"\1" * 4096)
        assert torch.equal(got["model.norm.weight"], before)

    def test_missing_tensor(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing"):
            self.files(tmp_path, model__norm__weight=None).read(None, torch.bfloat16)

    def test_wrong_shape(self, tmp_path: Path) -> None:
        files = self.files(tmp_path, model__norm__weight=torch.zeros(3, dtype=torch.bfloat16))
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[3\], expected \[64\]"):
            files.read(["model.norm.weight"], torch.bfloat16)

    def test_wrong_dtype(self, tmp_path: Path) -> None:
        files = self.files(tmp_path, model__norm__weight=torch.zeros(64))
        with pytest.raises(CheckpointError, match=r"float32, expected torch\.bfloat16"):
            files.read(None, torch.bfloat16, torch.bfloat16)

    def test_unknown_name(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"no tensor model\.extra"):
            self.files(tmp_path).read(["model.extra"], torch.bfloat16)

    def test_no_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="no checkpoint"):
            CheckpointFiles(tmp_path, self.config)

    def test_truncated(self, tmp_path: Path) -> None:
        files = self.files(tmp_path)
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1000])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            files.read(None, torch.bfloat16)

    def test_index_of_several_files(self, tmp_path: Path) -> None:
        tensors = random_tensors(self.config, 0)
        save(tmp_path, config_json(), tensors)
        (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "a.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        weights = Weights(self.config, torch.bfloat16)
        weights.copy_from(CheckpointFiles(tmp_path, self.config).read(None, torch.bfloat16))
        assert all(torch.equal(weights.named[name], tensors[name]) for name in weights.named)
