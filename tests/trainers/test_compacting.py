"""A compactor that a trainer runs beside itself: it merges, is started again, and ends with the trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stitch_core.compacting import CompactorProcess
from stitch_core.policy_publisher import PolicyPublisher
from stitch_core.trainers.own_delta import OwnDelta
from tests.small_run import FILES
from tests.trainers.ranks import World, on_ranks, same

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return World(tmp_path)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.slow
def test_the_setting_runs_one_that_is_started_again_and_ends_with_the_publisher(world: World) -> None:
    def train(group: object) -> int | None:
        publisher = world.publisher(group, compact=True)
        publisher.claim()
        process = publisher._compacting and publisher._compacting._process
        delta = OwnDelta(publisher, FILES)
        number = delta.publish(world.tensors)
        for _ in range(4):
            number = delta.publish(world.learn())
        spans = world.root / "store" / "runs" / "r" / "spans"
        wait_for(lambda: any(spans.glob("000000-000004.*/span.json")), "no span")
        assert process is not None
        process.send_signal(signal.SIGKILL)
        process.wait()
        number = delta.publish(world.learn())
        again = publisher._compacting and publisher._compacting._process
        assert again is not None
        assert again is not process
        publisher.close()
        assert again.poll() is not None
        return number

    assert same(on_ranks(1, train)) == 6  # the trainer's own weights come first, as version 1


def test_it_ends_when_its_trainer_is_killed(world: World) -> None:
    store = world.root / "store"
    code = (
        "import time; from pathlib import Path; from stitch_core.compacting import CompactorProcess; "
        f"c = CompactorProcess('file:{store}', 'r', Path({str(world.boot)!r}), Path({str(world.root)!r})); "
        "c.ensure(); print(c._process.pid, flush=True); time.sleep(600)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    child = int(trainer.stdout.readline())
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    wait_for(lambda: not _runs(child), "the compactor outlives its trainer")


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_one_that_cannot_start_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    compactor = CompactorProcess("file:/x", "r", tmp_path, tmp_path)
    compactor.ensure()
    compactor.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_the_embedded_publisher_has_it_too(world: World) -> None:
    store = world.root / "store"
    with PolicyPublisher.start(
        f"file:{store}", "r", world.boot, world.root / "work", compact=True
    ) as publisher:
        for _ in range(5):
            publisher.publish(world.learn())
        publisher.flush()
        wait_for(lambda: any((store / "runs/r/spans").glob("000000-000004.*/span.json")), "no span")
        process = publisher._compacting and publisher._compacting._process
    assert process is not None
    assert process.poll() is not None
