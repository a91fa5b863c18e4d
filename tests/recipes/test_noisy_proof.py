"""The statistics of the proof for engines whose arithmetic is not ours."""

from __future__ import annotations

import math

import pytest

from recipes.local.noisy_proof import Noise, NoisyReport, SpanScore, Verdicts, judge, log_odds

NOISE = Noise(sigma=0.004, widest=0.01)
RIGHT, WRONG, UNCLEAR = SpanScore(0.005, 0.2, 16), SpanScore(0.2, 0.005, 16), SpanScore(0.005, 0.007, 16)
NEITHER = SpanScore(0.8, 0.9, 16)
SPANNING = {"in_place": 3, "retract": 2}


def report(claims: list[SpanScore], faulty: list[SpanScore]) -> NoisyReport:
    return judge(NOISE, claims, faulty, len(claims), SPANNING)


def test_noise_is_measured_on_tokens_and_spans() -> None:
    noise = Noise.of([[0.0, 0.002], [0.004, 0.006]])
    assert noise.sigma == pytest.approx(0.002236, abs=1e-6)
    assert noise.widest == pytest.approx(0.005)
    assert NOISE.band(16) == pytest.approx(0.003)
    assert NOISE.band(64) == pytest.approx(0.0015)


def test_log_odds() -> None:
    assert log_odds(math.log(0.5)) == pytest.approx(0.0)
    assert log_odds(math.log(0.9)) == pytest.approx(math.log(9))
    assert log_odds(0.0) == log_odds(-1e-9) == pytest.approx(11.51, abs=0.01)


def test_verdicts() -> None:
    assert Verdicts.of([RIGHT, WRONG, UNCLEAR, NEITHER], NOISE) == Verdicts(1, 2, 1)


def test_a_longer_span_decides_what_a_short_one_does_not() -> None:
    assert Verdicts.of([SpanScore(0.005, 0.007, 64)], NOISE) == Verdicts(1, 0, 0)


def test_right_labels_are_proven_and_both_controls_found_out() -> None:
    found = report([RIGHT] * 9 + [UNCLEAR], [WRONG, NEITHER])
    assert (found.claims, found.shifted) == (Verdicts(9, 0, 1), Verdicts(0, 9, 1))
    assert found.faulty == Verdicts(0, 2, 0)
    assert found.problems() == []


def test_one_span_against_its_version_is_a_problem() -> None:
    expected = ["1 of 100 spans speak against their version"]
    assert report([RIGHT] * 99 + [WRONG], [WRONG]).problems() == expected


def test_too_many_undecided_spans_are_a_problem() -> None:
    problems = report([RIGHT] * 8 + [UNCLEAR] * 2, [WRONG]).problems()
    assert problems[0] == "only 8 of 10 spans speak for their version"


def test_a_faulty_replica_that_passes_is_a_problem() -> None:
    expected = ["the faulty replica: only 0 of 1 spans speak against it"]
    assert report([RIGHT], [RIGHT]).problems() == expected


def test_a_mode_without_activations_is_a_problem() -> None:
    found = judge(NOISE, [RIGHT], [WRONG], 1, {"in_place": 1})
    assert found.problems() == ["no trajectory spans an activation in mode retract"]
