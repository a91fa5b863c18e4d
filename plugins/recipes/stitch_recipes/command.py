"""``stitch recipe``: runs to copy, checked and rendered.

pydantic takes a moment to import: only the actions do, not every `stitch`, which looks whether it is there.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from stitch_core.cli.common import Commands, add_command, add_group, emit, table

from . import check_command, profile_command, render_command

for _name in ("pydantic", "yaml"):
    if find_spec(_name) is None:
        raise ModuleNotFoundError(f"No module named {_name!r}", name=_name)


def add_parser(commands: Commands) -> None:
    actions = add_group(
        commands, "recipe", "runs of GLM, Kimi and Qwen to copy",
        "A recipe is one file for a model and what is generated from it: launch scripts, a Modal app,\n"
        "Kubernetes manifests. recipes/README.md is the cookbook.",
    )  # fmt: skip
    add_command(
        actions, "list", run_list, "list the recipes",
        "List the recipes.\n\n  stitch recipe list",
    )  # fmt: skip
    showing = add_command(
        actions, "show", run_show, "show one recipe with everything that it composes",
        "Show one recipe, its blocks merged.\n\n  stitch recipe show glm-4.5-air/fp8",
    )  # fmt: skip
    showing.add_argument("name", metavar="NAME")
    check_command.add_parser(actions)
    render_command.add_parser(actions)
    profile_command.add_parser(actions)


async def run_list(options: argparse.Namespace) -> int:
    from . import catalogue

    recipes = [catalogue.load(name) for name in catalogue.names()]
    emit(
        {recipe.name: recipe.summary for recipe in recipes},
        options.json,
        lambda: table(("recipe", ""), [(recipe.name, recipe.summary) for recipe in recipes]),
    )
    return 0


async def run_show(options: argparse.Namespace) -> int:
    from . import catalogue

    recipe = catalogue.load(options.name)
    emit(
        recipe.model_dump(mode="json"),
        options.json,
        lambda: recipe.model_dump_json(indent=2, exclude_defaults=True),
    )
    return 0
