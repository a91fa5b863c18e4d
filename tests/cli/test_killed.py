"""kill -9 of a command: what it had in scratch space is removed by the next, and its lock is nobody's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cli.commands import Shell

DIES = """
import importlib, os, signal, sys
from pathlib import Path
from stitch_core import scratch
from stitch_core.cli.main import main
scratch.TMPFS = Path(sys.argv[1])
module, _, name = sys.argv[2].partition(":")
owner, _, method = name.rpartition(".")
module = importlib.import_module(module)
target = getattr(module, owner) if owner else module
setattr(target, method, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
main(sys.argv[3:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["publish", "rollback", "diff", "anchor", "compact"])
def test_a_killed_command_left_its_scratch_directory_for_good(shell: Shell, command: str) -> None:
    shell.claim()
    for i in range(4):
        shell.publish(shell.learn(f"v{i + 1}"), "--as-delta")
    here = shell.root / "tmp"
    here.mkdir()
    run = ("--store", shell.store, "--run", "r")
    publish = (shell.learn("v9"), "--as-delta", *run, "--base", shell.base)
    dies_at, arguments = {
        "publish": ("stitch_core.publisher:Publisher.publish", publish),
        "rollback": ("stitch_core.publisher:Publisher.publish", (*run, "--to", 1)),
        "diff": ("stitch_core.cli.diff:_compare", ("r/1", "r/2", "--store", shell.store)),
        "anchor": ("stitch_core.anchors:Anchors.anchor", (*run, "--base", shell.base)),
        "compact": ("stitch_core.span_maker:SpanMaker._merge", run),
    }[command]  # fmt: skip
    words = [sys.executable, "-c", DIES, here, dies_at, command, *arguments]
    environment = {**os.environ, "TMPDIR": str(here), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [str(w) for w in words], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -9, done.stderr
    left = list(here.iterdir())
    assert [path.name.startswith("stitch-") for path in left] == [True]
    words = [sys.executable, "-m", "stitch_core.cli", "diff", "r/1", "r/1", "--store", shell.store]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert list(here.iterdir()) == []
