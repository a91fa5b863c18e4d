"""Every command of recipes/README.md is one, with options that exist; every file that it names is there."""

from __future__ import annotations

import re
import shlex

import pytest

from stitch_core.cli.main import build_parser
from stitch_recipes import catalogue

TEXT = (catalogue.home() / "README.md").read_text("utf-8")
LINES = re.findall(r"^    (stitch .*?)(?:  +#.*)?$", TEXT, re.MULTILINE)
INLINE = re.findall(r"`(stitch (?:recipe )?[a-z]+ [^`]*[A-Z-][^`]*)`", TEXT)


@pytest.mark.parametrize("line", [*LINES, *INLINE])
def test_a_command_is_taken(line: str) -> None:
    """It named options that do not exist: scale --pool, verify --run."""
    words = shlex.split(re.sub(r"\s+", " ", line).partition(" > ")[0])
    if "--for" in words:
        at = words.index("--for") + 1
        words[at] = words[at].partition("|")[0]
    build_parser().parse_args(words[1:])


def test_commands_are_found_in_it() -> None:
    assert len(LINES) >= 6
    assert len(INLINE) >= 5


def test_recipes_and_files_that_it_names_are_there() -> None:
    named = set(re.findall(r"`?((?:qwen|glm|kimi|moonlight)[a-z0-9.-]*/[a-z0-9-]+)`", TEXT))
    assert named
    assert named <= set(catalogue.names())
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", TEXT)}
    files = set(re.findall(r"`((?:models|local|scripts|plugins)/[A-Za-z0-9_./-]*)`", TEXT))
    root = catalogue.home()
    missing = [link for link in links if not (root / link).exists()]
    missing += [file for file in files if not (root / file).exists() and not (root.parent / file).exists()]
    assert missing == ["scripts/models"]  # the framework's
