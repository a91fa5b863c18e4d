"""From logits to tokens, for a whole batch at once; a row's outcome depends on nothing but that row.

Reported log-probabilities are `log_softmax(logits / temperature)` in fp32, as SGLang's are; at temperature
1, and for greedy decoding (temperature 0), the logits are not divided. `top_k`, `top_p`, `min_p` and
`min_new_tokens` restrict what is drawn, not what is reported. A draw uses one number in [0, 1) made from
the request's seed and the token's index, so a seed gives the same tokens in any batch, and after a
retraction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How one request is continued. `seed` None: the engine picks one."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    min_new_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        """Always the most likely token."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def divisor(self) -> float:
        """What the logits are divided by before log-softmax."""
        return self.temperature or 1.0

    @property
    def restricted(self) -> bool:
        """Draws from a part of the vocabulary only."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass
class Draw:
    """One row to sample: its request's parameters and seed, the index of the token, ids barred for now."""

    params: SamplingParams
    seed: int
    index: int
    barred: frozenset[int] = field(default_factory=frozenset)


def logprobs(logits: Tensor, divisors: Sequence[float]) -> Tensor:
    """fp32 log-probabilities [rows, vocab] of fp32 logits, each row divided by its divisor first."""
    if any(d != 1.0 for d in divisors):
        scale = torch.tensor(divisors, dtype=torch.float32)
        # Division by 1 is exact, so rows at temperature 1 keep their bits.
        logits = logits / scale[:, None]
    return logits.log_softmax(-1)


def sample(logp: Tensor, draws: Sequence[Draw]) -> Tensor:
    """One token id per row of `logp` [rows, vocab], int64 [rows]."""
    for row, draw in enumerate(draws):
        if draw.barred:
            logp = logp.clone()
            logp[row, list(draw.barred)] = float("-inf")
    greedy = [row for row, d in enumerate(draws) if d.params.greedy]
    plain = [row for row, d in enumerate(draws) if not d.params.greedy and not d.params.restricted]
    restricted = [row for row, d in enumerate(draws) if not d.params.greedy and d.params.restricted]
    if len(plain) == len(draws):
        return _inverse_cdf(logp.double().exp(), _uniforms(draws))
    tokens = torch.empty(len(draws), dtype=torch.int64)
    if greedy:
        tokens[greedy] = logp[greedy].argmax(-1)
    if plain:
        tokens[plain] = _inverse_cdf(logp[plain].double().exp(), _uniforms([draws[r] for r in plain]))
    if restricted:
        tokens[restricted] = _from_part(logp[restricted], [draws[r] for r in restricted])
    return tokens


def _from_part(logp: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Draw among each row's most likely tokens: first `top_k`, of these the `top_p` mass, above `min_p`."""
    probs, order = logp.double().exp().sort(dim=-1, descending=True, stable=True)
    vocab = probs.shape[-1]
    top_k = torch.tensor([d.params.top_k if d.params.top_k > 0 else vocab for d in draws])[:, None]
    top_p = torch.tensor([d.params.top_p for d in draws], dtype=torch.float64)[:, None]
    min_p = torch.tensor([d.params.min_p for d in draws], dtype=torch.float64)[:, None]
    probs = probs.masked_fill(torch.arange(vocab)[None] >= top_k, 0.0)
    mass = probs.sum(-1, keepdim=True)
    before = probs.cumsum(-1) - probs
    probs = probs.masked_fill((before > top_p * mass) | (probs < min_p * probs[:, :1]), 0.0)
    return order.gather(-1, _inverse_cdf(probs, _uniforms(draws))[:, None])[:, 0]


def _inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    cdf = probs.cumsum(-1)
    # The first entry above u * total has a probability above 0: entries of 0 do not raise the sum.
    picked = torch.searchsorted(cdf, (uniforms * cdf[:, -1])[:, None], right=True)[:, 0]
    # NaN weights would leave the vocabulary.
    return picked.clamp_(max=probs.shape[-1] - 1)


def _uniforms(draws: Sequence[Draw]) -> Tensor:
    """One double in [0, 1) per row: splitmix64 of the seed and the token's index."""
    x: NDArray[np.uint64] = np.array([d.seed for d in draws], dtype=np.uint64)
    step: NDArray[np.uint64] = np.array([d.index + 1 for d in draws], dtype=np.uint64)
    with np.errstate(over="ignore"):
        x = _mix(_mix(x) + step * np.uint64(0x9E3779B97F4A7C15))
    return torch.from_numpy((x >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
