"""A problem's age: by a clock that never jumps, whichever of the two kinds of replica has it."""

from __future__ import annotations

from stitch_core.replica.problem import noted


class HandClock:
    """Wall time and time that never jumps, set by hand."""

    def __init__(self) -> None:
        self.wall, self.steady = 1_000_000.0, 10.0

    def time(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.steady


def test_a_problem_whose_wall_clock_was_set_back_an_hour_was_minus_an_hour_old() -> None:
    clock = HandClock()
    problem = noted(None, "the store is away", clock)
    clock.wall, clock.steady = clock.wall - 3600.0, clock.steady + 5.0
    shown = problem.shown(clock)
    assert shown == {
        "message": "the store is away", "since": 1_000_000.0, "last": 1_000_000.0, "count": 1, "age": 5.0,
    }  # fmt: skip


def test_the_same_again_is_counted_and_another_keeps_the_age() -> None:
    clock = HandClock()
    problem = noted(None, "the store is away", clock)
    clock.wall, clock.steady = clock.wall + 2.0, clock.steady + 2.0
    problem = noted(problem, "the store is away", clock)
    assert (problem.count, problem.since, problem.last) == (2, 1_000_000.0, 1_000_002.0)
    clock.wall, clock.steady = clock.wall + 1.0, clock.steady + 1.0
    problem = noted(problem, "its answer is damaged", clock)
    assert (problem.message, problem.count) == ("its answer is damaged", 1)
    assert problem.shown(clock)["age"] == 3.0
