"""The engine's flags: known to its release, not refused by the plugin, and not Stitch's own."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

from stitch_sglang.refuse import NotCovered, refuse

from ..errors import RecipeError
from ..schema import Recipe
from . import flags

OURS = ("model-path", "host", "port", "tp-size", "tensor-parallel-size")
"""Set by processes.replica."""


def problems(recipe: Recipe) -> Iterator[str]:
    """Against the list of the release, and the plugin's own list of what it does not cover."""
    engine = recipe.engine
    try:
        yield from flags.problems("engine.flags", engine.flags, flags.flag_list("sglang", engine.release))
    except RecipeError as error:
        yield f"engine.release: {error}"
    for name in engine.flags:
        if name in OURS or name.startswith("stitch-"):
            yield f"engine.flags.{name}: it follows from other fields of the recipe"
    given = {name.replace("-", "_"): value for name, value in engine.flags.items() if value is not False}
    try:
        refuse(SimpleNamespace(**given), engine.environment)
    except NotCovered as error:
        yield f"engine.flags: the plugin refuses {error}"
    for name in engine.environment:
        if name.startswith("STITCH_"):
            yield f"engine.environment.{name}: it follows from other fields of the recipe"
