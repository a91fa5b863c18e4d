"""The arithmetic of a projection: every term by hand, nothing in place of what was not measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stitch_recipes.profile.assumptions import Assumptions
from stitch_recipes.profile.projection import Projection, Rates, Sizes, project
from stitch_recipes.profile.published import Published

HOST = Assumptions(cores=64, network=2.0, memory=240.0, pcie=50.0, nvme=4.0, step=0.02)
RATES = Rates("m", 1_000_000_000, ratio=0.01, fetch=1.0, apply=0.5, load=0.8, copy=0.9, rest=0.05, hash=1.0)
SIZES = Sizes(canonical=100e9, image=30e9, ranks=4)
THEIRS = Published(
    recipes=["x/y"], what="x", path="memory", preparation=50.0, pause=1.0, total=51.0, source="README.md"
)


def seconds(projection: Projection) -> list[float | None]:
    return [term.seconds for term in projection.terms]


def test_each_term_is_its_formula() -> None:
    projected = project("x/y", "memory", RATES, SIZES, HOST, THEIRS)
    assert seconds(projected) == pytest.approx([
        1.0,  # 1 GB at 1 GB/s
        25.0,  # 100 GB by 8 threads of 0.5 GB/s
        12.5,  # 100 GB hashed by 8 threads of 1 GB/s, while one takes 30 GB at 0.25 s/GB
        30 / (50 * 0.9),
        0.07,  # a step and what was measured beside it
    ])  # fmt: skip
    assert projected.preparation == pytest.approx(38.5)
    assert projected.total == pytest.approx(38.5 + 30 / 45 + 0.07)
    assert projected.ratios()["preparation"] == pytest.approx(38.5 / 50)
    assert set(projected.ratios()) == {"preparation", "pause", "total"}


@pytest.mark.parametrize(
    ("change", "term", "expected"),
    [
        ({"network": 0.5}, 0, 2.0),
        ({"memory": 6.0}, 1, 50.0),  # 3 bytes moved for each: 2 GB/s
        ({"memory": 6.0}, 2, 100 / 1.5),  # hashed by four ranks: 1.5 GB/s each
        ({"cores": 4}, 2, 100.0 + 30 * 0.25),  # one thread does both
        ({"memory": 40.0}, 3, 30 / (10 * 0.9)),  # less than PCIe for each of four
        ({"cores": 4}, 1, 100.0),  # 2 threads
        ({"cores": 1}, 1, 200.0),
    ],
)
def test_the_slower_of_what_was_measured_and_what_is_assumed_counts(
    change: dict[str, float], term: int, expected: float
) -> None:
    projected = project("x/y", "memory", RATES, SIZES, replace(HOST, **change))  # type: ignore[arg-type]
    assert seconds(projected)[term] == pytest.approx(expected)


def test_a_canonical_checkpoint_on_nvme_is_as_slow_as_the_disk() -> None:
    projected = project("x/y", "nvme", RATES, SIZES, HOST)
    assert seconds(projected)[1] == pytest.approx(50.0)  # read and written: 2 GB/s
    fast = project("x/y", "nvme", replace(RATES, load=1.0, hash=1.0), SIZES, HOST)
    assert seconds(fast)[2] == pytest.approx(25.0)
    assert fast.pause == projected.pause


def test_what_no_engine_measured_is_absent_and_so_are_the_sums_that_need_it() -> None:
    alone = replace(RATES, load=None, copy=None, rest=None)
    projected = project("x/y", "memory", alone, SIZES, HOST, THEIRS)
    assert seconds(projected)[2:] == [None, None, None]
    assert (projected.preparation, projected.pause, projected.total) == (None, None, None)
    assert projected.ratios() == {}
    assert "no engine served m" in projected.terms[2].formula


def test_rates_of_another_models_engine_say_whose_they_are() -> None:
    alone = replace(RATES, load=None, copy=None, rest=None)
    other = replace(RATES, of="another", apply=9.0)
    rates = alone.with_engine_of(other)
    assert (rates.load, rates.apply, rates.engine_of) == (0.8, 0.5, "another")
    assert any("another" in why for why in project("x/y", "memory", rates, SIZES, HOST).why())
    assert RATES.with_engine_of(other) is RATES


def test_rates_of_a_tiny_checkpoint_are_said_to_be_fixed_costs() -> None:
    tiny = replace(RATES, bytes=6_000_000)
    assert any("--size" in why for why in project("x/y", "memory", tiny, SIZES, HOST).why())
    assert not any("--size" in why for why in project("x/y", "memory", RATES, SIZES, HOST).why())


def test_a_row_without_a_total_has_no_ratio_of_totals() -> None:
    theirs = THEIRS.model_copy(update={"total": None})
    assert set(project("x/y", "memory", RATES, SIZES, HOST, theirs).ratios()) == {"preparation", "pause"}
