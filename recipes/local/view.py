"""The live view: what is trained, published, served and by whom, twice a second."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .fleet import Fleet
from .monitor import Monitor, ReplicaView
from .rollout import Rollouts
from .settings import Settings
from .trainer import Trainer

REFRESH, PLAIN_EVERY = 0.5, 5.0
BARS = " ▁▂▃▄▅▆▇█"
RECENT = 10


class View:
    """``live``: redraw in place; otherwise a line now and then, for logs."""

    def __init__(self, *, live: bool) -> None:
        self._console = Console()
        self._live = live

    def say(self, text: str) -> None:
        """One line of progress, outside of training."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def show(
        self, settings: Settings, trainer: Trainer, rollouts: Rollouts, monitor: Monitor, fleet: Fleet
    ) -> None:
        """Look at these from now on."""
        self._settings, self._trainer, self._rollouts = settings, trainer, rollouts
        self._monitor, self._fleet = monitor, fleet

    async def run(self) -> None:
        """Until cancelled."""
        if not self._live:
            while True:
                await asyncio.sleep(PLAIN_EVERY)
                self.say(self._line())
        with Live(console=self._console, auto_refresh=False) as live:
            while True:
                live.update(self._screen(), refresh=True)
                await asyncio.sleep(REFRESH)

    # ----------------------------------------------------------------------------------------- one look

    def _line(self) -> str:
        steps = self._trainer.steps[-RECENT:]
        if not steps:
            return "waiting for the first batch"
        serving = " ".join(f"{v.name}:{v.applied}" for v in self._present())
        return (
            f"step {steps[-1].step:3d}  exact {statistics.fmean(s.stats.exact for s in steps):.2f}  "
            f"reward {statistics.fmean(s.stats.reward for s in steps):.2f}  "
            f"staleness {statistics.fmean(s.staleness for s in steps):.1f}  "
            f"step {statistics.fmean(s.trained + s.encoded for s in steps):.2f} s + wait "
            f"{statistics.fmean(s.waited for s in steps):.2f} s  {serving}"
        )

    def _screen(self) -> Panel:
        events = [
            Text(f"{event.at - self._trainer.began:7.1f} s  {event.text}", style="dim")
            for event in self._fleet.events[-6:]
        ]
        done, seconds = len(self._trainer.steps), time.time() - self._trainer.began
        title = f"Stitch: {self._settings.run}, step {done} of {self._settings.steps}, {seconds:.0f} s"
        return Panel(Group(self._training(), self._replicas(), *events), title=title)

    def _training(self) -> Table:
        table = Table.grid(padding=(0, 2))
        steps, deltas = self._trainer.steps, self._trainer.deltas
        recent = steps[-RECENT:]
        if recent:
            exact = [s.stats.exact for s in steps]
            table.add_row("exact match", f"{statistics.fmean(exact[-RECENT:]):.2f}", sparkline(exact))
            rewards = [s.stats.reward for s in steps]
            table.add_row("reward", f"{statistics.fmean(rewards[-RECENT:]):.2f}", sparkline(rewards))
            table.add_row(
                "staleness", f"{statistics.fmean(s.staleness for s in recent):.1f}",
                f"versions; dropped {self._rollouts.dropped} of {self._rollouts.finished} groups, "
                f"{self._rollouts.client.in_flight} requests in flight",
            )  # fmt: skip
        if deltas:
            table.add_row(
                "version", str(deltas[-1].number),
                f"delta of {deltas[-1].bytes / 1000:.0f} kB, {deltas[-1].changed:.0%} of the elements "
                "(learning rate 1e-4; at 1e-6 below 1 %)",
            )  # fmt: skip
        return table

    def _replicas(self) -> Table:
        table = Table(
            "replica", "KV", "state", "version", "requests", "staged in", "pause", box=None, padding=(0, 2)
        )
        for view in self._present():
            last = view.updates[max(view.updates)] if view.updates else {}
            table.add_row(
                view.name, view.kv_mode, view.state, str(view.applied), str(view.active),
                f"{1000 * (last['fetch'] + last['stage']):.0f} ms" if last else "",
                f"{1000 * last['pause']:.1f} ms" if last else "",
            )  # fmt: skip
        return table

    def _present(self) -> list[ReplicaView]:
        return [view for view in self._monitor.replicas.values() if view.state != "gone"]


def sparkline(values: Sequence[float], width: int = 50) -> str:
    """Values in [0, 1] as bars, averaged into at most ``width`` of them."""
    size = max(1, -(-len(values) // width))
    means = [statistics.fmean(values[i : i + size]) for i in range(0, len(values), size)]
    return "".join(BARS[round(mean * (len(BARS) - 1))] for mean in means)
