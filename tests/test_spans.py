"""Which spans a run ought to have: a joiner takes an aggregate and at most six pieces at every version."""

from __future__ import annotations

import itertools
import random

import pytest

from stitch_core.lineage import Sketch, cheapest_plan
from stitch_core.spans import SHAPE, edges, newest_aggregate, replaced, wanted
from stitch_core.versions import PolicyVersion


def compacted(numbers: list[int], root: int = 0) -> set[tuple[int, int]]:
    """What a compactor makes that looks after each version."""
    there: set[tuple[int, int]] = set()
    for i in range(1, len(numbers) + 1):
        seen = numbers[:i]
        low = newest_aggregate(seen, there, root)
        there |= set(wanted([n for n in seen if n >= low], root))
        there -= set(replaced(there, root))
    return there


def pieces(numbers: list[int], spans: set[tuple[int, int]]) -> int:
    """How many a joiner at the last of the versions takes, where the size of a piece goes with its root."""

    def sketch(a: int, b: int) -> Sketch:
        return Sketch.delta(
            PolicyVersion("r", b), f"s{a}", f"s{b}", round(1000 * (b - a) ** 0.5), f"{a}-{b}", ""
        )

    target = sketch(numbers[-2], numbers[-1])
    deltas = [sketch(a, b) for a, b in itertools.pairwise(numbers)]
    spans = {(a, b) for a, b in spans if b <= numbers[-1]}
    return len(cheapest_plan(target, [*deltas, *(sketch(*span) for span in spans)], {"s0"}).sources)  # type: ignore[arg-type]


@pytest.mark.slow
def test_at_most_seven_pieces_at_any_version() -> None:
    numbers = list(range(300))
    most = max(pieces(numbers[: head + 1], compacted(numbers[: head + 1])) for head in range(1, 300))
    assert most == 7


def test_numbers_that_were_left_out_move_the_edges() -> None:
    rng = random.Random(0)
    for _ in range(30):
        numbers = [0, *sorted(rng.sample(range(1, 200), 120))]
        assert pieces(numbers, compacted(numbers)) <= 7
    assert edges([0, 1, 3, 5, 6], 4) == [0, 3]
    assert edges([0, 100], 4) == [0, 100]
    assert wanted([0, 100], 0) == []


def test_a_late_compactor_makes_no_blocks_of_four_for_versions_of_long_ago() -> None:
    ranges = wanted(list(range(1001)), 0)
    assert ranges[0] == (936, 940)
    assert ranges[16:18] == [(0, 16), (16, 32)]
    assert ranges[-1] == (0, 992)


def test_the_root_need_not_be_version_0() -> None:
    ranges = wanted(list(range(13, 41)), 13)
    assert ranges == [(16, 20), (20, 24), (24, 28), (28, 32), (32, 36), (36, 40), (16, 32), (13, 32)]


def test_two_aggregates_are_kept_and_nothing_else_goes() -> None:
    spans = compacted(list(range(100)))
    assert {b for a, b in spans if a == 0 and b > 16} == {80, 96}
    assert SHAPE.kept == 2
    assert not replaced([(0, 4), (0, 16), (0, 32), (4, 48), (0, 48)], 0)


@pytest.mark.parametrize("head", range(1, 40))
def test_nothing_is_wanted_twice_or_beyond_the_head(head: int) -> None:
    ranges = wanted(list(range(head + 1)), 0)
    assert len(set(ranges)) == len(ranges)
    assert all(0 <= a < b <= head and b - a > 1 for a, b in ranges)
