"""The local recipe's trainer: advantages, clipping, and a step that moves towards what was rewarded."""

import random

import pytest
import torch

from recipes.local import grpo, task
from recipes.local.grpo import Grpo, Sample
from recipes.local.policy import Policy


def score(policy: Policy, prompt: list[int], output: list[int]) -> list[float]:
    tokens = torch.tensor([prompt + output])
    with torch.no_grad():
        scores = policy(tokens[:, :-1]).log_softmax(-1)
    return scores.gather(-1, tokens[:, 1:, None])[0, len(prompt) - 1 :, 0].tolist()


def test_advantages_compare_within_a_group() -> None:
    assert grpo.advantages([0.5] * 4) == [0.0] * 4
    values = grpo.advantages([0.0, 1.0])
    assert values[0] == pytest.approx(-values[1])
    assert values[1] > 0.5


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [(1.0, 1.0, True), (1.3, 1.0, False), (0.7, 1.0, True), (0.7, -1.0, False), (1.3, -1.0, True)],
)
def test_clipping_stops_what_has_gone_far_enough(ratio: float, advantage: float, moves: bool) -> None:
    logprob = torch.tensor([-1.0]).requires_grad_()
    sampled = logprob.detach() - torch.tensor([ratio]).log()
    grpo.token_loss(logprob, sampled, torch.tensor([advantage])).sum().backward()
    assert logprob.grad is not None
    assert bool(logprob.grad.abs() > 0) == moves


@pytest.mark.slow
def test_a_step_prefers_the_better_answer() -> None:
    rng = random.Random(0)
    policy = Policy(seed=0)
    prompt = task.draw_prompt(rng)
    good, bad = task.answer(prompt), [rng.choice(task.SYMBOLS) for _ in range(task.MAX_NEW_TOKENS)]
    before = [sum(score(policy, prompt, output)) for output in (good, bad)]
    group = [Sample(prompt, output, score(policy, prompt, output)) for output in (good, bad)]
    stats = Grpo(policy).step([group])
    after = [sum(score(policy, prompt, output)) for output in (good, bad)]
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert (stats.exact, stats.clipped) == (0.5, 0.0)
    assert stats.mismatch < 1e-5


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    policy = Policy(seed=0)
    before = policy.rollout_weights()
    prompt = task.draw_prompt(random.Random(0))
    sample = Sample(prompt, task.answer(prompt), score(policy, prompt, task.answer(prompt)))
    Grpo(policy).step([[sample, sample]])
    assert all(torch.equal(now, before[name]) for name, now in policy.rollout_weights().items())


@pytest.mark.slow
def test_the_warm_up_lowers_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo, "WARMUP_STEPS", 1)
    policy = Policy(seed=0)
    first = grpo.warm_up(policy, seed=0)
    monkeypatch.setattr(grpo, "WARMUP_STEPS", 3)
    assert grpo.warm_up(policy, seed=0) < first
