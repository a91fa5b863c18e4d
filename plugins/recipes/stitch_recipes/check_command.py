"""``stitch recipe check``: everything that can be known of a recipe without a GPU."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from stitch_core.cli.common import Commands, add_command, emit, say, size_text

if TYPE_CHECKING:
    from .schema import Recipe


def add_parser(actions: Commands) -> None:
    checking = add_command(
        actions, "check", run_check, "check recipes without a GPU",
        "Check recipes: types; flags, against what the programs' own parsers take; memory against the sizes\n"
        "of checkpoints and images; parallel groups, batches, cadences; that the unknown is marked so.\n"
        "Then bytes and tensors of checkpoints, against what was published, and each is rehearsed: a\n"
        "checkpoint with the model's tensors, scaled down, is published as a run, joined and verified to\n"
        "the last byte. NAME may be FILE.toml/NAME, a file of your own.\n\n"
        "  stitch recipe check --all\n"
        "  stitch recipe check ./my-model.toml/fp8\n\n"
        "Exit code 1 when a recipe fails; every problem names its field.",
    )  # fmt: skip
    checking.add_argument("names", metavar="NAME", nargs="*")
    checking.add_argument("--all", action="store_true", dest="every", help="every recipe that there is")
    checking.add_argument("--no-rehearsal", action="store_true", help="read only: takes a second")
    checking.add_argument("--work", metavar="DIR", help="scratch space (default: the system's)")


async def run_check(options: argparse.Namespace) -> int:
    from . import catalogue
    from .check import problems
    from .errors import RecipeError

    if bool(options.names) == options.every:
        raise RecipeError("name recipes to check, or give --all: stitch recipe list")
    found: dict[str, dict[str, object]] = {}
    for name in catalogue.names() if options.every else options.names:
        try:
            recipe = catalogue.load(name)
        except RecipeError as error:
            if not options.every:
                raise
            found[name] = {"problems": str(error).splitlines()}
            continue
        wrong = problems(recipe)
        found[recipe.name] = {"problems": wrong}
        if not wrong and not options.no_rehearsal:
            say(f"{recipe.name}: rehearsing")
            found[recipe.name] |= await asyncio.to_thread(_rehearsed, recipe, options.work)
    failed = [name for name, entry in found.items() if entry["problems"]]
    emit({"recipes": found, "failed": failed}, options.json, lambda: _text(found))
    return 1 if failed else 0


def _rehearsed(recipe: Recipe, work: str | None) -> dict[str, object]:
    """The rehearsal's report, or what is wrong; sizes first, which take seconds as well."""
    from .check import sizes
    from .layout.formats import LayoutError
    from .layout.rehearsal import RehearsalFailed, rehearse

    try:
        if wrong := list(sizes.problems(recipe)):
            return {"problems": wrong}
    except LayoutError as error:
        return {"problems": [f"checkpoints: {error}"]}
    with tempfile.TemporaryDirectory(prefix="stitch-recipe-", dir=work) as directory:
        try:
            return {"rehearsal": asdict(rehearse(recipe, Path(directory)))}
        except RehearsalFailed as error:
            return {"problems": [f"rehearsal: {error}"]}


def _text(found: dict[str, dict[str, object]]) -> str:
    lines = []
    for name, entry in found.items():
        wrong = entry["problems"]
        assert isinstance(wrong, list)
        rehearsal = entry.get("rehearsal")
        said = "ok" if not wrong else f"{len(wrong)} problem(s)"
        if isinstance(rehearsal, dict):
            said += f", {rehearsal['tensors']} tensors of {size_text(rehearsal['bytes'])} rehearsed"
        lines += [f"{name}: {said}", *(f"  {problem}" for problem in wrong)]
    return "\n".join(lines)
