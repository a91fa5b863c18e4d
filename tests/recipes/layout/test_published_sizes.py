"""The layout of every model, at full size, against what was published of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stitch_core.cli.main import main
from stitch_recipes import catalogue
from stitch_recipes.check.sizes import of_checkpoint
from stitch_recipes.layout import formats
from stitch_recipes.layout.tensors import tensors
from tests.recipes.layout.models import LARGE, checkpoints, model

EXACT = {
    ("glm-4.7-flash", "bf16"): (9_703, 62_442_983_168),
    ("glm-5.2", "fp8"): (118_629, 755_617_140_416),
    ("glm-5.2", "nvfp4"): (207_041, 617_602_082_816),
    ("kimi-k2.6", "int4"): (208_550, 595_148_192_736),
    ("kimi-k3", "mxfp4"): (497_220, 1_560_860_324_864),
    ("qwen3-4b", "bf16"): (398, 8_044_936_192),
}
"""Tensors and bytes of published indices; of glm-5.2/nvfp4 and kimi-k2.6/int4 fewer digits are published."""

ROUNDED = {
    ("glm-4.5-air", "fp8"): "112.6",
    ("glm-5.2", "fp8"): "755.6",
    ("glm-5.2", "nvfp4"): "617.6",
    ("glm-5.2", "nvfp4-nvidia"): "464.8",
    ("kimi-k2.6", "nvfp4-nvidia"): "595.148",
    ("qwen3-30b-a3b", "bf16"): "61.06",
}
"""GB as they were published."""


def cases() -> Iterator[object]:
    for name, key in checkpoints():
        marks = [pytest.mark.slow] if name in LARGE else []
        yield pytest.param(name, key, marks=marks, id=f"{name}-{key}")


@pytest.mark.parametrize(("name", "key"), list(cases()))
def test_the_layout_reproduces_what_was_published(name: str, key: str) -> None:
    described, all_of_it = model(name)
    checkpoint = all_of_it[key]
    count, size = formats.totals(described.geometry, checkpoint)
    if (name, key) in EXACT:
        assert (count, size) == EXACT[name, key]
    if (name, key) in ROUNDED:
        digits = ROUNDED[name, key]
        assert f"{size / 1e9:.{len(digits.partition('.')[2])}f}" == digits
    assert list(of_checkpoint(key, described.geometry, checkpoint)) == []


def test_the_check_finds_a_layout_that_is_not_the_published_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was said that the layout was held to bytes_checked; only these tests did that, of our own files."""
    own = tmp_path / "own.toml"
    text = (catalogue.home() / "models" / "qwen3-4b.toml").read_text("utf-8")
    own.write_text(text.replace("num_hidden_layers = 36", "num_hidden_layers = 35"))
    assert main(["recipe", "check", f"{own}/slime"]) == 1
    assert "checkpoints.bf16.canonical_gb: 8.044936192, but the layout has 7.84" in capsys.readouterr().out
    checkpoint = model("qwen3-4b")[1]["bf16"]
    geometry = model("qwen3-4b")[0].geometry
    (said,) = of_checkpoint("a", geometry, checkpoint.model_copy(update={"tensors": 1}))
    assert said == "checkpoints.a.tensors: 1, but the layout has 398"
    (said,) = of_checkpoint("a", geometry, checkpoint.model_copy(update={"canonical_gb": None}))
    assert "no canonical_gb to compare with" in said


@pytest.mark.parametrize("name", ["glm-4.7-flash", "moonlight-16b-a3b"])
def test_no_name_appears_twice(name: str) -> None:
    described, all_of_it = model(name)
    for checkpoint in all_of_it.values():
        found = [tensor.name for tensor in formats.quantized(tensors(described.geometry), checkpoint)]
        assert len(set(found)) == len(found)


def test_a_group_that_does_not_come_out_even_is_named() -> None:
    described, all_of_it = model("moonlight-16b-a3b")
    odd = all_of_it["int4"].model_copy(update={"group_size": 96})
    with pytest.raises(formats.LayoutError, match=r"model.layers.1.mlp.experts.0.gate_proj.weight: 2048 "):
        formats.totals(described.geometry, odd)
    with pytest.raises(formats.LayoutError, match="int4-packed needs the checkpoint's group_size"):
        formats.totals(described.geometry, odd.model_copy(update={"group_size": None}))
