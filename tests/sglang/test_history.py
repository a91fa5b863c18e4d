"""KV rows in SGLang's spans, and what a final meta_info says of KV."""

from __future__ import annotations

from typing import Any

import pytest

from stitch_sglang.history import describe_kv, split

OLD, NEW, NEWEST = "r/weight_v000007", "r/weight_v000008", "r/weight_v000009"


def span(version: str, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


def described(*spans: dict[str, Any], prompt: int = 10, keeps_kv: bool = True, retractions: int = 0) -> Any:
    meta = {"weight_versions": list(spans), "prompt_tokens": prompt, "num_retractions": retractions}
    describe_kv(meta, keeps_kv=keeps_kv)
    return meta


def test_spans_without_rows_stay() -> None:
    assert split([span(OLD, 0, 4)]) == ([span(OLD, 0, 4)], [])
    assert split([]) == ([], [])


def test_rows_are_taken_out_of_the_first_span() -> None:
    spans = [span(f"{OLD}#4|{NEW}#6", 0, 0), span(NEWEST, 0, 3)]
    assert split(spans) == ([span(NEWEST, 0, 3)], [span(OLD, 0, 4), span(NEW, 4, 6)])


def test_one_version_is_uniform() -> None:
    meta = described(span(OLD, 0, 4))
    assert meta["kv"] == "uniform"
    assert meta["kv_versions"] == [span(OLD, 0, 9)]
    assert described(span(OLD, 0, 4), prompt=1)["kv_versions"] == []


def test_tokens_of_two_versions_keep_the_prompts_rows() -> None:
    meta = described(span(OLD, 0, 2), span(NEW, 2, 4))
    assert meta["kv"] == "mixed"
    assert meta["kv_versions"] == [span(OLD, 0, 9)]


def test_a_prompt_of_two_versions() -> None:
    meta = described(span(f"{OLD}#4", 0, 0), span(NEW, 0, 5))
    assert (meta["kv"], meta["weight_versions"]) == ("mixed", [span(NEW, 0, 5)])
    assert meta["kv_versions"] == [span(OLD, 0, 4), span(NEW, 4, 9)]


def test_rows_never_exceed_the_prompt() -> None:
    assert described(span(f"{OLD}#10", 0, 0), span(NEW, 0, 5))["kv_versions"] == [span(OLD, 0, 9)]


@pytest.mark.parametrize(("retractions", "expected"), [(0, True), (1, False)])
def test_recomputed_rows_are_of_nobody_knows_which_version(retractions: int, expected: bool) -> None:
    meta = described(span(OLD, 0, 2), span(NEW, 2, 4), retractions=retractions)
    assert meta["kv"] == "mixed"
    assert ("kv_versions" in meta) == expected


def test_retracted_rows_are_uniform() -> None:
    """All of them, by the last version."""
    meta = described(span(OLD, 0, 2), span(NEW, 2, 4), keeps_kv=False)
    assert meta["kv"] == "uniform"
    assert meta["kv_versions"] == [span(NEW, 0, 9)]
