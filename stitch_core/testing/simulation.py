"""The simulator: the real publisher, reconciler, gate, host checkpoint and middleware in simulated worlds.

    python -m stitch_core.testing.simulation --seed 1 --count 2000
    python -m stitch_core.testing.simulation --scenario anything --seed 17 -v

A seed fixes everything that happens, so a failure is replayed by its seed. See ``sim_judge`` for what is
checked.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random

from .faults import FaultPlan
from .loop import simulated_loop
from .sim_cases import CASES
from .sim_found import FOUND
from .sim_judge import Broken
from .sim_probe_cases import PROBE_CASES
from .sim_random import anything
from .sim_rank_cases import RANK_CASES
from .sim_replica_cases import REPLICA_CASES
from .sim_retention import RETENTION_CASES
from .sim_rollback_cases import ROLLBACK_CASES
from .sim_world import World

Scenario = Callable[[World], Awaitable[None]]

SCENARIOS: dict[str, Scenario] = {
    scenario.__name__.split("_")[0]: scenario
    for scenario in (
        anything,
        *CASES,
        *REPLICA_CASES,
        *ROLLBACK_CASES,
        *RETENTION_CASES,
        *PROBE_CASES,
        *RANK_CASES,
        *FOUND,
    )
}


@dataclass
class Report:
    """What became of one seed. ``fingerprint`` differs if anything at all went differently."""

    scenario: str
    seed: int
    error: str | None = None
    plan: str = ""
    steps: int = 0
    seconds: float = 0.0
    versions: int = 0
    answered: int = 0
    spanning: int = 0
    collected: int = 0
    deceived: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    fingerprint: str = ""
    trace: list[str] = field(default_factory=list)

    @property
    def rule(self) -> str | None:
        """``promise: rule`` that was broken, or the kind of error."""
        return None if self.error is None else ": ".join(self.error.split(": ")[:2])

    def __str__(self) -> str:
        head = f"{self.scenario} seed {self.seed}: "
        counts = (
            f"{self.seconds:.0f} virtual s, {self.steps} steps, {self.versions} versions, "
            f"{self.answered} answers, {self.spanning} spanning, refused {self.refused}, "
            f"{self.collected} collected, {self.deceived} tokens of lies"
        )
        if self.error is None:
            return head + counts
        return "\n".join([*self.trace, f"plan: {self.plan}", counts, f"{head}{self.error}"])


RANDOM = ("anything", "retention")
"""Scenarios with random faults."""


def plan_for(scenario: str, random: Random) -> FaultPlan:
    """Any faults for the random scenarios; no others than their own for the named ones."""
    if scenario in RANDOM:
        quiet_after = random.choice((60.0, 150.0, 300.0))
        return FaultPlan.draw(random, quiet_after, names=["r0#1", "trainer#1"])
    return FaultPlan(latency=random.choice((0.001, 0.02, 0.2)))


def run_seed(seed: int, scenario: str = "anything") -> Report:
    """Run one world to its end; never raises for what went wrong in it."""
    random = Random(seed)
    report = Report(scenario, seed)
    with simulated_loop(random, max_steps=3_000_000) as loop:
        world = World(loop, plan_for(scenario, random))
        try:
            loop.run_until_complete(SCENARIOS[scenario](world))
            if loop.problems:
                report.error = "problem: " + "\n".join(loop.problems)
        except Exception as error:
            report.error = str(error) if isinstance(error, Broken) else _other_error(scenario, error)
        report.plan = str(world.faults.plan)
        report.steps, report.seconds = loop.steps, loop.time()
        judge = world.judge
        report.versions, report.answered = len(judge.versions), judge.answered
        report.spanning, report.refused = judge.spanning, judge.refused
        report.collected, report.deceived = judge.collected, judge.deceived
        report.fingerprint = f"{loop.steps}-{loop.time():.6f}-{random.getrandbits(64):016x}"
        report.trace = world.trace.lines()
    return report


def _other_error(scenario: str, error: Exception) -> str:
    """What a scenario asserts is a rule of its own; anything else is a fault of the simulator or the code."""
    kind = "scenario: " + scenario if isinstance(error, AssertionError) else type(error).__name__
    return f"{kind}: {error}\n{traceback.format_exc()}"


def main() -> int:
    """The command line; 1 if any seed failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument(
        "--scenario", choices=SCENARIOS, default="anything", metavar="NAME", help=", ".join(SCENARIOS)
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show each seed's trace")
    options = parser.parse_args()
    began, failed = time.perf_counter(), 0
    for seed in range(options.seed, options.seed + options.count):
        report = run_seed(seed, options.scenario)
        failed += report.error is not None
        if options.verbose and report.error is None:
            print("\n".join(report.trace))
        if options.verbose or report.error is not None:
            print(report, flush=True)
    print(f"{options.count} seeds, {failed} failed, {time.perf_counter() - began:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
