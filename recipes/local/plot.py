"""One picture of the run: what was learned, how stale the data was, how long updates took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from .report import Outcome

SMOOTHED = 9


def draw(path: Path, outcome: Outcome) -> None:
    """Write the PNG."""
    figure, axes = plt.subplots(3, 1, figsize=(9, 9), sharex=True, layout="constrained")
    at = [step.at for step in outcome.steps]
    _learning(axes[0], at, outcome)
    axes[1].plot(at, [step.staleness for step in outcome.steps], label="mean of the batch")
    axes[1].plot(at, [step.oldest for step in outcome.steps], lw=0.8, alpha=0.6, label="oldest token")
    axes[1].set_ylabel("versions behind the head")
    _updates(axes[2], outcome)
    for axis in axes:
        _events(axis, outcome, named=axis is axes[0])
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right", fontsize=8)
    axes[-1].set_xlabel("seconds of training")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _learning(axis: Any, at: list[float], outcome: Outcome) -> None:
    for name, color in (("reward", "tab:blue"), ("exact", "tab:orange")):
        values = [float(getattr(step.stats, name)) for step in outcome.steps]
        axis.plot(at, values, lw=0.5, alpha=0.4, color=color)
        axis.plot(at, _smooth(values), color=color, label="exact match" if name == "exact" else name)
    axis.set_ylim(0, 1)
    axis.set_title(f"{outcome.settings.run}: GRPO with rollouts from an elastic fleet")


def _updates(axis: Any, outcome: Outcome) -> None:
    # The first update of a replica is that to the run's beginning or, for one that joins, over many versions.
    at = [float(update["time"]) - outcome.began for update in outcome.updates]
    for name in ("fetch", "stage", "pause"):
        axis.plot(at, [1000 * float(update[name]) for update in outcome.updates], ".", ms=3, label=name)
    axis.set_yscale("log")
    axis.set_ylabel("ms for one update")


def _events(axis: Any, outcome: Outcome, *, named: bool) -> None:
    for event in outcome.events:
        at = event.at - outcome.began
        if event.label and 0 < at <= outcome.steps[-1].at:
            axis.axvline(at, color="gray", lw=0.8, ls=":")
            if named:
                axis.text(at, 0.02, event.label + " ", rotation=90, fontsize=8, color="gray", ha="right")


def _smooth(values: list[float]) -> list[float]:
    half = SMOOTHED // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
