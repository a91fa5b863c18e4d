"""Draws: the right distribution, the same for a seed in any batch, restricted as asked."""

from __future__ import annotations

import pytest
import torch

from stitch_embedded.sampling import Draw, SamplingParams, logprobs, sample

VOCAB = 12
LOGITS = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 2


def draws(params: SamplingParams, count: int, **options: object) -> list[Draw]:
    return [Draw(params, seed=7, index=i, **options) for i in range(count)]  # type: ignore[arg-type]


def frequencies(params: SamplingParams, count: int = 20000, **options: object) -> torch.Tensor:
    logp = logprobs(LOGITS.expand(count, VOCAB), [params.divisor] * count)
    picked = sample(logp, draws(params, count, **options))
    return torch.bincount(picked, minlength=VOCAB) / count


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_are_the_softmax(temperature: float) -> None:
    expected = (LOGITS[0] / temperature).softmax(-1)
    got = frequencies(SamplingParams(temperature=temperature))
    assert (got - expected).abs().max() < 0.015


def test_restrictions() -> None:
    probs = LOGITS[0].softmax(-1)
    order = probs.argsort(descending=True)
    top3 = frequencies(SamplingParams(top_k=3))
    assert set(top3.nonzero().flatten().tolist()) == set(order[:3].tolist())
    assert (top3[order[:3]] - probs[order[:3]] / probs[order[:3]].sum()).abs().max() < 0.015
    nucleus = frequencies(SamplingParams(top_p=0.6))
    kept = int((probs[order].cumsum(0) - probs[order] <= 0.6).sum())
    assert set(nucleus.nonzero().flatten().tolist()) == set(order[:kept].tolist())
    strong = frequencies(SamplingParams(min_p=0.5))
    assert set(strong.nonzero().flatten().tolist()) == set(
        (probs >= probs.max() / 2).nonzero().flatten().tolist()
    )


def test_greedy() -> None:
    best = int(LOGITS.argmax())
    for params in (SamplingParams(temperature=0.0), SamplingParams(top_k=1)):
        assert frequencies(params, 5)[best] == 1
    # and the reported value is that of the undivided logits
    assert SamplingParams(temperature=0.0).divisor == 1.0


def test_barred_tokens_are_not_drawn() -> None:
    best = int(LOGITS.argmax())
    assert frequencies(SamplingParams(), 2000, barred=frozenset({best}))[best] == 0
    assert frequencies(SamplingParams(temperature=0.0), 1, barred=frozenset({best}))[best] == 0


def test_a_row_does_not_depend_on_its_batch() -> None:
    rows = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(1))
    kinds = [SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9), SamplingParams(temperature=0.0)]
    batch = [Draw(kinds[i % 3], seed=2**64 - 1 - i, index=i) for i in range(40)]
    logp = logprobs(rows, [d.params.divisor for d in batch])
    together = sample(logp, batch)
    for i in range(40):
        alone = logprobs(rows[i : i + 1], [batch[i].params.divisor])
        assert torch.equal(alone[0], logp[i])
        assert sample(alone, batch[i : i + 1])[0] == together[i]


def test_non_finite_logits_stay_in_the_vocabulary() -> None:
    logp = logprobs(torch.full((2, VOCAB), float("nan")), [1.0, 0.5])
    picked = sample(logp, [Draw(SamplingParams(), 1, 0), Draw(SamplingParams(top_p=0.5), 1, 0)])
    assert ((picked >= 0) & (picked < VOCAB)).all()
