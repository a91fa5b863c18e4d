"""The task: write ten symbols in order. Verifiable, dense in reward, long enough to span activations.

A prompt is BOS, the symbols, SEP; the answer is the symbols sorted, then EOS.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

BOS, SEP, EOS = 0, 1, 2
SYMBOLS = range(3, 13)
LENGTH = 10
VOCAB = 32

PROMPT_TOKENS = LENGTH + 2
ANSWER_TOKENS = LENGTH + 1
MAX_NEW_TOKENS = ANSWER_TOKENS + 1
"""One more than needed, so that an answer without an end is seen to be one."""


def draw_prompt(rng: random.Random) -> list[int]:
    """A fresh prompt; symbols may repeat."""
    return [BOS, *rng.choices(SYMBOLS, k=LENGTH), SEP]


def answer(prompt: Sequence[int]) -> list[int]:
    """The one right continuation."""
    return [*sorted(prompt[1:-1]), EOS]


def reward(prompt: Sequence[int], output: Sequence[int]) -> float:
    """The share of positions that are right, in [0, 1]; tokens too many count as wrong positions."""
    expected = answer(prompt)
    right = sum(a == b for a, b in zip(output, expected, strict=False))
    return right / max(len(output), len(expected))


def exact(prompt: Sequence[int], output: Sequence[int]) -> bool:
    """Whether the whole answer is right, end included."""
    return list(output) == answer(prompt)
