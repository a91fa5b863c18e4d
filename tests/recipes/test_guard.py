"""The local recipe's guard: children and scratch space end with the demo, however it ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from recipes.local.guard import Guard


@pytest.fixture
def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def test_what_is_left_is_killed_and_the_scratch_removed(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    scratch = tmp_path / "scratch"
    (scratch / "r0").mkdir(parents=True)
    guard = Guard(scratch)
    guard.watch(sleeper.pid)
    guard.close()
    assert sleeper.wait(timeout=10) == -9
    assert not scratch.exists()


def test_a_forgotten_process_lives(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    guard = Guard(tmp_path / "scratch")
    guard.watch(sleeper.pid)
    guard.forget(sleeper.pid)
    guard.close()
    assert sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()
