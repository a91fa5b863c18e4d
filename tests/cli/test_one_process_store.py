"""A store in one process' memory is refused by every command: what it holds ends with the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from stitch_core.cli.main import build_parser
from tests.cli.commands import Shell
from tests.cli.test_main import leaves

BASE = Path("BASE")
WITH_A_STORE: dict[tuple[str, ...], tuple[object, ...]] = {
    ("anchor",): ("--run", "r", "--base", BASE),
    ("channel", "delete"): ("eval",),
    ("channel", "list"): (),
    ("channel", "set"): ("latest", "r"),
    ("channel", "show"): ("latest",),
    ("checkout",): ("r/1", "out"),
    ("claim",): ("--run", "r", "--base", BASE),
    ("compact",): ("--run", "r"),
    ("consumer", "delete"): ("eval",),
    ("consumer", "list"): (),
    ("consumer", "set"): ("eval", "--lag", 1),
    ("diff",): ("r/1", "r/2"),
    ("doctor",): (),
    ("gateway",): ("--port", 0),
    ("gc",): ("--run", "r"),
    ("inspect",): ("r/1",),
    ("pin", "add"): ("best", "r", 1),
    ("pin", "list"): (),
    ("pin", "remove"): ("best",),
    ("publish",): (BASE, "--run", "r", "--base", BASE),
    ("release",): ("--run", "r"),
    ("replica",): ("--base", BASE, "--port", 0),
    ("rollback",): ("--run", "r", "--to", 1),
    ("status",): (),
    ("verify",): ("r",),
    ("versions",): ("--run", "r"),
}
OTHERWISE = {("profile",), ("prove",), ("recipe", "profile")}
"""Of these the store is optional, or one of the proof's own."""


def test_every_command_with_a_store_is_here() -> None:
    found = {
        words
        for words, parser in leaves(build_parser())
        if any("--store" in action.option_strings for action in parser._actions)
    }
    assert found - OTHERWISE == WITH_A_STORE.keys()


@pytest.mark.parametrize("words", WITH_A_STORE, ids=" ".join)
def test_a_claim_in_memory_succeeded_and_was_gone(
    shell: Shell, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``stitch claim --store memory:`` said that the run was claimed, and nobody ever found it."""
    monkeypatch.chdir(tmp_path)
    more = [shell.base if word is BASE else word for word in WITH_A_STORE[words]]
    said = shell(*words, *more, "--store", "memory:")
    assert said.code == 2
    assert "memory: is a store in the memory of one process" in said.complaint
    assert "name one that lasts, such as file:/data/stitch" in said.complaint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"], "nothing was made"
