"""The table of published rows: typed, of recipes that exist, and as published."""

from pathlib import Path

import pytest

from stitch_recipes import catalogue
from stitch_recipes.errors import RecipeError
from stitch_recipes.profile.published import of_recipe, published
from stitch_recipes.profile.sizes import sizes_of


def test_every_row_is_of_recipes_that_there_are_and_appears_once() -> None:
    rows = published()
    assert {name for row in rows for name in row.recipes} <= set(catalogue.names())
    keys = [(name, row.path) for row in rows for name in row.recipes]
    assert len(keys) == len(set(keys)) == 19


def test_a_published_total_is_its_parts_to_the_last_digit() -> None:
    for row in published():
        if row.total is not None:
            assert row.total == pytest.approx(row.preparation + row.pause, abs=0.15), row.what


def test_a_recipe_is_compared_with_the_row_of_its_own_way() -> None:
    k3 = of_recipe("kimi-k3/mxfp4-serve", "nvme")
    assert k3 is not None
    assert (k3.preparation, k3.pause, k3.total) == (1089.7, 3.83, 1093.6)
    assert of_recipe("qwen3-0.6b/miles", "memory") is None


def test_a_wrong_row_is_refused_with_file_and_field(tmp_path: Path) -> None:
    wrong = tmp_path / "rows.toml"
    wrong.write_text(
        '[[rows]]\nrecipes = ["a/b"]\nwhat = "x"\npath = "ram"\npreparation = 1.0\npause = 1.0\n'
    )
    with pytest.raises(RecipeError, match=r"rows\.toml.*\n?.*path"):
        published(wrong)
    with pytest.raises(RecipeError, match=r"none\.toml"):
        published(tmp_path / "none.toml")


def test_full_sizes_are_the_published_ones_or_say_what_is_assumed() -> None:
    k3 = sizes_of(catalogue.load("kimi-k3/mxfp4-serve"))
    assert (k3.canonical, k3.image, k3.ranks, k3.assumed) == (1560.860324864e9, 207.5e9, 8, ())
    small = sizes_of(catalogue.load("moonlight-16b-a3b/slime"))
    assert small.image == small.canonical > 1.1e9
    assert len(small.assumed) == 2
