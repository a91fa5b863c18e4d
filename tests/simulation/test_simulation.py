"""The five promises, in simulated worlds: named cases, and random worlds where anything may go wrong.

A failure prints the world's trace and its seed; ``python -m stitch_core.testing.simulation --scenario NAME
--seed N`` replays it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from stitch_core import lineage
from stitch_core.testing.sim_retention import RETENTION_CASES
from stitch_core.testing.simulation import RANDOM, SCENARIOS, run_seed

CASES = [name for name in SCENARIOS if name not in RANDOM]
CHUNK = 25
FAST = 50  # seeds of random worlds in `make check`


def run(scenario: str, seeds: range) -> None:
    for seed in seeds:
        report = run_seed(seed, scenario)
        assert report.error is None, str(report)


@pytest.mark.parametrize("scenario", CASES)
def test_case(scenario: str) -> None:
    run(scenario, range(2))


@pytest.mark.parametrize("first", range(0, FAST, CHUNK))
def test_anything(first: int) -> None:
    run("anything", range(first, first + CHUNK))


@pytest.mark.slow
@pytest.mark.parametrize("scenario", CASES)
def test_case_with_many_seeds(scenario: str) -> None:
    slower = SCENARIOS[scenario] in RETENTION_CASES
    run(scenario, range(1000, 1010 if slower else 1030))


@pytest.mark.slow
@pytest.mark.parametrize("first", [*range(FAST, 200, CHUNK), *range(1000, 3000, CHUNK)])
def test_anything_with_many_seeds(first: int) -> None:
    run("anything", range(first, first + CHUNK))


@pytest.mark.slow
def test_random_worlds_are_eventful() -> None:
    """Faults do not keep everything from happening, nor does everything go well."""
    reports = [run_seed(seed) for seed in range(30)]
    assert sum(report.versions for report in reports) > 150
    assert sum(report.answered for report in reports) > 300
    assert sum(report.spanning for report in reports) > 20
    refused = {kind for report in reports for kind in report.refused}
    assert {"WeightVersionNotReady", "WeightVersionElsewhere", "EngineUnavailable"} <= refused
    traces = "\n".join(line for report in reports for line in report.trace)
    for event in (
        "did not arrive",
        "is late",
        "lands late",
        "dies partial",
        "the machine crashes",
        "no space",
    ):
        assert event in traces
    for event in (
        "is to roll",
        "merging",
        "is to point",
        "chaos: kills",
        "stands still",
        "the engine dies",
        "fenced",
        "is not answered",
        "failed: ",
        "is published as sparse",
        "is published as overwrite",
        "is published as full",
        "is published by",
        "a bit of",
    ):
        assert event in traces


@pytest.mark.parametrize("scenario", ["c33", "r01", "r04"])
def test_what_was_abandoned_is_left_also_where_no_delta_goes_backwards(
    scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that cannot undo what it has applied starts again from what it can."""
    monkeypatch.setattr(lineage, "REVERSIBLE", frozenset())
    run(scenario, range(4))


def test_a_seed_replays_exactly_whatever_the_hash_seed() -> None:
    """Sets of strings and addresses of objects have no say in what happens."""
    here = [run_seed(seed) for seed in range(4)]
    again = [run_seed(seed) for seed in range(4)]
    assert [(r.fingerprint, r.trace) for r in here] == [(r.fingerprint, r.trace) for r in again]
    assert len({r.fingerprint for r in here}) == 4
    program = (
        "from stitch_core.testing.simulation import run_seed\n"
        "print(*(run_seed(seed).fingerprint for seed in range(4)))"
    )
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        there = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert there.stdout.split() == [r.fingerprint for r in here]


def test_the_command_line() -> None:
    command = [
        sys.executable,
        "-m",
        "stitch_core.testing.simulation",
        "--scenario",
        "c03",
        "--count",
        "2",
        "-v",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "c03 seed 2: " in done.stdout
    assert "2 seeds, 0 failed" in done.stdout
