"""Flags of a function that ours call: found before anything is parsed, from where its name will come from."""

from __future__ import annotations

import argparse
import base64
import sys
from pathlib import Path
from types import ModuleType

import pytest

from stitch_core.trainers.settings import SettingsError
from stitch_miles.inner import adding, named

SETTING, DEFAULT = "inner_generate", "mine.plain"


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    path = tmp_path / "stitch.yaml"
    path.write_text("stitch_run: r\nstitch_inner_generate: mine.agent\n")
    return path


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Miles' loader, and a user's module with two functions, one of which has flags."""

    def agent() -> None: ...

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--max-seq-len", type=int)

    agent.add_arguments = add_arguments  # type: ignore[attr-defined]
    known = {"mine.agent": agent, DEFAULT: lambda: None}

    def load_function(path: str) -> object:
        if path not in known:
            raise ModuleNotFoundError(f"No module named {path.partition('.')[0]!r}")
        return known[path]

    for name in ("miles", "miles.utils", "miles.utils.misc"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["miles.utils.misc"].load_function = load_function  # type: ignore[attr-defined]


def parsed(monkeypatch: pytest.MonkeyPatch, *words: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    parser = argparse.ArgumentParser()
    parser.add_argument("--custom-config-path")
    adding(SETTING, DEFAULT)(parser)
    return parser.parse_args()


def test_the_inner_functions_flags_are_known(
    functions: None, configuration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = parsed(monkeypatch, "--max-seq-len", "9", "--custom-config-path", str(configuration))
    assert (given.max_seq_len, given.stitch_run) == (9, None)
    given = parsed(monkeypatch, "--stitch-inner-generate=mine.agent", "--max-seq-len", "9")
    assert given.max_seq_len == 9
    # The framework's own has none here.
    assert parsed(monkeypatch, "--stitch-lag", "1").stitch_lag == 1
    with pytest.raises(SystemExit):
        parsed(monkeypatch, "--max-seq-len", "9")


def test_it_is_named_where_the_framework_will_find_it(configuration: Path) -> None:
    flag = ["--stitch-inner-generate", "mine.plain"]
    # The framework lets the YAML override flags.
    assert named(SETTING, [*flag, f"--custom-config-path={configuration}", "--lr", "1"]) == "mine.agent"
    assert named(SETTING, flag) == "mine.plain"
    assert named("inner_rollout", ["--custom-config-path", str(configuration)]) is None
    inline = base64.b64encode(configuration.read_bytes()).decode()
    assert named(SETTING, ["--custom-config-path", f"base64:{inline}"]) == "mine.agent"
    configuration.write_text("")
    assert named(SETTING, ["--custom-config-path", str(configuration)]) is None
    # Of --help, and words that end early, the framework's own parser speaks.
    assert named(SETTING, ["--help", "--custom-config-path"]) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stitch_inner_generate: [a]", "stitch_inner_generate is ['a']: expected the dotted name"),
        ("just words", "holds no settings, but 'just words'"),
        ("a: [", "cannot be read: while parsing"),
        (None, "cannot be read: [Errno 2] No such file"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "stitch.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        named(SETTING, ["--custom-config-path", str(path)])
    assert message in str(caught.value)


def test_a_function_that_cannot_be_loaded_is_named(functions: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"stitch_inner_generate names its\.own, which cannot be loaded"):
        parsed(monkeypatch, "--stitch-inner-generate", "its.own")
