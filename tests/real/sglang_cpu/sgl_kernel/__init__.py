"""Instead of SGLang's kernels for AMX machines: what serving calls, with torch; the rest raises."""

from typing import Any

import torch

__version__ = "0.4.10"


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    values: torch.Tensor,
    stride: int,
) -> None:
    """Write consecutive pieces of ``values`` into ``table[row, start:end]``."""
    done = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = values[done : done + end - start].to(table.dtype)
        done += end - start


def __getattr__(name: str) -> Any:
    if name.startswith("_") or not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"this stand-in for sgl_kernel has no {name}")

    return missing
