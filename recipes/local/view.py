"""The live view: what is trained, published, served and by whom, twice a second."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .fleet import Fleet
from .monitor import Monitor, ReplicaView
from .rollout import Rollouts
from .settings import Settings
from .trainer import StepRecord, Trainer

REFRESH, LINE_EVERY = 0.5, 5.0
RECENT, EVENTS = 10, 8
BARS = " ▁▂▃▄▅▆▇█"


class View:
    """``live``: redraw in place; otherwise a line now and then, for logs."""

    def __init__(self, *, live: bool) -> None:
        self._console = Console()
        self._live = live

    def say(self, text: str) -> None:
        """One line of progress, before and after training."""
        self._console.print(text, highlight=False, soft_wrap=True)

    async def watch(self, board: Board) -> None:
        """Show it until cancelled."""
        while not self._live:
            await asyncio.sleep(LINE_EVERY)
            self.say(board.line())
        with Live(console=self._console, auto_refresh=False) as live:
            while True:
                live.update(board.screen(), refresh=True)
                await asyncio.sleep(REFRESH)


@dataclass(frozen=True)
class Board:
    """Everything that is looked at, and how it looks."""

    settings: Settings
    trainer: Trainer
    rollouts: Rollouts
    monitor: Monitor
    fleet: Fleet

    def line(self) -> str:
        """All in one line."""
        if not self.trainer.steps:
            return "waiting for the first batch"
        recent = self.trainer.steps[-RECENT:]
        parts = [
            f"step {recent[-1].step:3d}",
            f"exact {_mean([s.stats.exact for s in recent]):.2f}",
            f"reward {_mean([s.stats.reward for s in recent]):.2f}",
            f"staleness {_mean([s.staleness for s in recent]):.1f}",
            f"step {_mean([s.trained + s.encoded for s in recent]):.2f} s",
            f"wait {_mean([s.waited for s in recent]):.2f} s",
            *(f"{view.name}:{view.applied}" for view in self._present()),
        ]
        return "  ".join(parts)

    def screen(self) -> Panel:
        """All that there is to see."""
        steps, seconds = self.trainer.steps, time.time() - self.trainer.began
        title = f"Stitch: {self.settings.run}, step {len(steps)} of {self.settings.steps}, {seconds:.0f} s"
        events = [
            Text(f"{event.at - self.trainer.began:7.1f} s  {event.text}", style="dim")
            for event in self.fleet.events[-EVENTS:]
        ]
        return Panel(Group(self._training(steps), self._replicas(), *events), title=title)

    def _training(self, steps: Sequence[StepRecord]) -> Table:
        table = Table.grid(padding=(0, 2))
        if steps:
            for name, values in (
                ("exact match", [s.stats.exact for s in steps]),
                ("reward", [s.stats.reward for s in steps]),
            ):
                table.add_row(name, f"{_mean(values[-RECENT:]):.2f}", sparkline(values))
            rollouts = self.rollouts
            table.add_row(
                "staleness", f"{_mean([s.staleness for s in steps[-RECENT:]]):.1f}",
                f"versions; {rollouts.client.in_flight} requests in flight, "
                f"{rollouts.dropped} of {rollouts.finished} groups dropped",
            )  # fmt: skip
        if deltas := self.trainer.deltas:
            table.add_row(
                "version", str(deltas[-1].number),
                f"delta of {deltas[-1].bytes / 1000:.0f} kB, {deltas[-1].changed:.0%} of the elements "
                "(learning rate 1e-4; at 1e-6 below 1 %)",
            )  # fmt: skip
        return table

    def _replicas(self) -> Table:
        columns = ("replica", "KV", "state", "version", "requests", "fetched, staged in", "paused for")
        table = Table(*columns, box=None, padding=(0, 2))
        for view in self._present():
            last = view.updates[max(view.updates)] if view.updates else None
            table.add_row(
                view.name, view.kv_mode, view.state,
                "" if view.applied is None else str(view.applied), str(view.active),
                f"{1000 * last['fetch']:.0f}, {1000 * last['stage']:.0f} ms" if last else "",
                f"{1000 * last['pause']:.1f} ms" if last else "",
            )  # fmt: skip
        return table

    def _present(self) -> list[ReplicaView]:
        return [view for view in self.monitor.replicas.values() if view.state != "gone"]


def sparkline(values: Sequence[float], width: int = 50) -> str:
    """Values in [0, 1] as bars, averaged into at most ``width`` of them."""
    size = max(1, -(-len(values) // width))
    means = [_mean(values[at : at + size]) for at in range(0, len(values), size)]
    return "".join(BARS[round(mean * (len(BARS) - 1))] for mean in means)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)
