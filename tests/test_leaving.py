"""C46: a trainer's process ends right after its last publish. The version is published, or the exit code and
one line on stderr say that it is not. Real processes, with a store that answers when the process is ending.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stitch_core.stores.local import LocalStore
from tests.small_run import chain_of

ROOT = Path(__file__).parents[1]
LOST = 120
"""Python's own exit code where something failed in its end."""


def start(root: Path, way: str, fault: str = "none") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.leaving_worker", str(root), way, fault],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run(root: Path, way: str, fault: str = "none") -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    with start(root, way, fault) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def numbers(root: Path) -> list[int]:
    return [manifest.number for manifest in asyncio.run(chain_of(LocalStore(root / "store"), "r"))]


def said(err: str) -> list[str]:
    """Stitch's own lines."""
    return [line for line in err.splitlines() if line.startswith("stitch: ")]


WAYS = {"return": 0, "exit": 0, "raise": 1, "sigterm": 0, "with": 1, "with-exit": 0, "group": 0}
"""Exit codes, where the version is published."""

# Each is a process of its own, that takes a second to start.
EACH = [
    way if way in ("return", "raise", "group") else pytest.param(way, marks=pytest.mark.slow) for way in WAYS
]


@pytest.mark.parametrize("way", EACH)
def test_c46_the_last_version_is_published_however_the_trainer_ends(tmp_path: Path, way: str) -> None:
    ended, _, err = run(tmp_path, way)
    assert numbers(tmp_path) == ([0, 1, 2] if way == "group" else [0, 1]), err
    assert ended == WAYS[way], err
    assert said(err) == []
    assert ("LookupError" in err) == (ended == 1), "the trainer's own exception goes on"


@pytest.mark.parametrize("way", EACH)
def test_c46_a_version_that_is_not_published_is_one_line_and_an_exit_code(tmp_path: Path, way: str) -> None:
    ended, _, err = run(tmp_path, way, "refused")
    assert numbers(tmp_path) == ([0, 1] if way == "group" else [0])
    assert ended == (1 if way == "with" else LOST), err  # there it is a note of the trainer's own exception
    (line,) = said(err)
    assert "this disk is full" in line
    assert "r" in line
    assert "Exception ignored" not in err


@pytest.mark.slow
@pytest.mark.parametrize("way", ["cut-off", "with-cut-off"])
def test_c46_a_version_that_a_signal_cut_off_while_it_was_encoded(tmp_path: Path, way: str) -> None:
    ended, _, err = run(tmp_path, way)
    assert numbers(tmp_path) == [0, 1]
    assert (ended, len(said(err))) == (LOST, 1), err


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fork", "spawn"])
@pytest.mark.parametrize("fault", ["none", "refused"])
def test_c46_a_trainer_in_a_child_process(tmp_path: Path, way: str, fault: str) -> None:
    _, out, err = run(tmp_path, way, fault)
    assert numbers(tmp_path) == ([0, 1] if fault == "none" else [0])
    assert len(said(err)) == (fault == "refused"), err
    assert (out.split()[1] != "0") == (fault == "refused")


def test_c46_a_child_that_was_forked_beside_the_trainer_ends_at_once(tmp_path: Path) -> None:
    """It has the publisher's memory and none of its threads: whatever it waited for would never come."""
    ended, out, err = run(tmp_path, "forked")
    assert (ended, out, said(err)) == (0, "child 0\n", [])
    assert numbers(tmp_path) == [0, 1]


def test_c46_who_asked_how_it_ended_is_not_told_again(tmp_path: Path) -> None:
    ended, _, err = run(tmp_path, "asked", "refused")
    assert (ended, said(err)) == (0, [])
    assert numbers(tmp_path) == [0]


def test_c46_a_failure_that_the_next_version_repaired_is_none(tmp_path: Path) -> None:
    ended, _, err = run(tmp_path, "return", "repaired")
    assert (ended, said(err)) == (0, [])
    assert numbers(tmp_path) == [0, 2]


def test_c46_what_takes_long_is_said_and_can_be_given_up(tmp_path: Path) -> None:
    with start(tmp_path, "return", "hung") as process:
        assert process.stderr is not None
        waiting = process.stderr.readline()
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert waiting.startswith("stitch: ")
    assert "version 1 of run r" in waiting
    (line,) = said(err)
    assert "version 1 of run r" in line
    assert process.returncode == LOST
