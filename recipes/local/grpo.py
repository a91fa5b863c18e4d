"""Group-relative policy optimisation in its plain form: no critic, no reference model, asymmetric clipping.

The ratio is taken against the log-probabilities that the replica reported when it sampled. A trajectory may
span several versions; each of its tokens is then held against the version that really produced it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import task
from .policy import Policy

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
LEARNING_RATE = 1e-4
GRAD_NORM = 1.0
WARMUP_STEPS, WARMUP_BATCH, WARMUP_RATE = 60, 64, 1e-3


@dataclass(frozen=True)
class Sample:
    """One finished generation: what the loss needs of it."""

    prompt: Sequence[int]
    output: Sequence[int]
    logprobs: Sequence[float]


Group = Sequence[Sample]
"""Several answers to one prompt."""


@dataclass(frozen=True)
class StepStats:
    """One step. ``mismatch``: mean distance of the trainer's log-probabilities from the replicas'."""

    reward: float
    exact: float
    loss: float
    entropy: float
    clipped: float
    mismatch: float


def warm_up(policy: Policy, seed: int) -> float:
    """A few supervised steps, so that sampled answers earn any reward at all; the last loss."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=WARMUP_RATE, weight_decay=0.0)
    loss = torch.zeros(())
    for _ in range(WARMUP_STEPS):
        prompts = [task.draw_prompt(rng) for _ in range(WARMUP_BATCH)]
        rows = torch.tensor([prompt + task.answer(prompt) for prompt in prompts])
        logits = policy(rows[:, :-1])[:, task.PROMPT_TOKENS - 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, task.PROMPT_TOKENS :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def advantages(rewards: Sequence[float]) -> list[float]:
    """How much better than its group each answer is, in standard deviations."""
    values = torch.tensor(rewards)
    return ((values - values.mean()) / (values.std() + 1e-4)).tolist()


def token_loss(logprob: Tensor, sampled: Tensor, advantage: Tensor) -> Tensor:
    """The clipped surrogate per token; ``sampled`` is the log-probability at the replica."""
    ratio = (logprob - sampled).exp()
    return -torch.min(ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)


class Grpo:
    """A policy and its optimiser. Used by one thread at a time."""

    def __init__(self, policy: Policy, rate: float = LEARNING_RATE) -> None:
        self.policy = policy
        self._optimizer = torch.optim.AdamW(policy.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, groups: Sequence[Group]) -> StepStats:
        """One step over whole groups."""
        samples = [sample for group in groups for sample in group]
        rewards = [[task.reward(s.prompt, s.output) for s in group] for group in groups]
        gained = torch.tensor([a for group in rewards for a in advantages(group)])
        tokens, sampled, mask = _padded(samples)

        scores = self.policy(tokens[:, :-1]).log_softmax(-1)
        logprob = scores.gather(-1, tokens[:, 1:, None])[..., 0]
        # What lies outside the answers must not overflow in exp() before it is masked away.
        distance = (logprob.detach() - sampled) * mask
        loss = (token_loss(torch.where(mask > 0, logprob, sampled), sampled, gained[:, None]) * mask).sum()
        loss = loss / mask.sum()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), GRAD_NORM)
        self._optimizer.step()

        with torch.no_grad():
            entropy = -(scores.exp() * scores).sum(-1)
            clipped = ((distance.exp() < 1 - CLIP_LOW) | (distance.exp() > 1 + CLIP_HIGH)).float()
            average = 1.0 / mask.sum()
            return StepStats(
                reward=sum(map(sum, rewards)) / len(samples),
                exact=sum(task.exact(s.prompt, s.output) for s in samples) / len(samples),
                loss=float(loss.detach()),
                entropy=float((entropy * mask).sum() * average),
                clipped=float((clipped * mask).sum() * average),
                mismatch=float(distance.abs().sum() * average),
            )


def _padded(samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [n, length]; for tokens 1 and up their sampled log-probabilities, and 1 within answers."""
    length = max(len(s.prompt) + len(s.output) for s in samples)
    tokens = torch.zeros(len(samples), length, dtype=torch.long)
    sampled, mask = torch.zeros(len(samples), length - 1), torch.zeros(len(samples), length - 1)
    for row, s in enumerate(samples):
        start, end = len(s.prompt) - 1, len(s.prompt) - 1 + len(s.output)
        tokens[row, : end + 1] = torch.tensor([*s.prompt, *s.output])
        sampled[row, start:end] = torch.tensor(s.logprobs)
        mask[row, start:end] = 1
    return tokens, sampled, mask
