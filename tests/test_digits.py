"""Numbers on the command line: ASCII digits and nothing else, wherever one is read."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from stitch_core.cli.common import UsageError
from stitch_core.cli.main import COMMANDS
from stitch_core.cli.rollback import _number
from stitch_core.cli.target import Target
from stitch_core.digits import LARGEST, decimal, whole
from stitch_core.fleet import read_wanted
from stitch_core.metrics_export import BadTarget, _address
from stitch_core.trainers.flags import READERS
from stitch_core.versions import VersionError

OTHER_SPELLINGS = (
    "٣",
    "1_000",
    "+5",
    " 7",
    "7 ",
    "7\n",
    "-1",
    "",
    "0x7",
    "1,000",
    "\uff17",
    "²",
    "nan",
    "inf",
    "1e999",
)


def options() -> Iterator[tuple[str, argparse.Action]]:
    """Every option and argument of every command whose value becomes a number."""
    commands = argparse.ArgumentParser().add_subparsers()
    for name in COMMANDS:
        import_module(f"stitch_core.cli.{name}").add_parser(commands)
    pending: list[tuple[str, argparse.ArgumentParser]] = list(commands.choices.items())
    while pending:
        name, parser = pending.pop()
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                pending += [(f"{name} {below}", found) for below, found in action.choices.items()]
            elif callable(action.type) and isinstance(action.type("7"), int | float):
                yield f"{name} {action.option_strings or action.dest}", action


NUMBERS = dict(options())


def test_all_are_found() -> None:
    assert len(NUMBERS) > 25
    assert {
        "publish ['--step']",
        "pin add number",
        "channel set ['--exact']",
        "gc ['--grace']",
    } <= NUMBERS.keys()


@pytest.mark.parametrize("option", NUMBERS)
def test_other_spellings_of_numbers_were_taken(option: str) -> None:
    """``--step ٣``, ``1_000``, ``+5`` and ``' 7 '`` went through ``int`` in some commands, not in others."""
    kind: Any = NUMBERS[option].type
    for text in OTHER_SPELLINGS:
        with pytest.raises((ValueError, argparse.ArgumentTypeError)):
            kind(text)


@pytest.mark.parametrize("text", OTHER_SPELLINGS)
def test_nor_are_they_elsewhere(text: str) -> None:
    for read in (whole, decimal, read_wanted, *READERS.values()):
        with pytest.raises(ValueError):  # noqa: PT011
            read(text)
    with pytest.raises((VersionError, ValueError)):
        Target.parse(f"r/{text}")
    with pytest.raises(UsageError):
        _number(text, "r")
    with pytest.raises(BadTarget):
        _address(f"127.0.0.1:{text}")


def test_what_is_taken() -> None:
    assert [whole(text) for text in ("0", "007", str(LARGEST))] == [0, 7, LARGEST]
    assert [decimal(text) for text in ("0", "3", "0.5", ".5", "1.", "1e-3", "2E2")] == [
        0,
        3,
        0.5,
        0.5,
        1,
        0.001,
        200,
    ]
    with pytest.raises(ValueError, match="a whole number from 1 to 65535, got '65536'"):
        whole("65536", least=1, most=65535)
    with pytest.raises(ValueError, match="a whole number"):
        whole(str(LARGEST + 1))
    assert Target.parse("r/7") == Target("r", 7)
    assert (_number("120", "r"), _number("r/weight_v000120", "r")) == (120, 120)
    assert _address(":9100"[1:]) == ("127.0.0.1", 9100)
