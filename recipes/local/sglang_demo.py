"""``make demo ENGINE=sglang``: the demo on stock SGLang servers, with the proof of truth as statistics.

Two replicas and a joiner, one started after the other, follow a policy that trains fast: what is shown is
that real kernels serve what their labels say, not that the policy learns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stitch_core.policy_publisher import PolicyPublisher

from . import noisy_proof, policy, task
from .demo import CONTROL_REQUESTS, FAILURES
from .grpo import Grpo
from .lifecycle import beside, prepare, scratch_directory, until_sigterm
from .rollout import GatewayClient, Group, Rollouts
from .settings import Settings
from .sglang_fleet import SGLangFleet
from .trainer import Trainer
from .trajectory import TrajectoryFile

RATE = 5e-4
"""Of learning: neighbouring versions must differ by more than kernels round."""
JOIN, WAIT = 0.3, 0.8
"""As shares of the steps: the joiner is started, and training waits until it serves."""
SLOWLY = 6.0
"""Seconds that a step waits at least while the joiner starts, so that it sees versions go by."""
NEW_TOKENS = 48


@dataclass(frozen=True)
class SGLangSettings(Settings):
    """Fewer and longer generations than the embedded engine's: one SGLang server takes what a core gives."""

    groups: int = 8
    group_size: int = 4
    in_flight: int = 16
    pace: float = 0.0
    max_len: int = policy.MAX_POSITIONS

    def engine_arguments(self) -> tuple[str, ...]:
        """Flags of SGLang beside those of any machine without a GPU."""
        sequences = self.in_flight * self.group_size
        return (
            "--skip-tokenizer-init", "--disable-overlap-schedule", "--max-running-requests", str(sequences),
            "--max-total-tokens", str(2 * sequences * self.max_len),
        )  # fmt: skip

    def generate_body(self, prompt: list[int], min_version: int) -> dict[str, Any]:
        body = super().generate_body(prompt, min_version)
        body["sampling_params"] = {
            "n": self.group_size, "max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True
        }  # fmt: skip
        return body


class JoinedRollouts(Rollouts):
    """Batches come slower from step ``joins`` on, and none from ``wait_from`` on, until ``joined`` is set."""

    def __init__(self, *arguments: Any, joins: int, wait_from: int, joined: asyncio.Event) -> None:
        super().__init__(*arguments)
        self._joins, self._wait_from, self._joined = joins, wait_from, joined
        self._batches = 0

    async def batch(self, *, oldest: int, timeout: float) -> list[Group]:
        self._batches += 1
        if self._batches > self._joins:
            patience = SLOWLY if self._batches < self._wait_from else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._joined.wait()
        return await super().batch(oldest=oldest, timeout=timeout)


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 0 if everything that it promises was met."""
    options = _options(arguments)
    settings = SGLangSettings(seed=options.seed, steps=options.steps, out=options.out)
    if settings.out.exists() and any(settings.out.iterdir()):
        print(f"{settings.out} is not empty: give another directory with --out", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    began = time.monotonic()
    try:
        outcome = asyncio.run(until_sigterm(play(settings, options.python)))
        print("proving every span from the store alone", flush=True)
        proof = noisy_proof.prove(settings.out)
    except FAILURES as error:
        print(f"the demo failed: {error}; its logs are in {settings.out}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted", file=sys.stderr)
        return 130
    problems = [*outcome["failures"], *proof.problems()]
    summary = {"ok": not problems, "problems": problems, "seconds": time.monotonic() - began, **outcome}
    summary["proof"] = proof.to_json()
    (settings.out / "report.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print("\n".join(f"{name:12} {words}" for name, words in text(summary, proof, settings.out)))
    return 1 if problems else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recipes.local.sglang_demo", description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="of an environment with stock SGLang")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts (0)")
    parser.add_argument("--steps", type=int, default=20, help="training steps, each a version (20)")
    parser.add_argument("--out", type=Path, help="a new or empty directory (default: out/sglang-<time>)")
    options = parser.parse_args(arguments)
    if options.steps < 10:
        parser.error("--steps must be at least 10: the timeline needs room")
    options.out = (options.out or Path("out") / time.strftime("sglang-%Y%m%d-%H%M%S")).absolute()
    return options


async def play(settings: SGLangSettings, python: Path) -> dict[str, Any]:
    """Everything but the proof. Whatever happens, no process is left behind."""
    logs = settings.out / "logs"
    logs.mkdir(parents=True)
    scratch = scratch_directory(settings.out)
    fleet = SGLangFleet(settings, scratch, logs, python=python)
    file = TrajectoryFile(settings.out / "trajectories.jsonl.zst")
    said = asyncio.create_task(_say_events(fleet))
    try:
        trained, _ = await asyncio.to_thread(prepare, settings)
        publisher = await asyncio.to_thread(
            PolicyPublisher.start, settings.store_url, settings.run, settings.boot, scratch / "deltas",
            producer={"recipe": "local", "engine": "sglang", "seed": settings.seed},
        )  # fmt: skip
        url = await fleet.start_gateway()
        await fleet.start_replica("in_place")
        await fleet.start_replica("retract")
        async with GatewayClient(url, settings, lambda: publisher.head, fleet.kv_modes.__getitem__) as client:
            await _ask(client, settings, file, noisy_proof.CALIBRATION)
            joined, joins = asyncio.Event(), round(JOIN * settings.steps)
            rollouts = JoinedRollouts(
                client, settings, file.write, joins=joins, wait_from=round(WAIT * settings.steps),
                joined=joined,
            )  # fmt: skip
            trainer = Trainer(Grpo(trained, RATE), rollouts, publisher, settings)
            joining: list[asyncio.Task[None]] = []

            async def join() -> None:
                try:
                    await fleet.start_replica("retract")
                finally:
                    joined.set()

            def step_done(step: int) -> None:
                print(f"step {step}: version {step}, {rollouts.finished} groups", flush=True)
                if step == joins:
                    joining.append(asyncio.create_task(join()))

            await beside(trainer.run(step_done), rollouts.run())
            await asyncio.gather(*joining)
        await fleet.retire()
        lying = await fleet.start_named("faulty", "in_place", program=("-m", "recipes.local.sglang_faulty"))
        async with GatewayClient(
            lying, settings, lambda: publisher.head, fleet.kv_modes.__getitem__
        ) as client:
            await _ask(client, settings, file, "faulty")
        return _outcome(settings, trainer, rollouts, fleet)
    finally:
        file.close()
        await fleet.close()
        said.cancel()


async def _ask(client: GatewayClient, settings: Settings, file: TrajectoryFile, control: str) -> None:
    rng = random.Random(settings.seed)
    prompts = [task.draw_prompt(rng) for _ in range(CONTROL_REQUESTS)]
    for group in await asyncio.gather(*(client.group(prompt, control=control) for prompt in prompts)):
        file.write(group)


async def _say_events(fleet: SGLangFleet) -> None:
    done = 0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            for event in fleet.events[done:]:
                print(event.text, flush=True)
            done = len(fleet.events)
            await asyncio.sleep(0.5)


def _outcome(settings: Settings, trainer: Trainer, rollouts: Rollouts, fleet: SGLangFleet) -> dict[str, Any]:
    return {
        "failures": [*trainer.failures, *rollouts.failures, *fleet.failures],
        "settings": settings.to_json(),
        "steps": len(trainer.steps),
        "training_seconds": trainer.steps[-1].at,
        "groups": rollouts.finished,
        "retries": dict(Counter(rollouts.client.retries)),
        "changed_fraction": [delta.changed for delta in trainer.deltas],
        "fleet": [{"at": event.at - trainer.began, "event": event.text} for event in fleet.events],
    }


def text(summary: dict[str, Any], proof: noisy_proof.NoisyReport, out: Path) -> list[tuple[str, str]]:
    """The end of the demo, for people."""
    claims, shifted, faulty, noise = proof.claims, proof.shifted, proof.faulty, proof.noise
    spanning = ", ".join(f"{count} in mode {mode}" for mode, count in sorted(proof.spanning.items()))
    return [
        ("trained", f"{summary['steps']} versions in {summary['training_seconds']:.0f} s"),
        ("noise", f"{noise.sigma:.4f} a token; a span of 16 is undecided within {noise.band(16):.4f}"),
        ("proven", f"{claims.for_it} of {claims.spans} spans speak for their version, "
         f"{claims.undecided} are undecided, {claims.against} speak against it"),
        ("", f"distance from it {proof.median_distance:.4f} (median), from its neighbour "
         f"{proof.median_other:.4f}"),
        ("", f"spanning an activation: {spanning or 'none'}"),
        ("found out", f"shifted labels: {shifted.against} of {shifted.spans} spans; "
         f"the replica that lies: {faulty.against} of {faulty.spans}"),
        ("all in", f"{summary['seconds']:.0f} s; report.json and the rest are in {out}"),
        *(("NOT MET", problem) for problem in summary["problems"]),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
