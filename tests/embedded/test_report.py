"""What a response says determines what computed it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch_embedded.report import Pass, Span, cut, merge, passes_of, token_spans, version_fields


@st.composite
def lives(draw: st.DrawFn) -> tuple[int, int, tuple[Pass, ...]]:
    """(prompt tokens, output tokens, passes) of a request, versions rising as they do."""
    prompt = draw(st.integers(1, 6))
    bounds = sorted(draw(st.sets(st.integers(1, 8), min_size=1, max_size=4)))
    version = 0
    passes = []
    first = 0
    for end in bounds:
        rows = []
        at, stop = 0, prompt - 1 + end
        while at < stop:
            size = draw(st.integers(1, stop - at))
            rows.append(Span(f"v{version}", at, at + size))
            at += size
            version += 1
        version -= draw(st.integers(0, 1))
        passes.append(Pass(first, merge(rows)))
        first = end
    return prompt, bounds[-1], tuple(passes)


@given(lives())
def test_fields_tell_all(life: tuple[int, int, tuple[Pass, ...]]) -> None:
    prompt, tokens, passes = life
    fields = json.loads(json.dumps(version_fields(prompt, tokens, passes, "now")))
    again = passes_of(prompt, fields)
    assert again == passes or _same_rows(prompt, tokens, again, passes)
    assert fields["weight_versions"][-1]["end"] == tokens
    assert fields["weight_version"] == fields["weight_versions"][-1]["version"]


def _same_rows(prompt: int, tokens: int, one: tuple[Pass, ...], other: tuple[Pass, ...]) -> bool:
    """Equal for every token: the versions of all rows up to its own."""

    def seen(passes: tuple[Pass, ...], token: int) -> tuple[Span, ...]:
        last = [p for p in passes if p.first_token <= token][-1]
        return cut(last.rows, 0, prompt + token)

    return all(seen(one, t) == seen(other, t) for t in range(tokens))


def test_in_place_and_retract_need_no_passes() -> None:
    kept = (Pass(0, (Span("7", 0, 6), Span("8", 6, 9))),)
    fields = version_fields(4, 6, kept, "8")
    assert fields == {
        "weight_version": "8",
        "weight_versions": [{"version": "7", "start": 0, "end": 3}, {"version": "8", "start": 3, "end": 6}],
        "kv_versions": [{"version": "7", "start": 0, "end": 3}],
        "kv": "mixed",
    }
    again = (Pass(0, (Span("7", 0, 6),)), Pass(3, (Span("8", 0, 9),)))
    fields = version_fields(4, 6, again, "8")
    assert fields["kv_versions"] == [{"version": "8", "start": 0, "end": 3}]
    assert fields["kv"] == "uniform"
    assert "kv_passes" not in fields


def test_no_tokens() -> None:
    fields = version_fields(4, 0, (), "8")
    assert fields == {"weight_version": "8", "weight_versions": [], "kv_versions": [], "kv": "uniform"}


def test_token_spans_and_cut() -> None:
    assert token_spans(1, 2, (Pass(0, (Span("a", 0, 2),)),)) == (Span("a", 0, 2),)
    assert cut((Span("a", 0, 4), Span("b", 4, 6)), 3, 5) == (Span("a", 0, 1), Span("b", 1, 2))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"weight_versions": [{"version": "7", "start": 1, "end": 3}], "kv_versions": [], "kv": "mixed"},
        {"weight_versions": [{"version": "7", "start": 0}], "kv_versions": [], "kv": "mixed"},
        {
            "weight_versions": [{"version": "7", "start": 0, "end": 3}],
            "kv_versions": [],
            "kv": "uniform",
            "kv_passes": [{"first_token": 0, "kv_versions": [{"version": "8", "start": 0, "end": 9}]}],
        },
    ],
)
def test_unfit_fields(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"spans|version fields|fit together"):
        passes_of(4, fields)
