"""Log lines for collectors: JSON, one each, with what they are about."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from stitch_core import logs
from stitch_core.cli.common import say, table


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    kept = {
        name: (lg.handlers[:], lg.propagate, lg.level)
        for name in logs.LOGGERS
        if (lg := logging.getLogger(name))
    }
    yield
    logs.set_context(dict)
    for name, (handlers, propagate, level) in kept.items():
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_lines_say_what_they_are_about(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STITCH_LOG", "json")
    logs.configure()
    version = 7
    logs.set_context(lambda: {"run": "r", "version": version, "target": None})
    say("two\nlines")
    version = 8
    try:
        raise OSError("full")
    except OSError:
        logging.getLogger("stitch").exception("no %s", "room")
    first, second = [json.loads(text) for text in capsys.readouterr().err.splitlines()]
    assert (first["message"], first["level"], first["run"], first["version"]) == (
        "two\nlines",
        "info",
        "r",
        7,
    )
    assert "target" not in first
    assert first["time"] > 1.7e9
    assert (second["level"], second["logger"], second["version"]) == ("error", "stitch", 8)
    assert second["message"].startswith("no room\nTraceback")
    assert "OSError: full" in second["message"]


def test_a_context_that_fails_costs_no_line() -> None:
    def broken() -> dict[str, str]:
        raise RuntimeError("half built")

    logs.set_context(broken)
    assert json.loads(logs.line("x"))["message"] == "x"


def test_text_for_people_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("STITCH_LOG", raising=False)
    logs.configure()
    say("hello")
    assert capsys.readouterr().err == "hello\n"


def test_a_command_that_fails_says_so_in_json() -> None:
    arguments = ["gc", "--store", "file:/nowhere/at/all", "--run", "r1"]
    done = subprocess.run(
        [sys.executable, "-m", "stitch_core.cli", *arguments], capture_output=True, text=True, timeout=60,
        env={"STITCH_LOG": "json", "PYTHONPATH": ":".join(sys.path)}, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    said = json.loads(done.stderr)
    assert (said["level"], said["run"]) == ("error", "r1")
    assert "is it mounted?" in said["message"]


class Refusing(io.StringIO):
    """A stream that takes nothing."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize(
    "stderr",
    [None, Refusing(OSError(28, "No space left on device")), Refusing(ValueError("closed")),
     Refusing(BrokenPipeError())],
)  # fmt: skip
def test_a_full_disk_under_the_log_ended_what_wrote_there(
    stderr: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that said what stands in its way ended by it."""
    monkeypatch.setattr(sys, "stderr", stderr)
    logs.tell("all is well")


def test_a_name_in_a_store_does_not_colour_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    logs.tell("replica \x1b[31mred\x07, \x9bcleared, \ud800 half\nthe next line, täglich")
    said = capsys.readouterr().err
    assert said == "replica \\x1b[31mred\\x07, \\x9bcleared, \\ud800 half\nthe next line, täglich\n"
    rows = table(("id",), [("a\nb\x1b[2J",)])
    assert rows == "id\na\\nb\\x1b[2J"


def test_what_is_told_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logs.tell("all is well")
    assert capsys.readouterr().err == "all is well\n"
    monkeypatch.setenv(logs.VARIABLE, "json")
    logs.tell("all is not", level="error")
    said = json.loads(capsys.readouterr().err)
    assert (said["message"], said["level"]) == ("all is not", "error")
