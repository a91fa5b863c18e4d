"""At start the engine proves on its own weights that no row's result depends on the rows beside it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from .model import MIN_ROWS, KVCache, Runner
from .weights import Weights


class SelfCheckError(RuntimeError):
    """The same token of the same sequence gave other bits in another batch; the message says which."""


def self_check(
    weights: Weights, max_len: int, most_rows: int, *, seconds: float = 1.0, seed: int = 0
) -> None:
    """Compare random batches, of every row count that the engine will use, with one row at a time.

    A few random sequences are computed token by token (decode). Then many copies of them run in calls whose
    row counts go through all of `Runner.counts` in random order: calls hold prefills, decodes and both.
    Logits and log-probabilities must agree to the bit. All counts are tried at least once; after that
    `seconds` limits the work. Raises SelfCheckError.
    """
    rng = random.Random(seed)
    length = min(max_len, 12)
    sequences = [[rng.randrange(weights.config.vocab) for _ in range(length)] for _ in range(5)]
    runner = Runner(weights, KVCache(weights.config, 1, max_len, weights.dtype), MIN_ROWS)
    alone = [[_outcome(runner, [token], [0], [at])[0] for at, token in enumerate(s)] for s in sequences]

    copies = 2 + most_rows // length
    cache = KVCache(weights.config, copies, max_len, weights.dtype)
    runner = Runner(weights, cache, most_rows)
    end = time.monotonic() + seconds
    rounds = 0
    while rounds == 0 or time.monotonic() < end:
        rounds += 1
        sizes = rng.sample(runner.counts, len(runner.counts))
        while sizes:
            rows = iter(_shuffled_rows(rng, len(sequences), copies, length))
            # A call takes fewer rows than its count now and then, so that padding is tried too.
            while sizes and (batch := list(islice(rows, max(1, sizes.pop() - rng.randrange(3))))):
                _compare(runner, sequences, alone, batch)


Row = tuple[int, int, int]
"""(sequence, slot, position)"""


def _shuffled_rows(rng: random.Random, sequences: int, copies: int, length: int) -> list[Row]:
    """Rows of `copies` sequences from their starts, interleaved at random, each sequence's in order."""
    which = [rng.randrange(sequences) for _ in range(copies)]
    done = [0] * copies
    rows: list[Row] = []
    left = list(range(copies))
    while left:
        slot = rng.choice(left)
        run = min(rng.choice((1, 1, 2, 5, length)), length - done[slot])
        rows += [(which[slot], slot, at) for at in range(done[slot], done[slot] + run)]
        done[slot] += run
        if done[slot] == length:
            left.remove(slot)
    return rows


def _compare(
    runner: Runner,
    sequences: Sequence[Sequence[int]],
    alone: Sequence[Sequence[Tensor]],
    batch: Sequence[Row],
) -> None:
    tokens = [sequences[which][at] for which, _, at in batch]
    got = _outcome(runner, tokens, [slot for _, slot, _ in batch], [at for _, _, at in batch])
    expected = torch.stack([alone[which][at] for which, _, at in batch])
    wrong = (got != expected).any(-1).nonzero().flatten().tolist()
    if wrong:
        which, _, at = batch[wrong[0]]
        raise SelfCheckError(
            f"this machine's kernels are not batch-invariant for this model ({runner.weights.dtype}): in "
            f"a batch of {len(batch)} rows (padded to {runner.padded(len(batch))}) {len(wrong)} rows differ "
            f"from the same rows alone; first: sequence {which}, position {at}, row {wrong[0]}"
        )


def _outcome(runner: Runner, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Bits of logits and log-probabilities side by side, int32 [rows, 2 * vocab]: NaN must equal NaN."""
    logits = runner.logits(runner.hidden(tokens, slots, positions))
    return torch.cat([logits, logits.log_softmax(-1)], -1).contiguous().view(torch.int32)
