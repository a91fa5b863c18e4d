"""The demo, as a user runs it: green end to end, whatever is killed beside it, and gone when it is gone."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]


def _heed_interrupts() -> None:
    """A shell's background jobs ignore SIGINT, and their children would too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Demo:
    """One run of it."""

    def __init__(self, out: Path, *options: str) -> None:
        self.out, self.log = out, out.with_suffix(".log")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "recipes.local.demo", "--plain", "--out", str(out), *options]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT,
                preexec_fn=_heed_interrupts,
            )  # fmt: skip

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def ended(self, timeout: float) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the demo has not ended:\n{self.said()}")

    def until(self, there: Callable[[], bool], timeout: float = 120.0) -> None:
        end = time.monotonic() + timeout
        while not there():
            if self.process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"the demo did not get there:\n{self.said()}")
            time.sleep(0.1)

    def pids(self) -> dict[str, int]:
        """Of the gateway and the replicas, by name; of those that have ended too."""
        return {path.stem: int(path.read_text()) for path in (self.out / "logs").glob("*.pid")}

    def report(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.out / "report.json").read_text(encoding="utf-8"))
        return value


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    demos: list[Demo] = []

    def start(*options: str) -> Demo:
        demos.append(Demo(tmp_path / f"demo{len(demos)}", *options))
        return demos[-1]

    yield start
    for demo in demos:
        if demo.process.poll() is None:
            demo.process.terminate()
            demo.process.wait(60)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    # Dead, but not yet waited for by whoever inherited it.
    return not stat.exists() or ") Z " not in stat.read_text()


def check(demo: Demo) -> dict[str, Any]:
    """Everything but what was learned."""
    report = demo.report()
    proof = report["proof"]
    assert report["ok"], report["problems"]
    assert proof["proven"] == proof["trajectories"] > 1000
    assert min(proof["spanning"].values()) >= 20
    assert proof["discriminated"] >= 0.99 * proof["discriminable"] > 0
    assert proof["shifted"]["found"] >= 0.99 * proof["shifted"]["tried"] > 0
    assert proof["faulty"]["found"] == proof["faulty"]["tried"] == 64
    assert report["rollouts"]["fewest_in_flight"] >= 32
    assert report["deltas"]["published"] == report["training"]["steps"]
    assert (demo.out / "plot.png").stat().st_size > 10_000
    return report


def test_a_short_demo_is_proven_and_its_controls_are_found_out(start: Callable[..., Demo]) -> None:
    demo = start("--steps", "30", "--min-gain", "-1")
    assert demo.ended(300) == 0, demo.said()
    report = check(demo)
    happened = [event["event"] for event in report["fleet"]]
    for words in ("r2 (retract) is started", "SIGKILL", "r3 serves", "r1 drained and left"):
        assert any(words in event for event in happened), happened


def test_losing_the_gateway_and_a_replica_costs_time_only(start: Callable[..., Demo]) -> None:
    """Promise 5: no accepted request is lost without an error, and no version is wrong."""
    demo = start("--steps", "40", "--min-gain", "-1")
    demo.until(lambda: "step" in demo.said().replace("supervised steps", ""))
    for name in ("gateway", "r1"):
        os.kill(demo.pids()[name], signal.SIGKILL)
    assert demo.ended(300) == 0, demo.said()
    happened = [event["event"] for event in check(demo)["fleet"]]
    assert any("gateway died (SIGKILL)" in event for event in happened), happened
    assert any("r1 died (SIGKILL)" in event for event in happened), happened


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_demo(start: Callable[..., Demo], number: signal.Signals) -> None:
    demo = start("--steps", "1000")
    demo.until(lambda: len(demo.pids()) == 3)
    scratch = Path(demo.said().partition("host checkpoints are in ")[2].split()[0])
    assert scratch.exists()
    demo.process.send_signal(number)
    demo.ended(60)
    end = time.monotonic() + 20
    while (any(map(alive, demo.pids().values())) or scratch.exists()) and time.monotonic() < end:
        time.sleep(0.1)
    assert not [name for name, pid in demo.pids().items() if alive(pid)]
    assert not scratch.exists()


def test_a_directory_in_use_is_refused(start: Callable[..., Demo], tmp_path: Path) -> None:
    (tmp_path / "demo0").mkdir()
    (tmp_path / "demo0" / "mine").touch()
    demo = start()
    assert demo.ended(60) == 2
    assert "not empty" in demo.said()


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns_on_every_seed(start: Callable[..., Demo], seed: int) -> None:
    demo = start("--seed", str(seed))
    assert demo.ended(900) == 0, demo.said()
    report = check(demo)
    assert report["training"]["exact_last"] - report["training"]["exact_first"] >= 0.2
