"""What the demo found: ``report.json``, and the lines that a person reads at the end."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stitch_embedded.proof import ProofReport

from .fleet import Event, Fleet
from .monitor import Monitor
from .rollout import Rollouts
from .settings import Settings
from .trainer import Delta, StepRecord, Trainer

GAIN, IN_FLIGHT = 0.2, 32
DENSITY = (
    "learning rate 1e-4, which learns in minutes, changes some 15 % of the bf16 elements in a step; at the "
    "1e-6 of large models it is below 1 %, and deltas are as much smaller"
)


@dataclass(frozen=True)
class WarmUp:
    """The supervised steps before training."""

    steps: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class Outcome:
    """A run, before it was proven. ``began``: the wall time at which training did."""

    settings: Settings
    began: float
    warm_up: WarmUp
    steps: Sequence[StepRecord]
    deltas: Sequence[Delta]
    updates: Sequence[dict[str, Any]]
    events: Sequence[Event]
    rollouts: dict[str, Any]
    failures: Sequence[str]

    @classmethod
    def of(
        cls,
        settings: Settings,
        warm_up: WarmUp,
        trainer: Trainer,
        rollouts: Rollouts,
        monitor: Monitor,
        fleet: Fleet,
    ) -> Outcome:
        """Gather it from the parts that saw it."""
        return cls(
            settings, trainer.began, warm_up, trainer.steps, trainer.deltas, monitor.updates(), fleet.events,
            {
                "groups": rollouts.finished,
                "dropped_groups": rollouts.dropped,
                "retries": dict(rollouts.client.retries),
            },
            [*trainer.failures, *rollouts.failures, *fleet.failures],
        )  # fmt: skip


def summarise(outcome: Outcome, proof: ProofReport, seconds: float, *, min_gain: float) -> dict[str, Any]:
    """``report.json``. ``seconds``: the whole demo's. ``problems`` is empty when all went as promised."""
    window = outcome.settings.window
    exact = [step.stats.exact for step in outcome.steps]
    first, last = statistics.fmean(exact[:window]), statistics.fmean(exact[-window:])
    fewest = min(step.in_flight for step in outcome.steps)
    problems = [*outcome.failures, *proof.problems()]
    if last - first < min_gain:
        problems.append(f"exact match went from {first:.2f} to {last:.2f}, a gain below {min_gain}")
    if fewest < IN_FLIGHT:
        problems.append(f"only {fewest} requests were in flight at one time, {IN_FLIGHT} were to be")
    if not proof.faulty.tried:
        problems.append("the faulty replica gave no trajectory to be found out by")
    return {
        "ok": not problems,
        "problems": problems,
        "seconds": seconds,
        "settings": outcome.settings.to_json(),
        "warm_up": asdict(outcome.warm_up),
        "training": {
            "seconds": outcome.steps[-1].at,
            "steps": len(outcome.steps),
            "window": window,
            "exact_first": first,
            "exact_last": last,
            "reward_first": statistics.fmean(s.stats.reward for s in outcome.steps[:window]),
            "reward_last": statistics.fmean(s.stats.reward for s in outcome.steps[-window:]),
            "learned": last - first >= GAIN,
            "step_seconds": _spread([step.trained + step.encoded for step in outcome.steps]),
            "wait_seconds": _spread([step.waited for step in outcome.steps]),
            "staleness": _spread([step.staleness for step in outcome.steps]),
            "oldest": max(step.oldest for step in outcome.steps),
            "versions_per_trajectory": statistics.fmean(step.versions for step in outcome.steps),
        },
        "rollouts": {**outcome.rollouts, "fewest_in_flight": fewest},
        "deltas": {
            "published": len(outcome.deltas),
            "bytes": _spread([delta.bytes for delta in outcome.deltas]),
            "changed_fraction": _spread([delta.changed for delta in outcome.deltas]),
            "note": DENSITY,
            "publish_seconds": _spread([delta.seconds for delta in outcome.deltas]),
        },
        "updates": {
            name: _spread([float(update[name]) for update in outcome.updates])
            for name in ("fetch", "stage", "pause")
        },
        "fleet": [{"at": event.at - outcome.began, "event": event.text} for event in outcome.events],
        "proof": proof.to_json(),
        "steps": [asdict(step) for step in outcome.steps],
    }


def text(summary: dict[str, Any], out: Path) -> str:
    """The end of the demo, for people."""
    rows = [*_trained(summary), *_followed(summary), *_proven(summary["proof"])]
    rows.append(("all in", f"{summary['seconds']:.0f} s; report.json, plot.png and the rest are in {out}"))
    rows += [("NOT MET", problem) for problem in summary["problems"]]
    return "\n".join(f"{name:12} {words}" for name, words in rows)


Rows = list[tuple[str, str]]


def _trained(summary: dict[str, Any]) -> Rows:
    training, warm_up, rollouts = summary["training"], summary["warm_up"], summary["rollouts"]
    exact = f"exact match {training['exact_first']:.2f} -> {training['exact_last']:.2f}"
    reward = f"reward {training['reward_first']:.2f} -> {training['reward_last']:.2f}"
    stale = f"staleness {training['staleness']['median']:.1f} (median), at most {training['oldest']}"
    spans = f"{training['versions_per_trajectory']:.1f} versions in a trajectory"
    return [
        ("learned", f"{exact}, {reward}"),
        ("", f"in {training['steps']} steps, {training['seconds']:.0f} s"),
        ("", f"after {warm_up['steps']} supervised steps, {warm_up['seconds']:.0f} s"),
        ("rollouts", f"{rollouts['groups']} groups, {rollouts['dropped_groups']} dropped; {spans}; {stale}"),
        ("", f"repeated requests: {rollouts['retries'] or 'none'}"),
    ]


def _followed(summary: dict[str, Any]) -> Rows:
    deltas, updates = summary["deltas"], summary["updates"]
    changed = f"{deltas['changed_fraction']['median']:.0%} of the elements changed"
    pause = (
        f"{1000 * updates['pause']['median']:.1f} ms (median), {1000 * updates['pause']['p99']:.0f} ms (p99)"
    )
    staged = f"staged in {1000 * updates['stage']['median']:.0f} ms while serving"
    return [
        ("deltas", f"{deltas['bytes']['median'] / 1000:.0f} kB, {changed} (rate 1e-4; at 1e-6 below 1 %)"),
        ("activations", f"{updates['pause']['count']}; each {staged}, pause {pause}"),
        *(("fleet", f"{event['at']:6.1f} s  {event['event']}") for event in summary["fleet"]),
    ]


def _proven(proof: dict[str, Any]) -> Rows:
    found = {name: f"{proof[name]['found']} of {proof[name]['tried']}" for name in ("shifted", "faulty")}
    spanning = ", ".join(f"{count} in mode {mode}" for mode, count in proof["spanning"].items())
    differ = f"{proof['discriminated']} of {proof['discriminable']}"
    return [
        ("proven", f"{proof['proven']} of {proof['trajectories']} trajectories, bit for bit"),
        ("", f"spanning an activation: {spanning}"),
        ("", f"{differ} would have been different under a neighbouring version"),
        ("found out", f"shifted labels: {found['shifted']}; the replica that lies: {found['faulty']}"),
    ]


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Count, mean, median, 99th percentile and maximum."""
    if not values:
        return {"count": 0, "mean": 0.0, "median": 0.0, "p99": 0.0, "max": 0.0}
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "mean": statistics.fmean(ordered),
        "median": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "max": ordered[-1],
    }
