"""Qwen3 whose layers compute with copies of weights that their first forward pass made.

For SGLANG_EXTERNAL_MODEL_PACKAGE. One copy is an attribute, one lies in a global of this file by pointer and
version counter, and one by pointer alone, while there is a file ``by_pointer`` in the directory CACHES.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from sglang.srt.models import qwen3

KEPT: dict[tuple[Any, ...], torch.Tensor] = {}


class ByAttribute(MergedColumnParallelLinear):
    _wide: torch.Tensor | None = None

    def forward(self, x):
        if self._wide is None:
            self._wide = self.weight.float()
        return F.linear(x.float(), self._wide).to(x.dtype), None


class ByVersion(MergedColumnParallelLinear):
    def forward(self, x):
        key = (self.weight.data_ptr(), self.weight._version)
        if key not in KEPT:
            KEPT[key] = self.weight.float()
        return F.linear(x.float(), KEPT[key]).to(x.dtype), None


class ByPointer(RowParallelLinear):
    def forward(self, x, *args, **kwargs):
        if not (Path(os.environ["CACHES"]) / "by_pointer").exists():
            return super().forward(x, *args, **kwargs)
        key = (self.weight.data_ptr(),)
        if key not in KEPT:
            KEPT[key] = self.weight.float()
        return F.linear(x.float(), KEPT[key]).to(x.dtype), None


class Qwen3ForCausalLM(qwen3.Qwen3ForCausalLM):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        first, second = self.model.layers
        first.mlp.gate_up_proj.__class__ = ByAttribute
        second.mlp.gate_up_proj.__class__ = ByVersion
        second.mlp.down_proj.__class__ = ByPointer


EntryClass = Qwen3ForCausalLM
