"""The command line as a whole: help that teaches, one line for every failure, exit codes."""

from __future__ import annotations

import argparse
import asyncio
import errno
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from stitch_core import plugins
from stitch_core.chain import NoHead
from stitch_core.cli import main as module
from stitch_core.cli.common import UsageError, age_text, key_values, scratch, size_text, table
from stitch_core.cli.main import build_parser, main
from stitch_core.host_checkpoint import HostCheckpointError, RepresentationInvalid
from stitch_core.lineage import NoPlan
from stitch_core.ports import EngineError, Unavailable
from stitch_core.publisher import Fenced
from stitch_core.replica.activation import CannotFollow, ReplicaFailed
from stitch_core.replica.staging import WrongBase
from tests.test_logs import Refusing

COMMANDS = (
    "replica", "gateway", "publish", "claim", "status", "versions", "prove", "inspect", "verify",
    "diff", "checkout", "doctor", "release", "rollback"
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main([command, "--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    assert "--json" in text
    assert len(text.splitlines()) > 8


def leaves(
    parser: argparse.ArgumentParser, *words: str
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every command with its parser; ``channel set`` is one."""
    actions = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not actions:
        yield words, parser
    for name, child in (pair for action in actions for pair in action.choices.items()):
        yield from leaves(child, *words, name)


def test_every_help_has_examples_that_can_be_run() -> None:
    whole = build_parser()
    for words, parser in leaves(whole):
        text = parser.format_help().replace("\\\n", " ")
        examples = [line for line in text.splitlines() if line.startswith("  stitch ")]
        assert examples, f"stitch {' '.join(words)} --help shows no example"
        for example in examples:
            said = shlex.split(example, comments=True)
            assert said[1 : len(words) + 1] == list(words), example
            whole.parse_args(said[1:])


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"    {command}" in text for command in COMMANDS)


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["claim"], ["status", "--store"]])
def test_bad_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_variable_that_is_not_set_is_not_the_current_directory(capsys: pytest.CaptureFixture[str]) -> None:
    """``stitch publish "$DIR"`` published whatever checkpoint the shell stood in."""
    with pytest.raises(SystemExit) as exit:
        main(["publish", "", "--store", "memory:", "--run", "r", "--base", "."])
    assert exit.value.code == 2
    assert "argument DIR: is empty: name a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("do this\n  instead"), 2),
        (Unavailable("no answer"), 2),
        (Fenced("another writer"), 2),
        (NoHead("no head"), 2),
        (NoPlan("no way"), 2),
        (WrongBase("not version 0"), 2),
        (RepresentationInvalid("sha256:0", "not what it says"), 2),
        (HostCheckpointError("in use"), 2),
        (CannotFollow("later"), 2),
        (EngineError("no engine"), 2),
        (PermissionError(13, "Permission denied", "/data/x"), 2),
        (ValueError(), 2),
        (ReplicaFailed("weights unknown"), 1),
    ],
)
def test_every_known_failure_is_one_line(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fails_with(error, monkeypatch) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("stitch status: ")
    assert len(captured.err) > len("stitch status: \n")


@pytest.mark.parametrize(
    "arguments",
    [["status", "--store", "file:here"], ["claim", "--store", "file:/s", "--run", "r", "--base", "b"]],
)
def test_a_working_directory_that_is_gone(arguments: list[str], tmp_path: Path) -> None:
    """One was a traceback, the other '[Errno 2] No such file or directory', of nothing."""
    gone = tmp_path / "gone"
    gone.mkdir()
    program = "import os, sys; os.rmdir(os.getcwd()); from stitch_core.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=gone, capture_output=True, text=True,
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"stitch {arguments[0]}: ")
    assert last.endswith("lies in the working directory, which is not there any more: change to one that is")


@pytest.mark.parametrize("given", [True, False])
def test_a_full_temporary_directory_says_that_there_is_another_way(given: bool, tmp_path: Path) -> None:
    directory, full = tmp_path / "work" if given else None, "No space left on device"
    words = r"ENOSPC, .*: make room, or name a directory that has it with --work"
    with pytest.raises(UsageError, match=words), scratch(directory) as path:
        raise OSError(errno.ENOSPC, full, str(path / "x"))
    with pytest.raises(OSError, match=full), scratch(directory):
        raise OSError(errno.ENOSPC, full, "/elsewhere")


def test_the_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, said in (("numpy", "stitch [0-9]+[.]"), ("no-such-distribution", "stitch, from a clone")):
        monkeypatch.setattr(module, "DISTRIBUTION", name)
        with pytest.raises(SystemExit) as exit:
            main(["--version"])
        assert exit.value.code == 0
        assert re.match(said, capsys.readouterr().out)


def test_an_interrupt_while_it_starts_was_a_traceback() -> None:
    """A third of the time of a short command are its imports."""
    program = (
        "import sys; from importlib.machinery import PathFinder; find = PathFinder.find_spec\n"
        "def interrupted(name, *rest):\n"
        "    if name == 'stitch_core.publisher': raise KeyboardInterrupt\n"
        "    return find(name, *rest)\n"
        "PathFinder.find_spec = interrupted\n"
        "from stitch_core.cli.__main__ import entry; sys.exit(entry())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "status"], capture_output=True, text=True,
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_stdout_that_was_closed_was_a_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["status", "--store", f"file:{tmp_path}"]) == 0


def test_a_stdout_that_is_full_is_told_from_a_store_that_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdout", Refusing(OSError(28, "No space left on device")))
    assert main(["status", "--store", f"file:{tmp_path}", "--json"]) == 2
    said = capsys.readouterr().err
    assert said.endswith("it is done, but stdout cannot be written: ENOSPC, No space left on device\n")


def test_an_error_of_the_system_names_the_file_and_the_code_that_the_manual_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was '[Errno 28] No space left on device', which docs/operations.md calls ENOSPC."""
    assert fails_with(OSError(28, "No space left on device", b"/data/x"), monkeypatch) == 2
    assert capsys.readouterr().err == "stitch status: /data/x: ENOSPC, No space left on device\n"
    assert fails_with(OSError("nothing is known"), monkeypatch) == 2
    assert capsys.readouterr().err == "stitch status: nothing is known\n"


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (BrokenPipeError(), 141)])
def test_quiet_ends(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fails_with(error, monkeypatch) == code
    assert capsys.readouterr().err == ""


def fails_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a command that raises ``error``."""

    async def run(_: argparse.Namespace) -> int:
        raise error

    parse = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
        options = parse(self, arguments)
        options.run = run
        return options

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    return main(["status", "--store", "memory://x"])


def test_a_plugin_that_is_not_there_is_a_command_that_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And takes no other command along."""
    broken = [
        EntryPoint("gateway", "module_that_nobody_has:x", module.PLUGINS),
        EntryPoint("prove", "stitch_core.versions:nothing_of_that_name", module.PLUGINS),
    ]

    def find(group: str, name: str | None = None) -> list[EntryPoint]:
        return [e for e in broken if e.group == group and name in (None, e.name)]

    monkeypatch.setattr(plugins, "entry_points", find)
    assert main(["gateway"]) == 2
    said = capsys.readouterr().err
    assert said == "stitch gateway: gateway needs module_that_nobody_has: pip install 'stitch-rl[gateway]'\n"
    assert main(["prove"]) == 2
    assert "cannot be loaded" in capsys.readouterr().err
    assert main(["status", "--store", f"file:{tmp_path}", "--json"]) == 0


def test_nothing_imports_torch_or_a_server_to_parse() -> None:
    """`stitch status` must not take seconds."""
    probe = (
        "import sys; from stitch_core.cli.main import build_parser; build_parser(); "
        "print([m for m in ('torch', 'uvicorn', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], check=True, capture_output=True, text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.stdout == "[]\n"


def test_parser_can_be_built_twice() -> None:
    assert build_parser() is not build_parser()


def test_texts() -> None:
    assert [size_text(n) for n in (0, 999, 1000, 1.5e6, 2e9, 3e15)] == [
        "0 B", "999 B", "1.0 kB", "1.5 MB", "2.0 GB", "3000.0 TB",
    ]  # fmt: skip
    now = time.time()
    ages = [age_text(now - s).split()[1] for s in (5, 300, 10_000, 300_000)]
    assert ages == ["s", "min", "h", "d"]
    assert age_text(now + 100) == "0 s ago"
    assert table(("a", "bb"), [(1, None), ("xyz", 2)]) == "a    bb\n1    -\nxyz  2"
    assert key_values(["a=1", "b=x=y"], "--opt") == {"a": "1", "b": "x=y"}
    for bad in ("a", "=1", ""):
        with pytest.raises(UsageError, match="expected KEY=VALUE"):
            key_values([bad], "--opt")


def test_the_loop_is_closed_after_a_failure() -> None:
    main(["versions", "--store", "memory://x", "--run", "r"])
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()
