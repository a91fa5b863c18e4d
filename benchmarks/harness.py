"""What the benchmarks share: two sides timed in turns, rows, and one way to print them."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One figure. ``value`` and the number in ``target`` have the unit that ``what`` names.

    ``met`` is None where there is no target. ``excludes`` says what the figure leaves out.
    """

    id: str
    what: str
    value: float
    target: str | None = None
    met: bool | None = None
    excludes: str = ""


def at_most(id: str, what: str, value: float, limit: float, excludes: str = "") -> Row:
    return Row(id, what, value, f"<= {limit:g}", value <= limit, excludes)


def at_least(id: str, what: str, value: float, limit: float, excludes: str = "") -> Row:
    return Row(id, what, value, f">= {limit:g}", value >= limit, excludes)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleaved(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side in each round, every other round in the other order.

    What else the machine does then falls on all sides alike.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
            times[name].append(seconds(sides[name]))
    return times


def median_ratio(numerators: Iterable[float], denominators: Iterable[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def run(
    description: str,
    measure: Callable[[argparse.Namespace], Iterable[Row]],
    options: Callable[[argparse.ArgumentParser], Any] = lambda parser: None,
) -> None:
    """A benchmark's ``main``: reads the command line, measures and prints.

    ``measure`` gets the parsed options (``quick`` among them); what it says in between goes to stderr.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, and nothing else")
    parser.add_argument("--quick", action="store_true", help="smaller and in less than 50 s")
    options(parser)
    chosen = parser.parse_args()
    rows = list(measure(chosen))
    if chosen.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
        return
    for row in rows:
        verdict = {None: "", True: f"  target {row.target}: met", False: f"  target {row.target}: NOT met"}
        print(f"{row.id:6}{row.value:12.4g}  {row.what}{verdict[row.met]}")
        if row.excludes:
            print(f"{'':20}excludes {row.excludes}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
