"""C63: what forward passes keep of weights is gone when other weights come, or none may come, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stitch_sglang import caches, shadow
from stitch_sglang.reading import Reader
from stitch_sglang.stager import RankStager
from stitch_sglang.survey import Survey

from .loading import WIDTH, Model, load, run, write


@dataclass
class Config:
    """Beside a weight; as SGLang's TopKConfig, which is no module."""

    bias: torch.Tensor
    cast: torch.Tensor | None = field(default=None, init=False)


class Helper:
    """An object of one layer that has nothing of weights at first."""

    def __init__(self) -> None:
        self.packed: torch.Tensor | None = None


class Group:
    """One object that all layers share, as they share a group of ranks."""

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = None


class Angles(nn.Module):
    """A rotary embedding: tables without weights, converted by the first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(8.0), persistent=False)
        self.cast: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        self.table = self.table.to(torch.bfloat16)
        self.cast = self.table.float()
        return self.cast


class Caching(Model):
    """Its forward pass keeps something of the weights wherever a model of SGLang does."""

    def __init__(self) -> None:
        super().__init__()
        self.group, self.turn = Group(), Angles()
        for layer in self.layers:
            layer.group, layer.helper, layer.config = self.group, Helper(), Config(layer.qk)
            layer.ready, layer.cache, layer.by_name, layer.parts = False, None, {"inner": {}}, []
            layer.turn, layer.passes = self.turn, 0

    def forward(self) -> list[torch.Tensor]:
        self.turn()
        self.group.buffer = torch.zeros(3)
        return [value for layer in self.layers for value in one_layer(layer)]


def one_layer(layer: Any) -> list[torch.Tensor]:
    weight = layer.qk
    layer.passes += 1
    if not layer.ready:
        layer.cache, layer.ready = weight.float(), True
    if layer.config.cast is None:
        layer.config.cast = layer.config.bias.float()
    if layer.helper.packed is None:
        layer.helper.packed = weight.t().contiguous()
    if not layer.parts:
        layer.parts.append(weight[:WIDTH].clone())
    if "sum" not in layer.by_name["inner"]:
        layer.by_name["inner"]["sum"] = (weight.sum(0), "sum")
    if not hasattr(weight, "halves"):
        weight.halves = (weight.data_ptr(), weight.half())
    if "packed" not in layer._buffers:
        layer.register_buffer("packed", weight.bfloat16().clone(), persistent=False)
    if not hasattr(layer, "extra"):
        layer.extra = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        layer.extra.weight.data = weight.float().t().contiguous()
    layer.rows = torch.arange(WIDTH)
    layer.view = weight[:WIDTH]
    return [
        layer.cache, layer.config.cast, layer.helper.packed, *layer.parts, layer.by_name["inner"]["sum"][0],
        weight.halves[1], layer.packed, layer.extra.weight, layer.view,
    ]  # fmt: skip


KEPT = (
    "cache",
    "config.cast",
    "helper.packed",
    "parts.0",
    "by_name.inner.sum",
    "qk.halves",
    "packed",
    "extra",
)


def booted(path: Path, kind: type[Model]) -> tuple[Any, Survey, RankStager]:
    model = kind()
    with torch.no_grad():
        load(model, iter(Reader(path, lambda: None)))
    survey = Survey(model)
    return model, survey, RankStager(model, survey, load, pin=False)


@pytest.fixture
def boot(tmp_path: Path) -> Path:
    return write(tmp_path / "boot", 0)[0]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@torch.no_grad()
def test_c63_what_a_forward_pass_kept_is_made_anew_of_the_next_weights(tmp_path: Path, boot: Path) -> None:
    model, survey, stager = booted(boot, Caching)
    first = model()
    assert run(stager, "t", boot, test=True)["outcome"] == "done"
    for seed in (1, 2):
        path, state = write(tmp_path / str(seed), seed)
        assert run(stager, f"s{seed}", path, state)["outcome"] == "done"
        assert sorted(survey.made()) == sorted(f"layers.{i}.{name}" for i in (0, 1) for name in KEPT)
        survey.drop()
        stager.copy(f"s{seed}")
        fresh = booted(path, Caching)[0]
        assert same(model(), fresh())
        assert not same(model(), first)


@torch.no_grad()
def test_c63_what_is_dropped_is_as_after_the_load(boot: Path) -> None:
    """With the flags that say that it is there; what has nothing to do with weights stays."""
    model, survey, _ = booted(boot, Caching)
    model()
    table, cast, buffer = model.turn.table, model.turn.cast, model.group.buffer
    survey.drop()
    layer = model.layers[0]
    assert (layer.ready, layer.cache, layer.parts, layer.by_name) == (False, None, [], {"inner": {}})
    assert (layer.config.cast, layer.helper.packed, hasattr(layer.qk, "halves")) == (None, None, False)
    assert not hasattr(layer, "extra")
    assert (model.turn.table, model.turn.cast, model.group.buffer) == (table, cast, buffer)
    assert survey.made() == survey.drop() == []


@torch.no_grad()
def test_c63_a_parameter_that_a_forward_pass_replaced_is_the_loaded_one_again(
    tmp_path: Path, boot: Path
) -> None:
    class Repacking(Model):
        """With a flag in another part than the parameter."""

        packed = False

        def forward(self) -> torch.Tensor:
            if not self.packed:
                weight = nn.Parameter(self.layers[0].qk.detach().t().contiguous(), requires_grad=False)
                self.layers[0].qk, self.packed = weight, True
            return self.layers[0].qk

    model, survey, stager = booted(boot, Repacking)
    model()
    path, state = write(tmp_path / "1", 1)
    run(stager, "t", boot, test=True)
    assert run(stager, "s", path, state)["outcome"] == "done"
    assert survey.made() == ["layers.0.qk"]
    survey.drop()
    stager.copy("s")
    assert torch.equal(model(), booted(path, Repacking)[0]())


def test_c63_version_counters_of_what_was_written_are_bumped(tmp_path: Path, boot: Path) -> None:
    """Of what was written, and no more: a cache that keeps all its entries grows by what changed."""
    model, _, stager = booted(boot, Model)
    run(stager, "t", boot, test=True)
    tensors = {"norm": model.norm, "qk": model.layers[0].qk, "flipped": model.layers[0].flipped}
    before = {name: one._version for name, one in tensors.items()}
    changed = write(tmp_path / "9", 9)[0]
    norm = dict(Reader(changed, lambda: None))["norm"]
    with torch.inference_mode():  # as SGLang's scheduler runs
        path, state = write(tmp_path / "1", 0, norm=_tensor(norm))
        run(stager, "s", path, state)
        assert stager.copy("s") == norm.nbytes
        assert {n: one._version > before[n] for n, one in tensors.items()} == {
            "norm": True, "qk": False, "flipped": False
        }  # fmt: skip
        run(stager, "all", *write(tmp_path / "2", 2))
        stager.copy("all")
    assert all(one._version > before[name] for name, one in tensors.items())


def _tensor(value: torch.Tensor) -> Any:
    from stitch_core.safetensors import Tensor

    return Tensor("F32", tuple(value.shape), value.numpy().tobytes())


def test_c89_a_forward_pass_that_sets_an_attribute_in_the_middle_of_a_stage(
    tmp_path: Path, boot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's layers choose the method that computes them at their first pass."""
    model, _, stager = booted(boot, Model)
    scalars = shadow._scalars

    def meanwhile(*of: Any) -> Any:
        found = scalars(*of)
        for layer in model.layers:
            layer._forward_method = layer.load if layer._forward_method is None else None
        return found

    for layer in model.layers:
        layer._forward_method = None
    stager = RankStager(model, Survey(model), load, pin=False)
    monkeypatch.setattr(shadow, "_scalars", meanwhile)
    assert run(stager, "t", boot, test=True)["outcome"] == "done"
    assert run(stager, "s", *write(tmp_path / "1", 1))["outcome"] == "done"


# ------------------------------------------------------------------------------- one model runner of SGLang


def runner_of(model: nn.Module, constants: tuple[str, ...] = (), graphs: bool = False) -> Any:
    runner = SimpleNamespace(model=model, eager_runner=object(), prefill_cuda_graph_runner=None)
    runner.decode_cuda_graph_runner = object() if graphs else runner.eager_runner
    runner.stitch_survey = Survey(model, constants)
    return runner


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STITCH_STORE", "memory:")


@torch.no_grad()
def test_c63_under_captured_graphs_the_model_is_refused_by_name(boot: Path, settings: None) -> None:
    """A replay runs no code that could make the cache anew."""
    model = booted(boot, Caching)[0]
    runner = runner_of(model, graphs=True)
    assert caches.obstacle(runner) == ""
    model()
    assert "layers.0.cache" in caches.obstacle(runner)
    assert model.layers[0].cache is not None
    runner.decode_cuda_graph_runner = None
    assert caches.obstacle(runner) == ""


@torch.no_grad()
def test_c63_what_is_said_to_be_a_constant_is_no_obstacle_and_stays(boot: Path, settings: None) -> None:
    model = booted(boot, Model)[0]
    runner = runner_of(model, ("layers.*.mask",), graphs=True)
    mask = model.layers[1].mask = torch.ones(4)
    assert caches.obstacle(runner) == ""
    model.layers[1].cache = torch.ones(4)
    caches.drop(runner)
    assert model.layers[1].mask is mask
    assert not hasattr(model.layers[1], "cache")


@torch.no_grad()
@pytest.mark.parametrize("graphs", [True, False])
def test_c63_a_parameter_that_a_forward_pass_moved_is_refused_by_name(
    boot: Path, settings: None, graphs: bool
) -> None:
    """Nothing can put it back, and a load would write to where nothing reads."""
    model = booted(boot, Model)[0]
    runner = runner_of(model, graphs=graphs)
    model.layers[1].qk.data = model.layers[1].qk.data.clone()
    assert "layers.1.qk" in caches.obstacle(runner)


@torch.no_grad()
def test_c63_a_load_from_disk_counts_as_written(tmp_path: Path, boot: Path, settings: None) -> None:
    """SGLang's loaders write by way of `.data`, which no counter sees."""
    model = booted(boot, Model)[0]
    runner = runner_of(model)
    before = model.layers[0].qk._version
    path = write(tmp_path / "1", 1)[0]
    _, replaced = caches.load_from_disk(runner, lambda: load(model, iter(Reader(path, lambda: None))))
    assert model.layers[0].qk._version > before
    assert replaced == ""


@torch.no_grad()
def test_c63_what_a_load_from_disk_replaced_is_no_cache_of_a_forward_pass(
    tmp_path: Path, boot: Path, settings: None
) -> None:
    """It is of the weights that were loaded; but images would be copied to where it was before."""
    model = booted(boot, Caching)[0]
    runner = runner_of(model)
    path = write(tmp_path / "1", 1)[0]

    def replaced() -> None:
        load(model, iter(Reader(path, lambda: None)))
        for layer in model.layers:
            layer.flipped = layer.flipped.clone()

    model()
    caches.drop(runner)
    _, said = caches.load_from_disk(runner, replaced)
    flipped = model.layers[0].flipped
    assert "layers.0.flipped" in said
    model()
    caches.drop(runner)  # and then nothing could be loaded
    assert model.layers[0].flipped is flipped
    assert same(model(), booted(path, Caching)[0]())
    runner.prefill_cuda_graph_runner = object()
    with pytest.raises(caches.Replaced, match=r"layers\.0\.flipped"):
        caches.load_from_disk(runner, replaced)
