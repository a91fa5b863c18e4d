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
from .sim_random import anything
from .sim_world import World

Scenario = Callable[[World], Awaitable[None]]


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
            f"{self.answered} answers, {self.spanning} spanning, refused {self.refused}"
        )
        if self.error is None:
            return head + counts
        return "\n".join([*self.trace, f"plan: {self.plan}", counts, f"{head}{self.error}"])


def random_plan(random: Random) -> FaultPlan:
    return FaultPlan.draw(
        random, quiet_after=random.choice((60.0, 200.0, 400.0)), names=["r0#1", "trainer#1"]
    )


def run_seed(
    seed: int, scenario: Scenario = anything, plan: Callable[[Random], FaultPlan] = random_plan
) -> Report:
    """Run one world to its end; never raises for what went wrong in it."""
    random = Random(seed)
    report = Report(scenario.__name__, seed)
    with simulated_loop(random, max_steps=3_000_000) as loop:
        world = World(loop, plan(random))
        try:
            loop.run_until_complete(scenario(world))
            if loop.problems:
                report.error = "problem: " + "\n".join(loop.problems)
        except Exception as error:
            report.error = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
        report.plan = str(world.faults.plan)
        report.steps, report.seconds = loop.steps, loop.time()
        judge = world.judge
        report.versions, report.answered = len(judge.versions), judge.answered
        report.spanning, report.refused = judge.spanning, judge.refused
        report.fingerprint = f"{loop.steps}-{loop.time():.6f}-{random.getrandbits(64):016x}"
        report.trace = world.trace.lines()
    return report


def main() -> int:
    """The command line; 1 if any seed failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument("-v", "--verbose", action="store_true", help="show each seed's trace")
    options = parser.parse_args()
    began, failed = time.perf_counter(), 0
    for seed in range(options.seed, options.seed + options.count):
        report = run_seed(seed)
        failed += report.error is not None
        if options.verbose and report.error is None:
            print("\n".join(report.trace))
        if options.verbose or report.error is not None:
            print(report, flush=True)
    print(f"{options.count} seeds, {failed} failed, {time.perf_counter() - began:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
