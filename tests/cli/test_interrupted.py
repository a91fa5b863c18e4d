"""Ctrl-C and kill -9 at each call to the store: the store is whole, and the same command goes through."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import Shell

WORKER = Path(__file__).with_name("interrupted_worker.py")


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["SIGINT", "SIGKILL"])
@pytest.mark.parametrize("command", ["publish", "rollback", "anchor", "gc", "checkout"])
def test_whatever_is_cut_off_is_done_again(shell: Shell, command: str, signal: str) -> None:
    shell.claim("--channel", "latest")
    for number in range(1, 6):
        given = shell.learn(f"v{number}")
        assert shell.publish(given, *(["--as-delta"] if number not in (1, 2, 4) else [])).code == 0
    (shell.root / "store").rename(shell.root / "pristine")
    shutil.copytree(shell.root / "pristine", shell.root / "store")
    (shell.root / "tmp").mkdir()
    run = ("--store", shell.store, "--run", "r")
    words = {
        "publish": ("publish", shell.learn("v6"), "--as-delta", *run, "--base", shell.base),
        "rollback": ("rollback", *run, "--to", 4),
        "anchor": ("anchor", *run, "--base", shell.base),
        "gc": ("gc", *run, "--grace", "0"),
        "checkout": ("checkout", "r/3", shell.root / "checkout", "--store", shell.store),
    }[command]
    arguments = [sys.executable, WORKER, shell.root, signal, *words]
    done = subprocess.run(
        [str(word) for word in arguments], capture_output=True, text=True, timeout=300, check=False,
        env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == []
    assert found["codes"] == {{"SIGINT": "130", "SIGKILL": "-9"}[signal]: found["calls"]}
    assert found["calls"] > 10
