"""The local recipe's report: green only when everything that the demo promises was met."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.local import plot, report
from recipes.local.fleet import Event
from recipes.local.grpo import StepStats
from recipes.local.report import Outcome, WarmUp
from recipes.local.settings import Settings
from recipes.local.trainer import Delta, StepRecord
from stitch_embedded.proof import Control, ProofReport


def step(number: int, exact: float) -> StepRecord:
    stats = StepStats(reward=0.5 + exact / 2, exact=exact, loss=0.1, entropy=0.2, clipped=0.0, mismatch=0.01)
    return StepRecord(
        number, 0.5 * number, number - 1, stats, staleness=2.0, oldest=4, versions=2.5, waited=0.1,
        trained=0.3, encoded=0.02, in_flight=50,
    )  # fmt: skip


def outcome(*, gain: float = 0.3) -> Outcome:
    update = {"time": 1001.0, "fetch": 0.01, "stage": 0.02, "pause": 0.001}
    return Outcome(
        Settings(seed=0, steps=20, out=Path("out")), 1000.0, WarmUp(60, 4.0, 0.3),
        [step(n, 0.2 + gain * (n > 10)) for n in range(1, 21)], [Delta(1, 100_000, 0.15, 0.05)], [update],
        [Event(999.0, "r0 serves", "r0 serves"), Event(1003.0, "r0 is sent SIGKILL", "r0 killed")],
        {"groups": 400, "dropped_groups": 3, "retries": {"EngineUnavailable": 2}}, [],
    )  # fmt: skip


def proof(**changes: Any) -> ProofReport:
    good = ProofReport(
        trajectories=100, tokens=1100, proven=100, spanning={"in_place": 40, "retract": 40}, min_spanning=20,
        discriminable=100, discriminated=100, shifted=Control(100, 100), faulty=Control(64, 64),
    )  # fmt: skip
    return replace(good, **changes)


def problems(outcome: Outcome, proof: ProofReport, *, min_gain: float = 0.2) -> list[str]:
    return list(report.summarise(outcome, proof, 150.0, min_gain=min_gain)["problems"])


def test_what_was_promised_and_met_is_green() -> None:
    summary = report.summarise(outcome(), proof(), 150.0, min_gain=0.2)
    assert summary["ok"]
    assert summary["training"]["learned"]
    assert json.loads(json.dumps(summary)) == summary
    assert "NOT MET" not in report.text(summary, Path("out"))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ((outcome(gain=0.1), proof()), "exact match"),
        ((replace(outcome(), failures=["a request was refused"]), proof()), "refused"),
        (
            (replace(outcome(), steps=[replace(step(1, 0.1), in_flight=3), step(2, 0.9)]), proof()),
            "in flight",
        ),
        ((outcome(), proof(proven=99)), "not proven"),
        ((outcome(), proof(spanning={"in_place": 40, "retract": 3})), "retract"),
        ((outcome(), proof(discriminated=50)), "neighbour"),
        ((outcome(), proof(shifted=Control(100, 0))), "shifted"),
        ((outcome(), proof(faulty=Control(64, 0))), "faulty"),
        ((outcome(), proof(faulty=Control(0, 0))), "faulty"),
    ],
)
def test_anything_else_is_named(bad: tuple[Outcome, ProofReport], words: str) -> None:
    found = problems(*bad)
    assert any(words in problem for problem in found), found
    summary = report.summarise(*bad, 150.0, min_gain=0.2)
    assert f"NOT MET      {found[0]}" in report.text(summary, Path("out"))


def test_the_gain_is_not_demanded_of_a_short_run() -> None:
    assert not problems(outcome(gain=0.0), proof(), min_gain=-1.0)


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    plot.draw(tmp_path / "plot.png", outcome())
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
