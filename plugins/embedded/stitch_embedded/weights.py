"""The live weights: HF-named tensors as views of the few matrices that the model multiplies by.

`q_proj`, `k_proj` and `v_proj` of a layer are row ranges of one matrix, `gate_proj` and `up_proj` of
another, so that writing a named tensor is all an activation does: nothing is concatenated or rebuilt
afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .config import ModelConfig

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class CheckpointError(ValueError):
    """A checkpoint directory cannot be used; the message names the file or tensor. Nothing was changed."""


@dataclass(frozen=True)
class Layer:
    """One layer's matrices. `qkv` is [(heads + 2 kv_heads) * head_dim, hidden], `gate_up` [2 *
    intermediate, hidden].
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Weights:
    """Storage for one model in one dtype. `named` maps HF names to views; writing to a view changes the
    model.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype
        self.named: dict[str, Tensor] = {}
        self.embed = self._new("model.embed_tokens.weight")
        self.layers = [self._layer(f"model.layers.{i}.") for i in range(config.layers)]
        self.norm = self._new("model.norm.weight")
        self.head = self.embed if config.tied else self._new("lm_head.weight")

    def copy_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Write named tensors (checked before by `read_tensors`) into the live matrices, in place."""
        for name, tensor in tensors.items():
            self.named[name].copy_(tensor)

    def _new(self, *names: str) -> Tensor:
        """One zeroed matrix holding the named tensors one below the other."""
        shapes = self.config.shapes()
        rows = [shapes[name][0] for name in names]
        whole = torch.zeros((sum(rows), *shapes[names[0]][1:]), dtype=self.dtype)
        for name, part in zip(names, whole.split(rows), strict=True):
            self.named[name] = part
        return whole

    def _layer(self, p: str) -> Layer:
        c = self.config
        projections = [p + f"self_attn.{x}_proj" for x in "qkv"]
        return Layer(
            input_norm=self._new(p + "input_layernorm.weight"),
            qkv=self._new(*(x + ".weight" for x in projections)),
            qkv_bias=self._new(*(x + ".bias" for x in projections)) if c.qkv_bias else None,
            q_norm=self._new(p + "self_attn.q_norm.weight") if c.qk_norm else None,
            k_norm=self._new(p + "self_attn.k_norm.weight") if c.qk_norm else None,
            o=self._new(p + "self_attn.o_proj.weight"),
            post_norm=self._new(p + "post_attention_layernorm.weight"),
            gate_up=self._new(p + "mlp.gate_proj.weight", p + "mlp.up_proj.weight"),
            down=self._new(p + "mlp.down_proj.weight"),
        )


class CheckpointFiles:
    """The tensors of one HF checkpoint directory, by name, and how they were stored."""

    def __init__(self, directory: str | Path, config: ModelConfig) -> None:
        self.directory = Path(directory)
        self.config = config
        self._files = _tensor_files(self.directory)

    def read(
        self, names: Collection[str] | None, dtype: torch.dtype, stored: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Private copies of the named tensors (None: all the model uses), converted to `dtype`.

        Every name is checked for existence, shape and, where `stored` is given, stored dtype, before
        anything is returned. A tied model's `lm_head.weight` is accepted and ignored. Raises
        CheckpointError.
        """
        shapes = self.config.shapes()
        wanted = set(shapes) if names is None else set(names)
        if self.config.tied:
            wanted.discard("lm_head.weight")
        if unknown := sorted(wanted - set(shapes)):
            raise CheckpointError(
                f"{self.directory}: the model has no tensor {unknown[0]} ({len(unknown)} unknown)"
            )
        if missing := sorted(wanted - set(self._files)):
            raise CheckpointError(
                f"{self.directory}: tensor {missing[0]} is missing ({len(missing)} missing)"
            )
        by_file: dict[Path, list[str]] = {}
        for name in sorted(wanted):
            by_file.setdefault(self._files[name], []).append(name)
        out: dict[str, Tensor] = {}
        for path, group in by_file.items():
            try:
                with safe_open(path, framework="pt") as file:
                    for name in group:
                        out[name] = self._checked(name, file.get_tensor(name), shapes[name], stored, dtype)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path}: {error}") from error
        return out

    def stored_dtype(self) -> torch.dtype:
        """The dtype of the embedding as stored; the whole checkpoint is expected to share it."""
        name = "model.embed_tokens.weight"
        if name not in self._files:
            raise CheckpointError(f"{self.directory}: tensor {name} is missing")
        try:
            with safe_open(self._files[name], framework="pt") as file:
                dtype: torch.dtype = file.get_tensor(name).dtype
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._files[name]}: {error}") from error
        return dtype

    def _checked(
        self,
        name: str,
        tensor: Tensor,
        shape: tuple[int, ...],
        stored: torch.dtype | None,
        dtype: torch.dtype,
    ) -> Tensor:
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self.directory}: {name} has shape {list(tensor.shape)}, expected {list(shape)}"
            )
        if stored is not None and tensor.dtype != stored:
            raise CheckpointError(f"{self.directory}: {name} is {tensor.dtype}, expected {stored}")
        # The file may be mapped and change under us later: always a copy of our own.
        return tensor.to(dtype, copy=True)


def _tensor_files(directory: Path) -> dict[str, Path]:
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    try:
        if index.is_file():
            table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {str(name): directory / str(file) for name, file in table.items()}
        if single.is_file():
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{directory}: unreadable checkpoint: {error}") from error
    raise CheckpointError(f"no checkpoint: {directory} has neither {single.name} nor {index.name}")
