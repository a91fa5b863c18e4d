"""``stitch compact`` on a store in a directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.commands import Shell, built_once


def build(shell: Shell) -> None:
    shell.claim()
    for i in range(5):
        shell.publish(shell.learn(f"v{i + 1}"), "--as-delta")


@pytest.fixture
def run(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """Versions 1 to 5, all deltas."""
    return built_once(shell, tmp_path_factory, build)


def spans(shell: Shell) -> list[str]:
    root = Path(shell.store.removeprefix("file:")) / "runs/r/spans"
    return sorted(path.parent.name[:13] for path in root.glob("*/span.json"))


def options(shell: Shell) -> list[str]:
    return ["--store", shell.store, "--run", "r"]


def test_spans_are_made_once_and_taken(run: Shell, tmp_path: Path) -> None:
    said = run("compact", *options(run), "--work", tmp_path / "work", "--json").json
    assert [(made["since"], made["number"], made["pieces"]) for made in said["made"]] == [(0, 4, 4)]
    assert (said["left"], said["problems"], said["deleted"], said["busy"]) == ([], {}, [], False)
    assert spans(run) == ["000000-000004"]
    assert os.listdir(tmp_path / "work") == []
    assert run("compact", *options(run), "--json").json["made"] == []
    assert run("checkout", "r/5", tmp_path / "out", "--store", run.store, "--base", run.base).code == 0
    assert "made nothing; deleted 0" in run("compact", *options(run)).out


def test_a_node_exporter_finds_what_it_did(run: Shell, tmp_path: Path) -> None:
    page = tmp_path / "compact.prom"
    made = run("compact", *options(run), "--metrics", page, "--json").json["made"]
    text = page.read_text()
    for line in (
        'stitch_spans_passes_total{run="r",outcome="merged"} 1',
        f'stitch_spans_bytes_total{{run="r"}} {made[0]["bytes"]}',
        'stitch_spans_merge_seconds_count{run="r"} 1',
        'stitch_spans_head_version{run="r"} 5',
        'stitch_spans_missing{run="r"} 0',
    ):
        assert f"\n{line}\n" in text
    assert "is not a port" in run("compact", *options(run), "--metrics", "x").complaint
    elsewhere = run("compact", *options(run), "--metrics", "192.0.2.1:80").complaint
    assert "--metrics 192.0.2.1:80: no listening there: EADDRNOTAVAIL" in elsewhere


def test_with_a_base_the_spans_of_xor_deltas_are_sparse(run: Shell, tmp_path: Path) -> None:
    said = run("compact", *options(run), "--base", run.base, "--json").json
    assert [made["encoding"] for made in said["made"]] == ["sparse"]
    assert run("checkout", "r/5", tmp_path / "out", "--store", run.store, "--base", run.base).code == 0
    assert run("verify", "r", "--store", run.store).code == 0


def test_a_run_that_is_not_there(shell: Shell) -> None:
    assert "no head yet" in shell("compact", *options(shell)).complaint


@pytest.mark.parametrize("how", ["signal", "eof"])
def test_it_follows_until_it_is_told_to_stop_or_its_parent_is_gone(run: Shell, how: str) -> None:
    command = [sys.executable, "-m", "stitch_core.cli", "compact", *options(run), "--poll", "0.05", "--json"]
    flag = "--follow" if how == "signal" else "--until-eof"
    process = subprocess.Popen(
        [*command, flag], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment()
    )
    try:
        assert process.stdout is not None
        assert process.stdin is not None
        assert '"number": 4' in process.stdout.readline()
        for i in range(6, 9):
            run.publish(run.learn(f"v{i}"), "--as-delta")
        assert '"since": 4, "number": 8' in process.stdout.readline()
        if how == "signal":
            process.send_signal(signal.SIGTERM)
        else:
            process.stdin.close()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stdin.close()
    assert spans(run) == ["000000-000004", "000004-000008"]


def test_it_can_be_killed_at_any_time(run: Shell) -> None:
    command = [sys.executable, "-m", "stitch_core.cli", "compact", *options(run)]
    for seconds in (0.3, 0.5):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=_environment())
        time.sleep(seconds)
        process.kill()
        process.wait()
    lease = Path(run.store.removeprefix("file:")) / "runs/r/spans/lease"
    if lease.exists():
        lease.unlink()  # as if its time were over
    assert run("compact", *options(run), "--json").json["left"] == []
    assert spans(run) == ["000000-000004"]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
