"""Qwen2 and Qwen3 on a CPU, one row per token, with results that do not depend on the batch, to the bit.

Stock batching is not exact: matrix kernels choose their summation order by the number of rows. The recipe
here:

- one torch thread (process.py);
- every token is one row, in prefill and decode alike, and attends over its slot's whole cache of fixed
  length, masked;
- rows are padded to one of a few fixed counts (`row_counts`), all of which `selfcheck` compares on the
  loaded model;
- softmax and log-softmax in fp32.

Rounding follows Hugging Face's modules (norms and rotary products rounded to the weights' dtype step by
step).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import ModelConfig
from .weights import Layer, Weights

MIN_ROWS = 4
"""Kernels for one to three rows sum in other orders."""


def row_counts(most: int) -> list[int]:
    """The row counts that a forward of up to `most` rows is padded to; seldom is a third of it padding."""
    counts, step = [MIN_ROWS, 8, 16], 8
    while counts[-1] < most:
        counts.append(counts[-1] + step)
        if counts[-1] & (counts[-1] - 1) == 0:
            step = counts[-1] // 2
    return counts


ATTENTION_BYTES = 8 << 20
"""Keys of as many rows are gathered at once: what fits in caches, and long contexts do not need gigabytes."""


class KVCache:
    """Keys and values of `slots` sequences, fixed length `max_len`, and a scratch slot for padding rows.

    `keys` and `values` are [layers, slots + 1, kv_heads, max_len, head_dim]. Positions not yet written hold
    zeros or finite leftovers; masking gives them a weight of exactly 0.
    """

    def __init__(self, config: ModelConfig, slots: int, max_len: int, dtype: torch.dtype) -> None:
        shape = (config.layers, slots + 1, config.kv_heads, max_len, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype)
        self.values = torch.zeros(shape, dtype=dtype)
        self.slots = slots
        self.max_len = max_len

    def clear(self, slots: Sequence[int]) -> None:
        """Zero slots before another sequence uses them: a non-finite leftover would survive a weight of 0."""
        index = torch.tensor(slots)
        self.keys[:, index] = 0
        self.values[:, index] = 0


class Runner:
    """Forward passes of one model over the caller's weights and cache, on one thread at a time."""

    def __init__(self, weights: Weights, cache: KVCache, most_rows: int) -> None:
        self.weights = weights
        self.cache = cache
        self.counts = row_counts(most_rows)
        c = weights.config
        inverse = 1.0 / (c.rope_theta ** (torch.arange(0, c.head_dim, 2, dtype=torch.float32) / c.head_dim))
        angles = torch.outer(torch.arange(cache.max_len, dtype=torch.float32), inverse)
        angles = torch.cat([angles, angles], -1)
        self._cos, self._sin = angles.cos().to(weights.dtype), angles.sin().to(weights.dtype)
        row_bytes = cache.keys[0, 0].numel() * cache.keys.element_size()
        self._block = max(MIN_ROWS, ATTENTION_BYTES // row_bytes // MIN_ROWS * MIN_ROWS)
        later = torch.ones(cache.max_len, cache.max_len, dtype=torch.bool).triu(1)
        self._mask = torch.zeros(cache.max_len, cache.max_len).masked_fill_(later, float("-inf"))

    def padded(self, rows: int) -> int:
        """The row count that `rows` rows are computed with."""
        return next(count for count in self.counts if count >= rows)

    @torch.inference_mode()
    def hidden(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Compute rows, write their keys and values, return their last hidden states, [rows, hidden].

        Row i is token `tokens[i]` of the sequence in `slots[i]` at `positions[i]`. Several rows of one slot
        must be in ascending positions without a gap from what the cache holds.
        """
        rows = len(tokens)
        pad = self.padded(rows) - rows
        token = torch.tensor([*tokens, *[0] * pad])
        slot = torch.tensor([*slots, *[self.cache.slots] * pad])
        position = torch.tensor([*positions, *[0] * pad])
        cos, sin = self._cos[position][:, None], self._sin[position][:, None]
        mask = self._mask[position][:, None, None]
        x = F.embedding(token, self.weights.embed)
        for index, layer in enumerate(self.weights.layers):
            x = x + self._attention(layer, index, x, slot, position, cos, sin, mask)
            gate, up = F.linear(self._norm(x, layer.post_norm), layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return x[:rows]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [rows, vocab] of hidden states [rows, hidden]."""
        rows = len(hidden)
        padded = F.pad(hidden, (0, 0, 0, self.padded(rows) - rows))
        return F.linear(self._norm(padded, self.weights.norm), self.weights.head)[:rows].float()

    def _attention(
        self,
        layer: Layer,
        index: int,
        x: Tensor,
        slot: Tensor,
        position: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
    ) -> Tensor:
        c, n = self.weights.config, len(x)
        qkv = F.linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias).view(n, -1, c.head_dim)
        q, k, v = qkv.split([c.heads, c.kv_heads, c.kv_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        keys, values = self.cache.keys[index], self.cache.values[index]
        keys[slot, :, position] = k
        values[slot, :, position] = v
        blocks = zip(q.split(self._block), slot.split(self._block), mask.split(self._block), strict=True)
        heads = [self._attend(block, keys, values, at, visible) for block, at, visible in blocks]
        return F.linear(heads[0] if len(heads) == 1 else torch.cat(heads), layer.o)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, slot: Tensor, mask: Tensor) -> Tensor:
        """[rows, heads * head_dim] of queries [rows, heads, head_dim], over the whole cache length."""
        n, _, dim = q.shape
        kv_heads, length = keys.shape[1], keys.shape[2]
        past_k = keys.index_select(0, slot).view(n * kv_heads, length, dim)
        scores = torch.bmm(q.reshape(n * kv_heads, -1, dim), past_k.transpose(1, 2)).float()
        scores = scores.view(n, kv_heads, -1, length) * dim**-0.5 + mask
        share = scores.softmax(-1).to(q.dtype).view(n * kv_heads, -1, length)
        past_v = values.index_select(0, slot).view(n * kv_heads, length, dim)
        return torch.bmm(share, past_v).view(n, -1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.weights.config.norm_eps)
        return weight * wide.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin
