"""The language model of a checkpoint with a vision tower, made by the command that prepares it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stitch_core.checkpoint import Checkpoint
from stitch_core.files import PosixFiles
from stitch_recipes import catalogue
from stitch_recipes.layout.formats import quantized
from stitch_recipes.layout.language_model import extract
from stitch_recipes.layout.scaled import scaled, scaled_checkpoint
from stitch_recipes.layout.tensors import tensors
from stitch_recipes.profile.bases import made
from stitch_recipes.schema import Recipe


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """Kimi K2.6 as it is published, small, with files of the kinds that its repository has."""
    tree = catalogue.load("kimi-k2.6/nvfp4-serve").model_dump()
    recipe = Recipe.model_validate({**tree, "serve": "int4"})
    directory = made(recipe, "small", tmp_path / "int4").directory
    for name in (
        "tokenization_kimi.py",
        "tiktoken.model",
        "preprocessor_config.json",
        "generation_config.json",
    ):
        (directory / name).write_text(name)
    return directory


def extracted(whole: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stitch_recipes.layout.language_model", whole, target]
    return subprocess.run(
        [*command, "--model-type", "deepseek_v3"],
        capture_output=True, text=True, timeout=120, env={"PYTHONPATH": ":".join(filter(None, sys.path))},
    )  # fmt: skip


def test_it_has_the_tensors_that_the_recipe_trains_on_to_the_last_byte(whole: Path, tmp_path: Path) -> None:
    done = extracted(whole, tmp_path / "text")
    assert done.returncode == 0, done.stderr
    recipe = catalogue.load("kimi-k2.6/nvfp4")
    small = scaled(recipe.model.geometry)
    how = scaled_checkpoint(recipe.checkpoints["text"], recipe.model.geometry)
    expected = {tuple(tensor) for tensor in quantized(tensors(small), how)}
    before, after = (Checkpoint.open(place, PosixFiles()) for place in (whole, tmp_path / "text"))
    assert {(name, ref.dtype, tuple(ref.shape)) for name, ref in after.tensors.items()} == expected
    for name in after.tensors:
        assert after.read(name) == before.read(f"language_model.{name}")
    assert any(name.startswith("vision_tower.") for name in before.tensors)


def test_its_config_is_the_models_own_and_its_tokenizer_comes_with_it(whole: Path, tmp_path: Path) -> None:
    published = json.loads((whole / "config.json").read_text())
    published["text_config"]["auto_map"] = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    (whole / "config.json").write_text(json.dumps(published))
    extract(whole, tmp_path / "text", "deepseek_v3")
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3"
    assert config["architectures"] == published["text_config"]["architectures"] == ["DeepseekV3ForCausalLM"]
    assert config["hidden_size"] == published["text_config"]["hidden_size"]
    assert config["quantization_config"]["format"] == "pack-quantized"
    assert config["auto_map"] == published["text_config"]["auto_map"]
    assert "vision_config" not in config
    kept = {file.name for file in (tmp_path / "text").iterdir() if file.suffix != ".safetensors"}
    assert {"tokenization_kimi.py", "tiktoken.model", "generation_config.json", "tokenizer.json"} <= kept
    assert "preprocessor_config.json" not in kept  # it would ask for the code that prepares images


def test_what_has_no_language_model_inside_is_named(tmp_path: Path) -> None:
    plain = made(catalogue.load("qwen3-0.6b/miles"), "small", tmp_path / "plain").directory
    done = extracted(plain, tmp_path / "text")
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr == f"{plain / 'config.json'}: there is no text_config in it (KeyError('text_config'))\n"
    )
    config = plain / "config.json"
    config.write_text(json.dumps({"text_config": {"architectures": ["A"]}}))
    assert "no tensor's name begins with language_model." in extracted(plain, tmp_path / "text").stderr
    config.write_text(json.dumps({"text_config": {}}))
    assert "does not say its architectures" in extracted(plain, tmp_path / "text").stderr
    assert not (tmp_path / "text").exists()
    assert extracted(tmp_path / "nowhere", tmp_path / "text").returncode == 1
