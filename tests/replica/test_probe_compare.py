"""What a probe asks, and when two answers are of the same weights."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stitch_core.replica import probe_prompt
from stitch_core.replica.probe import LEAST_TOLERANCE, NOISE_FACTOR, difference, noise_of, tolerance

pytestmark = pytest.mark.virtual_time


def test_a_difference_is_relative_to_how_much_the_tokens_differ() -> None:
    one = [-1.0, -3.0, -5.0, -7.0]
    other = [value + 0.1 for value in one]
    assert difference(one, one) == 0.0
    assert difference(one, other) == pytest.approx(0.1 / math.sqrt(5))
    assert difference([10 * x for x in one], [10 * x for x in other]) == pytest.approx(difference(one, other))
    for worse in ([*one, -9.0], one[:3], [-1.0, -3.0, -5.0, math.nan], [-1.0, -3.0, -5.0, -math.inf]):
        assert difference(one, worse) == difference(worse, one) == math.inf
    assert difference([-4.0] * 4, [-4.1] * 4) > 1, "weights that tell no token from another"


def test_the_tolerance_follows_the_noise_from_a_floor_on() -> None:
    assert noise_of([]) == noise_of([(-1.0, -2.0)]) == 0.0
    assert noise_of([(-1.0, -2.0), (-1.0, -2.0), (-1.0, -2.1)]) == difference((-1.0, -2.0), (-1.0, -2.1))
    assert tolerance(0.0) == tolerance(LEAST_TOLERANCE / NOISE_FACTOR) == LEAST_TOLERANCE
    assert tolerance(0.1) == pytest.approx(0.1 * NOISE_FACTOR)


def test_the_prompt_is_spread_over_the_vocabulary_and_leaves_its_ends_out() -> None:
    ids = probe_prompt.prompt(151936)
    assert (len(ids), ids[0], ids[-1]) == (32, 2374, 149562)
    assert ids == sorted(set(ids))
    for vocabulary in (2, 37, 128, 32000):
        assert all(0 <= token < vocabulary for token in probe_prompt.prompt(vocabulary))
    assert len(probe_prompt.prompt(37, most=5)) == 5


def test_the_signature_is_of_what_changes_numbers() -> None:
    settings: dict[str, Any] = {
        "version": "0.5.23",
        "dtype": "bfloat16",
        "tp_size": 2,
        "port": 1,
        "host": "a",
    }
    settings |= {"weight_version": "default", "startup_time": {"load_weight": 1.0}, "kv_cache_dtype": "auto"}
    one = probe_prompt.signature(settings)
    for same in ({"port": 2}, {"weight_version": "r/weight_v000001"}, {"startup_time": {}}, {"host": "b"}):
        assert probe_prompt.signature({**settings, **same}) == one
    for other in ({"version": "0.6"}, {"dtype": "float16"}, {"tp_size": 4}, {"quantization": "fp8"}):
        assert probe_prompt.signature({**settings, **other}) != one


def test_an_answer_is_of_the_tokens_that_were_asked() -> None:
    asked = probe_prompt.request(128, "id")
    rows = [[None if i == 0 else -float(i), token, None] for i, token in enumerate(asked["input_ids"])]
    value = {"meta_info": {"input_token_logprobs": rows, "finish_reason": {"type": "length"}}}
    assert probe_prompt.answer(value, asked["input_ids"]) == tuple(-float(i) for i in range(1, 32))
    assert not probe_prompt.was_aborted(value)
    no_number = [*rows[:-1], [None, asked["input_ids"][-1], None]]
    for given in (rows[1:], no_number, None):
        broken = {"meta_info": {"input_token_logprobs": given}}
        assert probe_prompt.answer(broken, asked["input_ids"]) is None
    for broken in ({}, None, [], {"meta_info": {}}):
        assert probe_prompt.answer(broken, asked["input_ids"]) is None
    assert probe_prompt.was_aborted({"meta_info": {"finish_reason": {"type": "abort"}}})
