"""The scaled-down model of every recipe: small, of the same kinds of tensors, as divisible as it was."""

import re

import pytest

from stitch_recipes.layout import formats
from stitch_recipes.layout.geometry import Hybrid, Latent
from stitch_recipes.layout.scaled import narrower, origins, scaled, scaled_checkpoint
from stitch_recipes.layout.spec import Tensor
from stitch_recipes.layout.tensors import tensors
from stitch_recipes.schema import Checkpoint
from tests.recipes.layout.models import LARGE, checkpoints, model, names

MODELS = [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in names()]
REPRESENTATIONS = [
    pytest.param(name, key, marks=[pytest.mark.slow] if name in LARGE else [], id=f"{name}-{key}")
    for name, key in checkpoints()
]


def kind(tensor: Tensor) -> tuple[str, str, int]:
    """What a tensor is, whatever its layer and expert."""
    return re.sub(r"\.\d+\.", ".N.", tensor.name), tensor.dtype, len(tensor.shape)


@pytest.mark.parametrize("name", MODELS)
def test_it_has_a_tensor_of_every_kind_and_no_other(name: str) -> None:
    geometry = model(name)[0].geometry
    small = list(tensors(scaled(geometry)))
    assert {kind(tensor) for tensor in small} == {kind(tensor) for tensor in tensors(geometry)}
    assert sum(tensor.nbytes for tensor in small) < 40e6


@pytest.mark.parametrize(("name", "key"), REPRESENTATIONS)
def test_every_representation_quantizes_the_same_kinds(name: str, key: str) -> None:
    geometry, checkpoint = model(name)[0].geometry, model(name)[1][key]
    small, how = scaled(geometry), scaled_checkpoint(checkpoint, geometry)
    formats.totals(small, how)  # every group comes out whole
    inside, was_inside = formats.scope(how), formats.scope(checkpoint)
    seen = [
        {(kind(t), inside(t)) for t in tensors(small)},
        {(kind(t), was_inside(t)) for t in tensors(geometry)},
    ]
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", names())
def test_there_are_a_dense_layer_and_two_of_experts_where_the_model_has_them(name: str) -> None:
    geometry = model(name)[0].geometry
    small = scaled(geometry)
    assert small.first_k_dense_replace == geometry.first_k_dense_replace
    assert small.num_hidden_layers - small.first_k_dense_replace >= 2
    assert (small.prediction, small.architecture) == (geometry.prediction, geometry.architecture)


def test_glm_5_2_keeps_layers_with_an_index_and_without() -> None:
    small = scaled(model("glm-5.2")[0].geometry)
    assert isinstance(small.attention, Latent)
    assert small.attention.indexer is not None
    has = [small.attention.indexer.in_layer(layer) for layer in range(small.num_hidden_layers + 1)]
    assert has == [True, True, True, False, False, False, True]  # the last one predicts, and has its own


def test_kimi_k3_keeps_three_linear_layers_and_one_of_full_attention() -> None:
    small = scaled(model("kimi-k3")[0].geometry)
    assert isinstance(small.attention, Hybrid)
    assert (small.num_hidden_layers, small.attention.full_layers) == (4, [3])


def test_rules_that_name_layers_name_those_that_are_left() -> None:
    described, all_of_it = model("glm-5.2")
    assert origins(described.geometry) == [0, 1, 2, 3, 40, 77, 78]
    how = scaled_checkpoint(all_of_it["nvfp4"], described.geometry)
    assert how.not_quantized == [r"\.shared_experts\.", r"^model\.layers\.5\."]
    assert how.immutable == ["model.layers.6."]
    inside = formats.scope(how)
    quantized = {t.name.split(".")[2] for t in tensors(scaled(described.geometry)) if inside(t)}
    assert quantized == {"3", "4", "6"}


@pytest.mark.parametrize(
    ("size", "factor", "small"),
    [(2048, 8, 256), (10944, 16, 704), (512, 24, 128), (4304, 9, 496), (96, 1, 96)],
)
def test_a_size_stays_as_divisible_as_it_was(size: int, factor: int, small: int) -> None:
    assert narrower(size, factor) == small
    assert all(size % unit == 0 or small % unit for unit in (16, 32, 64, 128))
    assert all(size % unit or small % unit == 0 for unit in (16, 32, 64, 128))


def test_fp8_blocks_at_the_edge_stay_ragged() -> None:
    for name, key in (("glm-5.2", "fp8"), ("glm-4.5-air", "fp8")):
        described, all_of_it = model(name)
        inside = formats.scope(scaled_checkpoint(all_of_it[key], described.geometry))
        assert any(t.shape[0] % 128 for t in tensors(scaled(described.geometry)) if inside(t))


def test_a_model_that_is_small_already_stays_as_wide() -> None:
    geometry = model("qwen3-0.6b")[0].geometry
    small = scaled(scaled(geometry))
    assert small.hidden_size == scaled(geometry).hidden_size
    assert formats.totals(small, Checkpoint())[1] > 0
