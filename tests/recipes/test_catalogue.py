"""Recipes are composed of blocks, and told apart from files that are wrong."""

from pathlib import Path

import pytest

from stitch_recipes import catalogue
from stitch_recipes.errors import RecipeError


def test_a_table_is_merged_key_by_key_and_all_else_is_replaced() -> None:
    below = {"flags": {"lr": 1e-6, "betas": [0.9, 0.98]}, "nodes": 1}
    above = {"flags": {"betas": [0.9]}, "gpu": "H200"}
    assert catalogue.merged(below, above) == {
        "flags": {"lr": 1e-6, "betas": [0.9]}, "nodes": 1, "gpu": "H200",
    }  # fmt: skip
    assert below["flags"] == {"lr": 1e-6, "betas": [0.9, 0.98]}


def test_blocks_are_merged_in_order_and_the_recipe_comes_last() -> None:
    document = {"blocks": {"b": {"x": 2, "y": 2}}, "recipes": {"r": {"uses": ["a", "b"], "y": 3}}}
    shared = {"blocks": {"a": {"x": 1, "z": 1}}}
    assert catalogue.compose(document, shared, "r", "here") == {"x": 2, "y": 3, "z": 1}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"recipes": {"r": {"uses": ["gone"]}}}, r"here \[recipes.r\] uses 'gone': no such block"),
        ({"blocks": {"a": {"uses": ["a"]}}, "recipes": {"r": {"uses": ["a"]}}}, "r\\] > a uses 'a': itself"),
        ({"recipe": {}, "recipes": {"r": {}}}, "here: recipe: no such table in a model's file"),
    ],
)
def test_what_is_misspelt_is_named(document: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        catalogue.compose(document, {}, "r", "here")


def test_a_recipe_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="there is no recipe glm/x; there are: "):
        catalogue.load("glm/x")
    with pytest.raises(RecipeError, match="'glm' is not <model>/<recipe>"):
        catalogue.load("glm")
    file = tmp_path / "own.toml"
    file.write_text("[recipes.a]\nsummary = 1\n")
    with pytest.raises(RecipeError, match=r"own.toml \[recipes.a\]: model: Field required"):
        catalogue.load(f"{file}/a")
