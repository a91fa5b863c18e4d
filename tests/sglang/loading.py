"""A small module that loads as SGLang's do, with its bad habits, and a stager for it."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from stitch_core.checkpoint import Checkpoint
from stitch_core.files import PosixFiles
from stitch_core.safetensors import Tensor
from stitch_core.testing.checkpoints import random_tensors, write_checkpoint
from stitch_sglang.stager import RankStager
from stitch_sglang.survey import Survey

FILES = PosixFiles()
WIDTH = 24
SHAPES = {
    "embed.weight": ("BF16", (32, WIDTH)),
    "layers.0.q.weight": ("BF16", (WIDTH, WIDTH)),
    "layers.0.k.weight": ("BF16", (WIDTH, WIDTH)),
    "layers.1.q.weight": ("BF16", (WIDTH, WIDTH)),
    "layers.1.k.weight": ("BF16", (WIDTH, WIDTH)),
    "norm": ("F32", (WIDTH,)),
}


class Weight(nn.Parameter):
    """Its loader is a property over an attribute, as SGLang's parameters have it."""

    def __new__(cls, data: torch.Tensor, **_: Any) -> Weight:
        return super().__new__(cls, data=data, requires_grad=False)

    def __init__(self, data: torch.Tensor, loader: Any) -> None:
        self._loader = loader

    @property
    def weight_loader(self) -> Any:
        return self._loader


class Method:
    """Post-processing that keeps something in itself."""

    def process(self, layer: Layer) -> None:
        layer.flipped.copy_(layer.qk.t())


class Layer(nn.Module):
    """Two tensors of the checkpoint in one parameter, and something derived from it."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = Weight(torch.empty(2 * WIDTH, WIDTH, dtype=torch.bfloat16), loader=self.load)
        self.flipped = torch.empty(WIDTH, 2 * WIDTH, dtype=torch.bfloat16)
        self.register_buffer("angles", torch.arange(8.0), persistent=False)
        self.method = Method()
        self.loads = [partial(self.load, self.qk)]

    def load(self, param: torch.Tensor, loaded: torch.Tensor, part: int) -> None:
        param.data[part * WIDTH : (part + 1) * WIDTH].copy_(loaded)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH, dtype=torch.bfloat16)
        self.head = nn.Linear(WIDTH, 32, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight  # tied
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.register_buffer("norm", torch.empty(WIDTH))
        closure = self.norm
        self.load_norm = lambda loaded: closure.copy_(loaded)

    def load_weights(self, weights: Any) -> None:
        for name, loaded in weights:
            if name == "norm":
                self.load_norm(loaded)
            elif name == "embed.weight":
                self.embed.weight.data.copy_(loaded)
            else:
                layer = self.layers[int(name.split(".")[1])]
                part = 0 if ".q." in name else 1
                if layer is self.layers[0]:
                    layer.qk.weight_loader(layer.qk, loaded, part)
                else:
                    layer.loads[0](loaded, part)


def load(model: Model, tensors: Any) -> None:
    model.load_weights(tensors)
    for layer in model.layers:
        layer.method.process(layer)


def write(path: Path, seed: int, **changes: Tensor) -> tuple[Path, str]:
    """A checkpoint, and its state."""
    tensors = random_tensors(np.random.default_rng(seed), SHAPES) | changes
    write_checkpoint(path, FILES, tensors, shards=2)
    return path, Checkpoint.open(path, FILES).state()


def bits(model: nn.Module) -> dict[str, bytes]:
    found = {**model.state_dict()} | {f"{i}.flipped": one.flipped for i, one in enumerate(model.layers)}
    return {n: t.contiguous().view(torch.uint8).numpy().tobytes() for n, t in found.items()}


def fresh(path: Path) -> dict[str, bytes]:
    """What a model holds that was loaded from there the usual way."""
    return bits(booted(path)[0])


def booted(path: Path, how: Any = load, kind: type[Model] = Model) -> tuple[Model, RankStager]:
    from stitch_sglang.reading import Reader

    model = kind()
    with torch.no_grad():
        how(model, iter(Reader(path, lambda: None)))
    return model, RankStager(model, Survey(model), how, pin=False)


def run(stager: RankStager, id: str, path: Path, state: str = "", **how: bool) -> dict[str, Any]:
    stager.begin(id, path, state, **{"test": False, "second": True, **how})
    deadline = time.monotonic() + 20
    while (report := stager.report(id))["outcome"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return report
