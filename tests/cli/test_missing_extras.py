"""Only the core is installed: a command that needs more says what to install, and all others work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stitch_core.plugins import MODULES, what_brings
from tests.cli.commands import Shell

# Finds no module that an extra brings, runs each command, and prints what it said and its exit code.
PROGRAM = """
import contextlib, io, json, sys
from importlib.machinery import PathFinder
hidden, commands = json.loads(sys.argv[1])
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.partition(".")[0] in hidden else find(name, *rest)
)
from stitch_core.cli.main import main
for command in commands:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(command)
        except SystemExit as exit:
            code = exit.code
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def without_extras(commands: list[list[str]], tmp_path: Path) -> list[Any]:
    """[exit code, stdout, stderr] of each."""
    hidden = [*MODULES, "rich", "prometheus_client"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([hidden, commands])], capture_output=True, text=True,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HOME": str(tmp_path)}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_gateway_without_aiohttp_was_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = Shell(tmp_path, capsys)
    store = ["--store", shell.store]
    assert shell.claim().code == 0
    (tmp_path / "proof").mkdir()
    (tmp_path / "proof" / "run.json").write_text("{}")
    replica = ["replica", *store, "--base", str(shell.base), "--engine"]
    needs = {
        "gateway needs aiohttp: pip install 'stitch-rl[gateway]'": ["gateway", *store],
        "replica needs aiohttp: pip install 'stitch-rl[cli]'": [*replica, "http://127.0.0.1:1"],
        "embedded needs torch: pip install 'stitch-rl[embedded]'": [*replica, "embedded"],
        "profile needs aiohttp: pip install 'stitch-rl[cli]'": [
            "profile", *store, "--run", "r", "--server", "http://127.0.0.1:1",
        ],
        "s3 needs boto3: pip install 'stitch-rl[s3]'": ["status", "--store", "s3://bucket/x"],
        "modal needs the Modal SDK: pip install 'stitch-rl[modal]'": ["status", "--store", "modal://volume"],
        "scale needs modal: pip install 'stitch-rl[modal]'": ["scale", "modal_flash:app/server", "3"],
        "recipe needs pydantic: pip install 'stitch-rl[recipes]'": ["recipe", "list", "--json"],
        "prove needs torch: pip install 'stitch-rl[embedded]'": ["prove", str(tmp_path / "proof")],
    }  # fmt: skip
    works = [
        ["--help"], ["gateway", "--help"], ["status", *store], ["consumer", "list", *store],
        ["inspect", "r/0", *store], ["verify", "r", *store], ["channel", "set", "latest", "r", *store],
    ]  # fmt: skip
    said = without_extras([*needs.values(), *works], tmp_path)
    for (message, command), (code, out, err) in zip(needs.items(), said, strict=False):
        assert (code, out, err) == (2, "", f"stitch {command[0]}: {message}\n")
    for command, (code, out, err) in zip(works, said[len(needs) :], strict=True):
        assert (code, err) == (0, ""), command
        assert out


@pytest.mark.parametrize(
    ("module", "command", "said"),
    [
        ("aiohttp.web", "consumer", "consumer needs aiohttp: pip install 'stitch-rl[gateway]'"),
        ("botocore", "status", "status needs botocore: pip install 'stitch-rl[s3]'"),
        ("uvicorn", "prove", "prove needs uvicorn: pip install 'stitch-rl[embedded]'"),
        ("stitch_core.nothing", "status", None),
        (None, "status", None),
    ],
)
def test_the_extra_of_the_command_is_named_where_it_brings_the_module(
    module: str | None, command: str, said: str | None
) -> None:
    """What no extra brings is our own mistake, and a traceback."""
    assert what_brings(module, command) == said
