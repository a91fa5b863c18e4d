"""``python -m recipes.local.demo``: train a small policy while a fleet follows it, then prove what it says.

One process trains and asks for rollouts; a gateway and the replicas are processes of their own. In mid-run a
replica joins, one is killed, one is stopped. What it leaves in its directory ``stitch prove`` proves again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import TypeVar

import torch

from stitch_core.policy_publisher import PolicyPublisher
from stitch_core.ports import StoreError
from stitch_core.publisher import PublishError
from stitch_embedded.proof import ProofError, prove

from . import grpo, report, task
from .fleet import Fleet, FleetError
from .grpo import Grpo
from .lifecycle import beside, prepare, scratch_directory, until_sigterm
from .monitor import Monitor
from .plot import draw
from .report import Outcome
from .rollout import GatewayClient, NoRollouts, RequestFailed, Rollouts
from .settings import Settings
from .trainer import Trainer
from .trajectory import TrajectoryFile
from .view import Board, View

T = TypeVar("T")

# When, as a share of the training steps.
JOIN, KILL, DRAIN = 0.35, 0.55, 0.75
CONTROL_REQUESTS = 8

FAILURES = (FleetError, NoRollouts, RequestFailed, PublishError, StoreError, ProofError)


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 0 if everything that it promises was met."""
    options = _options(arguments)
    settings = Settings(seed=options.seed, steps=options.steps, out=options.out)
    if settings.out.exists() and any(settings.out.iterdir()):
        print(f"{settings.out} is not empty: give another directory with --out", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    began = time.monotonic()
    try:
        view = View(live=sys.stdout.isatty() and not options.plain)
        outcome = asyncio.run(until_sigterm(play(settings, view)))
        print("proving every trajectory from the store alone", flush=True)
        proof = prove(settings.out)
    except FAILURES as error:
        print(f"the demo failed: {error}; its logs are in {settings.out}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted", file=sys.stderr)
        return 130
    summary = report.summarise(outcome, proof, time.monotonic() - began, min_gain=options.min_gain)
    (settings.out / "report.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    draw(settings.out / "plot.png", outcome)
    print(report.text(summary, settings.out))
    return 1 if summary["problems"] else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recipes.local.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts (0)")
    parser.add_argument("--steps", type=int, default=200, help="training steps, half a second each (200)")
    parser.add_argument("--out", type=Path, help="a new or empty directory (default: out/demo-<time>)")
    parser.add_argument(
        "--min-gain", type=float, default=0.2, metavar="G",
        help="what exact match must gain from the first to the last 25 steps; -1 demands nothing (0.2)",
    )  # fmt: skip
    parser.add_argument("--plain", action="store_true", help="lines instead of the live view")
    options = parser.parse_args(arguments)
    if options.steps < 10:
        parser.error("--steps must be at least 10: the timeline needs room")
    options.out = (options.out or Path("out") / time.strftime("demo-%Y%m%d-%H%M%S")).absolute()
    return options


async def play(settings: Settings, view: View) -> Outcome:
    """Everything but the proof. Whatever happens, no process is left behind."""
    logs = settings.out / "logs"
    logs.mkdir(parents=True)
    scratch = scratch_directory(settings.out)
    fleet = Fleet(settings, scratch, logs)
    file = TrajectoryFile(settings.out / "trajectories.jsonl.zst")
    try:
        view.say(f"warming the policy up with {grpo.WARMUP_STEPS} supervised steps")
        policy, warm_up = await asyncio.to_thread(prepare, settings)
        publisher = await asyncio.to_thread(
            PolicyPublisher.start, settings.store_url, settings.run, settings.boot, scratch / "deltas",
            producer={"recipe": "local", "seed": settings.seed},
        )  # fmt: skip
        view.say(f"starting the gateway and two replicas, whose host checkpoints are in {scratch}")
        view.say(f"kill any of them, if you like: their process ids are in {logs}")
        url, *_ = await asyncio.gather(
            fleet.start_gateway(), fleet.start_replica("in_place"), fleet.start_replica("retract")
        )
        async with GatewayClient(url, settings, lambda: publisher.head, fleet.kv_modes.__getitem__) as client:
            rollouts = Rollouts(client, settings, file.write)
            trainer = Trainer(Grpo(policy), rollouts, publisher, settings)
            monitor, timeline = Monitor(fleet), Timeline(fleet, settings.steps)
            watching = view.watch(Board(settings, trainer, rollouts, monitor, fleet))
            await beside(trainer.run(timeline.step_done), rollouts.run(), monitor.run(), watching)
        await timeline.finished()
        view.say("asking a replica that relabels without copying: the negative control")
        await fleet.retire()
        await _ask_faulty(fleet, settings, publisher.head, file)
        return Outcome.of(settings, warm_up, trainer, rollouts, monitor, fleet)
    finally:
        file.close()
        await fleet.close()


class Timeline:
    """What happens to the fleet while training goes on."""

    def __init__(self, fleet: Fleet, steps: int) -> None:
        self._fleet = fleet
        self._plan = {
            round(JOIN * steps): self._join,
            round(KILL * steps): self._kill,
            round(DRAIN * steps): self._drain,
        }
        self._tasks: list[asyncio.Task[None]] = []

    def step_done(self, step: int) -> None:
        if step in self._plan:
            self._tasks.append(asyncio.create_task(self._plan[step]()))

    async def finished(self) -> None:
        """Raises FleetError when something did not go as it should."""
        await asyncio.gather(*self._tasks)

    async def _join(self) -> None:
        await self._fleet.start_replica("retract")

    async def _kill(self) -> None:
        self._fleet.kill(self._fleet.oldest("in_place"))

    async def _drain(self) -> None:
        await self._fleet.drain(self._fleet.oldest("retract"))


async def _ask_faulty(fleet: Fleet, settings: Settings, head: int, file: TrajectoryFile) -> None:
    """Record what a lying replica answers, asked directly: it never was part of the fleet."""
    url = await fleet.start_named(
        "faulty", "in_place", program=("-m", "recipes.local.faulty"), engine="faulty"
    )
    rng = random.Random(settings.seed)
    async with GatewayClient(url, settings, lambda: head, fleet.kv_modes.__getitem__) as client:
        prompts = [task.draw_prompt(rng) for _ in range(CONTROL_REQUESTS)]
        for group in await asyncio.gather(*(client.group(prompt, control="faulty") for prompt in prompts)):
            file.write(group)


if __name__ == "__main__":
    sys.exit(main())
