"""Tensors of dense feed-forward layers and of mixtures of experts. Sources: see attention.py."""

from __future__ import annotations

from .geometry import Experts
from .spec import Tensor, Tensors, weight

GATED = ("gate_proj", "up_proj", "down_proj")
NUMBERED = ("w1", "w3", "w2")


def gated(hidden: int, inner: int, at: str, names: tuple[str, str, str] = GATED) -> Tensors:
    """Gate, up and down of one gated network."""
    gate, up, down = names
    yield weight(f"{at}.{gate}", inner, hidden)
    yield weight(f"{at}.{up}", inner, hidden)
    yield weight(f"{at}.{down}", hidden, inner)


def mixture(kind: Experts, hidden: int, layer: str) -> Tensors:
    """The experts of the layer whose name begins with ``layer``, with their router."""
    at, inner = f"{layer}{kind.names}", kind.moe_intermediate_size
    yield weight(f"{at}.gate", kind.n_routed_experts, hidden)
    if kind.correction_bias:
        yield Tensor(f"{at}.gate.e_score_correction_bias", "F32", (kind.n_routed_experts,))
    width = kind.routed_expert_hidden_size
    if width is not None:
        yield weight(f"{at}.routed_expert_down_proj", width, hidden)
        yield weight(f"{at}.routed_expert_up_proj", hidden, width)
        yield weight(f"{at}.routed_expert_norm", width)
    names = NUMBERED if kind.names == "block_sparse_moe" else GATED
    for expert in range(kind.n_routed_experts):
        yield from gated(width or hidden, inner, f"{at}.experts.{expert}", names)
    if kind.n_shared_experts:
        yield from gated(hidden, kind.n_shared_experts * inner, f"{at}.shared_experts")
