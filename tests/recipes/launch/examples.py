"""A site and recipes for the tests of launchers, with values that are hard to quote."""

import functools
from typing import Any

import pytest

from stitch_recipes import catalogue
from stitch_recipes.schema import Recipe
from stitch_recipes.site import Site

HARD = {
    "json": '{"a": [1, "b c"], "d": "it\'s"}',
    "shell": "$(date) `date` $HOME ${HOME} \\ \"x\" 'y' ; & | < > * ? [a] {b,c} ! #",
    "kubernetes": "$(POD_IP) $$(POD_IP) $$$ {{ .Values }}",
    "yaml": "- a: &b *c !d | > % @",
    "lines": "one\ntwo\n",
    "empty": "",
    "tab": "a\tb",
    "utf": "größe",
}
"""Flags whose values every quoting has to leave as they are."""


def hard(recipe: Recipe) -> Recipe:
    """The recipe with such flags, for the engine and for the trainer."""
    engine = recipe.engine.model_copy(update={"flags": {**recipe.engine.flags, **HARD}})
    trainer = recipe.trainer and recipe.trainer.model_copy(update={"flags": {**recipe.trainer.flags, **HARD}})
    return recipe.model_copy(update={"engine": engine, "trainer": trainer})


def site_for(recipe: Recipe, **fields: Any) -> Site:
    """A site with as many hosts as the recipe trains on, and two replicas on one host."""
    nodes = recipe.trainer.nodes if recipe.trainer else 0
    given = {
        "run": "math-1",
        "name": "math",
        "store": "s3://bucket/stitch",
        "secrets": ["store-keys"],
        "hosts": [f"me@train-{i}" for i in range(nodes)],
        "replicas": ["me@serve-0", "me@serve-0", "me@serve-1"],
        "environment": dict.fromkeys(recipe.trainer.asks, "agents") if recipe.trainer else {},
    }
    return Site.model_validate(given | fields)


@functools.cache  # ten modules ask at collection
def every() -> list[Recipe]:
    """All recipes that there are."""
    return [catalogue.load(name) for name in catalogue.names()]


FAST = {"glm-4.5-air/fp8", "kimi-k3/mxfp4-serve", "qwen3-0.6b/miles"}


def cases(trained: bool = False) -> list[Any]:
    """Every recipe as a test's parameter, or each that trains; all but a few in ``make test`` only."""
    recipes = [recipe for recipe in every() if recipe.trainer or not trained]
    slow = [() if recipe.name in FAST else pytest.mark.slow for recipe in recipes]
    return [pytest.param(r, marks=m, id=r.name) for r, m in zip(recipes, slow, strict=True)]
