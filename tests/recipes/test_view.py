"""The local recipe's view: it renders at every moment of a run."""

import io
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from recipes.local.fleet import Event
from recipes.local.grpo import StepStats
from recipes.local.monitor import ReplicaView
from recipes.local.settings import Settings
from recipes.local.trainer import Delta, StepRecord
from recipes.local.view import Board, sparkline

STATS = StepStats(reward=0.8, exact=0.25, loss=0.1, entropy=0.2, clipped=0.0, mismatch=0.01)


def board(steps: int, *replicas: ReplicaView) -> Board:
    records = [
        StepRecord(
            n, 0.5 * n, n - 1, STATS, staleness=1.5, oldest=4, versions=3.0, waited=0.1, trained=0.2,
            encoded=0.02, in_flight=50,
        )
        for n in range(1, steps + 1)
    ]  # fmt: skip
    parts: dict[str, Any] = {
        "trainer": SimpleNamespace(
            steps=records, deltas=[Delta(r.step, 110_000, 0.15, 0.01) for r in records], began=time.time()
        ),
        "rollouts": SimpleNamespace(client=SimpleNamespace(in_flight=50), dropped=2, finished=90),
        "monitor": SimpleNamespace(replicas={view.name: view for view in replicas}),
        "fleet": SimpleNamespace(events=[Event(time.time(), "r0 is sent SIGKILL", "r0 killed")]),
    }
    return Board(Settings(seed=0, steps=200, out=Path("out")), **parts)


def shown(board: Board) -> str:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(board.screen())
    return console.export_text()


def test_a_run_in_progress_shows_all_that_was_promised() -> None:
    update = {"fetch": 0.01, "stage": 0.005, "pause": 0.0012}
    serving = ReplicaView("r1", "retract", "serving", applied=7, active=25, updates={7: update})
    gone = ReplicaView("r0", "in_place", "gone", applied=3)
    seen = shown(board(7, serving, gone, ReplicaView("r2", "in_place")))
    for words in (
        "step 7 of 200",
        "110 kB",
        "15%",
        "at 1e-6 below 1 %",
        "r1",
        "1.2 ms",
        "r0 is sent SIGKILL",
    ):
        assert words in seen
    assert "r0  " not in seen, "a replica that is gone has no row"
    line = board(7, serving, gone).line()
    assert "exact 0.25" in line
    assert "r1:7" in line


def test_there_is_something_to_see_before_the_first_step() -> None:
    assert "step 0 of 200" in shown(board(0))
    assert board(0).line() == "waiting for the first batch"


def test_a_sparkline_has_a_bar_for_every_value_until_it_is_full() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == " ▄█"
    assert len(sparkline([0.5] * 1000, width=50)) == 50
