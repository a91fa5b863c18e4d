"""Checkpoints from nothing: what is on disk, and how versions differ."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stitch_core.checkpoint import Checkpoint as Directory
from stitch_core.files import PosixFiles
from stitch_recipes.layout import formats
from stitch_recipes.layout.geometry import Geometry
from stitch_recipes.layout.masters import initial
from stitch_recipes.layout.quantize import dequantize
from stitch_recipes.layout.rounding import from_bf16
from stitch_recipes.layout.scaled import scaled, scaled_checkpoint
from stitch_recipes.layout.spec import Tensor
from stitch_recipes.layout.synthesis import (
    Stored,
    Synthetic,
    Training,
    stored,
    synthetic_seed,
    write_checkpoint,
)
from stitch_recipes.layout.synthetic import changed, densities, perturbed
from stitch_recipes.layout.tensors import tensors
from stitch_recipes.schema import Checkpoint
from tests.recipes.layout.models import model

FILES = PosixFiles()


def in_full(*values: object) -> Any:
    """A parameter for `make test` only: what it would find, another one mostly finds in `make check`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def small(name: str, key: str) -> tuple[Geometry, Checkpoint]:
    """Four experts are enough here."""
    described, all_of_it = model(name)
    geometry = scaled(described.geometry)
    experts = geometry.experts and geometry.experts.model_copy(update={"n_routed_experts": 4})
    how = scaled_checkpoint(all_of_it[key], described.geometry)
    return geometry.model_copy(update={"experts": experts}), how


def differing(one: Stored, a: int, b: int) -> float:
    """Elements of another value, as a fraction; nibbles where two are in a byte."""
    x, y = one.at(a), one.at(b)
    if one.tensor.name.endswith(".weight_packed") or one.tensor.dtype == "U8":
        return float(np.mean([(x & 15) != (y & 15), (x >> 4) != (y >> 4)]))
    width = {"BF16": "<u2", "F32": "<u4"}.get(one.tensor.dtype, "u1")
    return float(np.mean(x.view(width) != y.view(width)))


def test_the_directory_is_the_layout_in_shards_with_index_and_config(tmp_path: Path) -> None:
    geometry, how = small("glm-5.2", "nvfp4")
    content = [(one.tensor, one.at(0)) for one in stored(geometry, how)]
    write_checkpoint(tmp_path / "model", FILES, geometry, how, content, shard_bytes=2 << 20)
    found = Directory.open(tmp_path / "model", FILES)
    wanted = {t.name: (t.dtype, t.shape) for t in formats.quantized(tensors(geometry), how)}
    assert {name: (ref.dtype, ref.shape) for name, ref in found.tensors.items()} == wanted
    assert len(found.weight_files) > 3
    sizes = [(tmp_path / "model" / file).stat().st_size for file in found.weight_files]
    assert max(sizes) < 3 << 20
    beside = {"config.json", "hf_quant_config.json", "model.safetensors.index.json"}
    assert {path.name for path in (tmp_path / "model").iterdir()} == {*found.weight_files, *beside}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(FileExistsError, match="is there already"):
        write_checkpoint(tmp_path / "model", FILES, geometry, how, content[:1])


def test_the_same_seed_gives_the_same_bytes_and_another_others() -> None:
    geometry, how = small("qwen3-0.6b", "bf16")
    a, b, other = ([one.at(1).tobytes() for one in stored(geometry, how, seed=s, steps=1)] for s in (1, 1, 2))
    assert a == b
    assert all(x != y for x, y in zip(a, other, strict=True))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        in_full("glm-4.5-air", "fp8"),
        ("glm-5.2", "fp8"),
        ("qwen3-30b-a3b", "nvfp4"),
        in_full("kimi-k3", "mxfp4"),
        ("moonlight-16b-a3b", "int4"),
    ],
)
def test_quantized_weights_mean_what_the_masters_are(name: str, key: str) -> None:
    geometry, how = small(name, key)
    inside = formats.scope(how)
    masters = [tensor for tensor in tensors(geometry) if inside(tensor)][:12]
    found = {one.tensor.name: one for one in stored(geometry, how)}
    for master in masters:
        module = master.name.removesuffix(".weight")
        made = {
            part.name.removeprefix(module): array(found[part.name]) for part in formats.parts(master, how)
        }
        back = dequantize(made, how.quantization, formats.group_of(how))
        weights = initial(master, 0)
        assert np.sqrt(np.mean((back - weights) ** 2)) < 0.13 * np.sqrt(np.mean(weights**2)), master.name


def array(one: Stored) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    kinds = {"BF16": "<u2", "F32": "<f4", "I32": "<i4"}
    return one.at(0).view(kinds.get(one.tensor.dtype, "u1")).reshape(one.tensor.shape)


def test_gate_and_up_of_nvfp4_share_their_second_scale_in_every_version() -> None:
    geometry, how = small("qwen3-30b-a3b", "nvfp4")
    for change in (Training(1e-4), Synthetic({"quantized": 0.5, "high_precision": 0.5})):
        found = {one.tensor.name: one for one in stored(geometry, how, steps=2, change=change)}
        gates = [name for name in found if name.endswith("gate_proj.weight_scale_2")]
        assert len(gates) == 8
        for version in range(3):
            pairs = [(found[g].at(version), found[g.replace("gate", "up")].at(version)) for g in gates]
            assert all(np.array_equal(a, b) for a, b in pairs)
        assert any(not np.array_equal(found[g].at(0), found[g].at(2)) for g in gates)


def test_what_is_immutable_never_changes_and_the_rest_does() -> None:
    for change in (Training(1e-5), Synthetic(densities("nvfp4-modelopt", {}))):
        geometry, how = small("glm-5.2", "nvfp4")
        for one in stored(geometry, how, steps=2, change=change):
            fixed = one.tensor.name.startswith("model.layers.6.") or one.tensor.name.endswith("input_scale")
            if fixed:
                assert np.array_equal(one.at(0), one.at(2)), one.tensor.name
            elif one.at(0).size > 4000 and one.tensor.name.endswith(".weight"):
                assert not np.array_equal(one.at(0), one.at(2)), one.tensor.name


def overall(content: list[Stored], dtype: str, end: str) -> float:
    chosen = [one for one in content if one.tensor.dtype == dtype and one.tensor.name.endswith(end)]
    sizes = [one.at(0).size for one in chosen]
    return float(np.average([differing(one, 1, 2) for one in chosen], weights=sizes))


@pytest.mark.parametrize(("rate", "bf16", "fp8"), [(1e-6, 0.00765, 0.00078), in_full(1e-5, 0.0533, 0.0065)])
def test_training_changes_as_many_elements_as_were_measured_of_rl(
    rate: float, bf16: float, fp8: float
) -> None:
    """Measured at these rates: AdamW with FP32 masters, BF16 casts and FP8 of 128 by 128 made of them."""
    geometry, how = small("glm-5.2", "fp8")
    how = how.model_copy(update={"immutable": []})
    content = list(stored(geometry, how, steps=2, change=Training(rate)))
    assert overall(content, "BF16", "embed_tokens.weight") == pytest.approx(bf16, rel=0.4)
    assert overall(content, "F8_E4M3", "_proj.weight") == pytest.approx(fp8, rel=0.4)


@pytest.mark.parametrize(
    ("name", "key", "dtype", "end", "rate"),
    [
        ("glm-5.2", "fp8", "F8_E4M3", "_proj.weight", 0.006),
        ("qwen3-30b-a3b", "nvfp4", "U8", ".weight", 0.003),
        in_full("kimi-k3", "mxfp4", "U8", ".weight_packed", 0.003),
        ("moonlight-16b-a3b", "int4", "I32", ".weight_packed", 0.003),
        in_full("kimi-k3", "mxfp4", "BF16", "lm_head.weight", 0.01),
    ],
)
def test_synthetic_versions_have_the_public_tables_densities(
    name: str, key: str, dtype: str, end: str, rate: float
) -> None:
    geometry, how = small(name, key)
    how = how.model_copy(update={"immutable": []})
    change = Synthetic(densities(how.quantization, {}))
    content = list(stored(geometry, how, steps=2, change=change))
    assert overall(content, dtype, end) == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        in_full("glm-4.5-air", "fp8"),
        in_full("glm-5.2", "fp8"),
        ("glm-5.2", "nvfp4"),
        in_full("kimi-k3", "mxfp4"),
        in_full("kimi-k2.6", "int4"),
    ],
)
def test_a_checkpoint_on_disk_is_perturbed_as_one_that_was_made_here(name: str, key: str) -> None:
    """By names alone, which is all that a published one has."""
    geometry, how = small(name, key)
    density = densities(how.quantization, {})
    content = list(stored(geometry, how, seed=3, steps=2, change=Synthetic(density)))
    for version in (1, 2):
        before = ((one.tensor, one.at(version - 1)) for one in content)
        made = perturbed(before, how, density, synthetic_seed(3, version))
        for one, (tensor, data) in zip(content, made, strict=True):
            assert tensor == one.tensor
            assert np.array_equal(data, one.at(version)), tensor.name


def test_a_recipes_own_densities_come_first() -> None:
    assert densities("nvfp4-modelopt", {"quantized": 0.00375}) == {
        "quantized": 0.00375, "high_precision": 0.01,
    }  # fmt: skip


def test_no_fp8_value_becomes_no_number() -> None:
    data = np.tile(np.array([0x7E, 0xFE, 0x7D, 0x00], np.uint8), 1000)
    tensor = Tensor("m.weight", "F8_E4M3", (4, 1000))
    made = changed(data, tensor, True, {"quantized": 1.0, "high_precision": 0.0}, 0)
    assert not ((made & 0x7F) == 0x7F).any()
    assert (made != data).all()


def test_norms_are_near_one_and_decays_are_those_of_the_layer() -> None:
    geometry, how = small("kimi-k3", "mxfp4")
    found = {one.tensor.name: one for one in stored(geometry, how)}
    norms = [
        one for name, one in found.items() if name.endswith("norm.weight") and one.tensor.dtype == "BF16"
    ]
    assert len(norms) > 10
    for one in norms:
        assert abs(from_bf16(one.at(0).view("<u2")).mean() - 1) < 0.02
    decays = next(one for name, one in found.items() if name.endswith(".A_log"))
    assert ((decays.at(0).view("<f4") >= 0) & (decays.at(0).view("<f4") <= np.log(16))).all()
