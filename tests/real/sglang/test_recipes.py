"""The recipes' engine flags by SGLang's real parser, and the list that stands in for it elsewhere."""

from __future__ import annotations

import argparse
import json

import pytest
from sglang.srt.server_args import ServerArgs

from scripts.flag_lists import described
from stitch_recipes import catalogue, processes
from stitch_recipes.site import read_site
from stitch_sglang.refuse import refuse
from stitch_sglang.symbols import RELEASE

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser


def test_the_list_of_flags_is_what_this_release_takes(parser: argparse.ArgumentParser) -> None:
    document = json.loads((catalogue.home() / "flags" / f"sglang-{RELEASE}.json").read_text())
    assert document["flags"] == json.loads(json.dumps(described(parser)))


@pytest.mark.parametrize("name", catalogue.names())
def test_a_recipe_starts_a_server_that_parses_and_that_the_plugin_covers(
    parser: argparse.ArgumentParser, name: str
) -> None:
    recipe = catalogue.load(name)
    assert recipe.engine.release == RELEASE
    process = processes.replica(recipe, read_site(None), "/models/boot")
    assert process.argv[:2] == ("sglang", "serve")
    args = parser.parse_args(process.argv[2:])
    assert args.tp_size == recipe.engine.gpus
    refuse(args, recipe.engine.environment)


def test_a_flag_that_is_misspelt_is_refused_by_the_real_parser_too(parser: argparse.ArgumentParser) -> None:
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parser.parse_args(["--model-path", "x", "--mem-fraction-statik", "0.8"])
