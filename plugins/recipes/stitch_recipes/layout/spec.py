"""What a checkpoint says of one tensor, before there are bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from stitch_core.state import ITEM_BITS


class Tensor(NamedTuple):
    """A tensor's name, its dtype in safetensors spelling and its shape; a linear weight is [out, in]."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * ITEM_BITS[self.dtype] // 8


Tensors = Iterator[Tensor]


def weight(module: str, *shape: int) -> Tensor:
    """``module.weight`` in BF16."""
    return Tensor(f"{module}.weight", "BF16", shape)
