"""What can be known of a recipe without a GPU: each module's ``problems(recipe)`` names fields in texts."""

from __future__ import annotations

from ..schema import Recipe
from . import cadence, engine, facts, memory, trainer

RULES = (facts, memory, cadence, engine, trainer)


def problems(recipe: Recipe) -> list[str]:
    """Everything that is wrong, in the order of the rules; nothing if the recipe can be launched as it is."""
    return [problem for rule in RULES for problem in rule.problems(recipe)]
