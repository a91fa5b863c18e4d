"""A store on a mount that is read-only: told at once, by what writes and by the doctor; reading goes on."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.commands import Shell

MOUNT = "mount --bind {0} {0} && mount -o remount,ro,bind {0}"
SECONDS = 30.0
"""For a command that must not wait: the publisher would wait two minutes for an outcome it does not know."""


def read_only(store: Path, *command: object) -> tuple[int, str, str, float]:
    """Run ``stitch`` where ``store`` is mounted read-only: (code, stdout, stderr, seconds)."""
    place = shlex.quote(str(store))
    stitch = shlex.join([sys.executable, "-m", "stitch_core.cli", *map(str, command)])
    began = time.monotonic()
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", f"{MOUNT.format(place)} && exec {stitch}"],
        capture_output=True, text=True, timeout=120, env={"PYTHONPATH": ":".join(sys.path)}, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr, time.monotonic() - began


@pytest.fixture
def store(shell: Shell) -> Path:
    shell.claim("--channel", "latest")
    shell.publish(shell.learn("v1"), "--as-delta")
    path = shell.root / "store"
    try:
        said = subprocess.run(
            ["unshare", "--map-root-user", "--mount", "sh", "-c", MOUNT.format(shlex.quote(str(path)))],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("platform: no unshare")
    if said.returncode:
        pytest.skip(f"platform: mounting is not permitted here ({said.stderr.strip()})")
    return path


@pytest.mark.slow
def test_a_read_only_store_was_told_after_two_minutes_as_an_unknown_outcome(
    shell: Shell, store: Path
) -> None:
    options = ("--store", shell.store, "--run", "r")
    for command in (
        ("publish", shell.learn("v2"), *options, "--base", shell.base, "--as-delta"),
        ("claim", *options, "--base", shell.base),
        ("rollback", *options, "--to", 0),
        ("release", *options),
        ("channel", "set", "eval", "r", "--store", shell.store),
        ("pin", "add", "best", "r", 1, "--store", shell.store),
        ("anchor", *options, "--base", shell.base),
    ):
        code, out, err, took = read_only(store, *command)
        assert (code, out) == (2, ""), (command, err)
        assert "EROFS, Read-only file system" in err.splitlines()[-1], err
        assert took < SECONDS, command
    assert shell.head() == (1, 2), "nobody was fenced"
    code, out, _, _ = read_only(store, "verify", "r", "--store", shell.store, "--json")
    assert (code, json.loads(out)["problems"]) == (0, [])


@pytest.mark.slow
def test_the_doctor_says_that_the_mount_is_read_only(shell: Shell, store: Path) -> None:
    """It said that two checks had failed, that the store was not there, and to allow s3:DeleteObject."""
    code, out, _, _ = read_only(store, "doctor", "--store", shell.store, "--json")
    failed = [check for check in json.loads(out)["checks"] if check["result"] == "fail"]
    assert (code, [check["check"] for check in failed]) == (1, ["write"])
    assert failed[0]["detail"] == f"{store} is mounted read-only here"
    assert "mount it read-write" in failed[0]["do"]
    assert read_only(store, "doctor", "--store", shell.store, "--read-only")[0] == 0
