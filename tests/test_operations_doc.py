"""docs/operations.md says what the commands do, as far as a machine can tell."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from stitch_core.cli.main import build_parser

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "operations.md").read_text()
SOURCES = [*(ROOT / "stitch_core").rglob("*.py"), *(ROOT / "plugins").rglob("stitch_*/*.py")]


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def section(name: str) -> str:
    return TEXT.split(f"## {name}\n")[1].split("\n## ")[0]


def rows(name: str) -> dict[str, list[str]]:
    """The first table of a section: its first cell to the others."""
    lines = [line for line in section(name).splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells}


COMMANDS = subparsers(build_parser())


def test_every_command_has_its_row_and_none_else() -> None:
    """A new command adds a row: what its exit code 1 means, and what it writes."""
    assert set(rows("Exit codes")) == {f"`stitch {name}`" for name in COMMANDS}


def own_code(name: str) -> str:
    """The module of a command, in the core or in a plugin."""
    core = ROOT / "stitch_core" / "cli" / f"{name}.py"
    if core.exists():
        return core.read_text()
    adds = rf'"{name}", run|add_group\(\s+commands, "{name}",'
    (path,) = [path for path in SOURCES if re.search(adds, path.read_text())]
    beside = [
        other for other in path.parent.glob("*_command.py") if "def add_parser(actions" in other.read_text()
    ]
    return "".join(source.read_text() for source in (path, *beside))


@pytest.mark.parametrize("name", COMMANDS)
def test_exit_code_1_is_told_where_there_is_one(name: str) -> None:
    returns = re.findall(r"^\s+return (.*\b[01]\b.*)$", own_code(name), re.MULTILINE)
    can_be_1 = any(re.search(r"\b1 if\b|\belse 1\b|^1$", line) for line in returns)
    if name == "replica":
        can_be_1 = True  # ReplicaFailed, which main() turns into a 1
    assert can_be_1 == (rows("Exit codes")[f"`stitch {name}`"][0] != "never")


def commands_in(text: str) -> Iterator[list[str]]:
    for line in re.findall(r"`stitch ([^`]+)`", text):
        yield line.split()


def test_every_option_that_is_named_exists() -> None:
    for words in commands_in(TEXT):
        parser = COMMANDS[words[0]]
        inner = subparsers(parser)
        if inner and len(words) > 1:
            parser = inner[words[1]]
        for option in re.findall(r"--[a-z-]+", " ".join(words)):
            assert option in parser._option_string_actions, f"stitch {' '.join(words)}"


def said_by_the_code() -> str:
    """All text in the sources, with what is filled in as ``...`` and lines of one message joined."""
    text = "\n".join(path.read_text() for path in SOURCES)
    text = re.sub(r"\"\s*\n\s*f?\"", "", text)
    return re.sub(r"\{[^{}]*\}", "...", text)


def test_the_failure_table_quotes_the_code() -> None:
    text = said_by_the_code()
    for cell in rows("When it fails"):
        for quoted in re.findall(r"`([^`]+)`", cell):
            if re.fullmatch(r"E[A-Z]+|AccessDenied", quoted):
                continue  # named by the operating system or the server
            for part in (part.strip() for part in quoted.split("...")):
                assert part in text, quoted


def test_every_command_of_the_readme_and_docs_exists() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for name in re.findall(r"(?:`|^    )stitch ([a-z]+)\b", path.read_text(), re.MULTILINE):
            assert name in COMMANDS, f"{path.name}: stitch {name}"
