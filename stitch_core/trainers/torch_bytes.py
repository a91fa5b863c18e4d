"""A torch tensor as the core's: dtype spelled as safetensors does, bytes in host memory. Imports no torch."""

from __future__ import annotations

import sys
from typing import Any

from ..safetensors import Tensor

DTYPES = {
    "torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32", "torch.float64": "F64",
    "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2", "torch.float8_e8m0fnu": "F8_E8M0",
    "torch.float8_e4m3fnuz": "F8_E4M3FNUZ", "torch.float8_e5m2fnuz": "F8_E5M2FNUZ",
    "torch.int8": "I8", "torch.int16": "I16", "torch.int32": "I32", "torch.int64": "I64",
    "torch.uint8": "U8", "torch.uint16": "U16", "torch.uint32": "U32", "torch.uint64": "U64",
    "torch.bool": "BOOL", "torch.complex64": "C64",
}  # fmt: skip


def as_tensor(value: Any) -> Tensor:
    """A copy of the tensor's bytes, whatever its dimensions (none, or a size of 0) and device.

    Raises ValueError for a dtype that safetensors cannot spell.
    """
    name = str(value.dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype {name} cannot be published")
    shape = tuple(value.shape)
    if value.numel() == 0:
        return Tensor(DTYPES[name], shape, b"")
    # numpy knows no bfloat16, and a tensor without dimensions cannot be viewed as bytes.
    flat = value.detach().cpu().contiguous().reshape(-1)
    return Tensor(DTYPES[name], shape, flat.view(sys.modules["torch"].uint8).numpy().tobytes())
