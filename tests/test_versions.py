"""Names of versions, constraints and refusals."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch_core.versions import (
    HEADER_EXACT,
    HEADER_MIN,
    HEADER_RUN,
    LAST_NUMBER,
    PolicyVersion,
    VersionConstraint,
    VersionError,
    check_run_id,
    judge,
)

RUNS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", fullmatch=True)


@given(RUNS, st.integers(0, 10**18 - 1))
def test_a_version_reads_back(run: str, number: int) -> None:
    version = PolicyVersion(run, number)
    assert PolicyVersion.parse(str(version)) == version


def test_spelling() -> None:
    assert str(PolicyVersion("run", 7)) == "run/weight_v000007"
    assert str(PolicyVersion("run", 1_234_567)) == "run/weight_v1234567"


@pytest.mark.parametrize(
    "text",
    [
        "", "7", "weight_v000007", "run/weight_v7", "run/weight_v0000007", "run/weight_v000007 ",
        "run/weight_v000007\n", "run/weight_v-00007", "/weight_v000007", ".run/weight_v000007",
        "a/b/weight_v000007", "run/weight_v\u0660\u0660\u0660\u0660\u0660\u0667",
        "run/weight_v" + "1" * 5000, "latest", None, 7, b"x",
    ],
)  # fmt: skip
def test_what_is_no_version_is_an_error(text: Any) -> None:
    with pytest.raises(VersionError):
        PolicyVersion.parse(text)


@given(st.text())
def test_any_text_is_a_version_or_an_error(text: str) -> None:
    with contextlib.suppress(VersionError):
        assert str(PolicyVersion.parse(text)) == text


@pytest.mark.parametrize("run", ["", ".", "..", "-x", "a/b", "a b", "ü", "x" * 129, None, 3])
def test_run_ids(run: Any) -> None:
    with pytest.raises(VersionError):
        check_run_id(run)


@pytest.mark.parametrize("number", [-1, 1.0, True, "1", None])
def test_numbers(number: Any) -> None:
    with pytest.raises(VersionError):
        PolicyVersion("run", number)


@pytest.mark.parametrize(
    "field",
    [
        5, "7", [], 0, False, True, "",
        {"min_version": "abc"}, {"min_version": -1}, {"min_version": 1.5}, {"min_version": True},
        {"min_version": []}, {"exact_version": "3"}, {"exact_version": -2},
        {"min_version": 9, "exact_version": 3}, {"version": 3}, {"min_version": 3, "x": None},
        {"run": ""}, {"run": 4}, {"run": "../x"},
    ],
)  # fmt: skip
def test_C13_a_malformed_constraint_is_an_error_and_never_none(field: Any) -> None:
    with pytest.raises(VersionError, match=r"version|run"):
        VersionConstraint.parse(field)


NO_NUMBERS: list[Any] = [
    10**18, 2**63 - 1, 2**63, 10**4000, -1, -(2**70), 7.0, float("nan"), True, "7", "7" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("key", ["min_version", "exact_version"])
@pytest.mark.parametrize("number", NO_NUMBERS, ids=range(len(NO_NUMBERS)))
def test_C13_a_number_that_no_version_can_have_was_waited_for(key: str, number: Any) -> None:
    """From 10**18 on no key can name it. A request was told that it is not ready yet."""
    with pytest.raises(VersionError, match=rf"{key} must be an integer from 0 to 9{{18}}, not ") as error:
        VersionConstraint.parse({key: number})
    assert len(str(error.value)) < 400
    assert VersionConstraint.parse({key: LAST_NUMBER}) == VersionConstraint(**{key: LAST_NUMBER})


@pytest.mark.parametrize("header", [HEADER_MIN, HEADER_EXACT])
@pytest.mark.parametrize("text", ["1" * 19, "7" * 5000, "+7", "7.0", "0x7", "7, 7", "\u0667"])
def test_C13_a_header_with_such_a_number(header: str, text: str) -> None:
    with pytest.raises(VersionError, match=f"header {header} must be an integer from 0 to 9") as error:
        VersionConstraint.parse(None, {header: text})
    assert len(str(error.value)) < 400
    assert VersionConstraint.parse(None, {header: str(LAST_NUMBER)})


def test_a_version_above_the_last_number_cannot_be_spelled() -> None:
    assert PolicyVersion.parse(str(PolicyVersion("r", LAST_NUMBER))) == PolicyVersion("r", LAST_NUMBER)
    with pytest.raises(VersionError, match="from 0 to"):
        PolicyVersion("r", LAST_NUMBER + 1)


@pytest.mark.parametrize("text", ["x" * 5000, "x/weight_v" + "7" * 5000])
def test_what_is_long_is_cut_in_messages(text: str) -> None:
    for wrong in (
        lambda: check_run_id(text),
        lambda: PolicyVersion.parse(text),
        lambda: VersionConstraint.parse({text: 1}),
        lambda: VersionConstraint.parse({"run": text}),
    ):
        with pytest.raises(VersionError, match=r"\.\.\. \(50[0-9]+ characters\)") as error:
            wrong()
        assert len(str(error.value)) < 400


@pytest.mark.parametrize("field", [None, {}, {"min_version": None}, {"exact_version": None, "run": None}])
def test_C13_absent_and_null_mean_no_constraint(field: Any) -> None:
    constraint = VersionConstraint.parse(field, {})
    assert not constraint
    assert constraint.allows(PolicyVersion("any", 0))
    assert constraint.fields() == {}


@pytest.mark.parametrize(
    "headers",
    [
        {HEADER_MIN: "abc"}, {HEADER_MIN: "-1"}, {HEADER_MIN: ""}, {HEADER_MIN: "1.0"},
        {HEADER_MIN: "\u0663"},
        {HEADER_MIN: "1" * 19}, {HEADER_RUN: "a/b"}, {HEADER_MIN: "9", HEADER_EXACT: "3"},
    ],
)  # fmt: skip
def test_C13_malformed_headers(headers: dict[str, str]) -> None:
    with pytest.raises(VersionError):
        VersionConstraint.parse(None, headers)


def test_body_and_headers_merge_and_may_not_disagree() -> None:
    merged = VersionConstraint.parse({"min_version": 3}, {HEADER_MIN: " 3 ", HEADER_RUN: "r"})
    assert merged == VersionConstraint(min_version=3, run="r")
    with pytest.raises(VersionError, match="says 4"):
        VersionConstraint.parse({"min_version": 3}, {HEADER_MIN: "4"})


@pytest.mark.parametrize(
    ("constraint", "allowed"),
    [
        (VersionConstraint(), [5, 6, 7]),
        (VersionConstraint(min_version=6), [6, 7]),
        (VersionConstraint(exact_version=6), [6]),
        (VersionConstraint(min_version=5, exact_version=7), [7]),
        (VersionConstraint(run="other"), []),
        (VersionConstraint(run="run", min_version=7), [7]),
    ],
)
def test_allows(constraint: VersionConstraint, allowed: list[int]) -> None:
    assert [n for n in (5, 6, 7) if constraint.allows(PolicyVersion("run", n))] == allowed


@given(st.builds(VersionConstraint, *[st.none() | st.integers(0, 9)] * 2), st.integers(0, 9))
def test_judge_admits_what_is_allowed_and_nothing_else(constraint: VersionConstraint, number: int) -> None:
    low, exact = constraint.min_version, constraint.exact_version
    if low is not None and exact is not None and low > exact:
        return
    serving = PolicyVersion("run", number)
    refusal = judge(constraint, serving)
    assert (refusal is None) == constraint.allows(serving)
    if refusal is not None:
        assert refusal.status == 409
        assert refusal.retry == ("elsewhere" if exact is not None and exact < number else "here")
        error = refusal.body()["error"]
        assert (error["retryable"], error["applied"], error["run"]) == (True, number, "run")
        assert ("retry-after" in refusal.headers()) == (refusal.retry == "here")
