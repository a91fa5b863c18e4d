"""``make demo-miles``: the stock trainer of miles-rl behind a gateway, killed, resumed, every sample proven.

Runs in the environment of miles-rl on CPUs. Half way the trainer with all of its Ray, and one replica, are
killed with SIGKILL; the trainer is started again from its checkpoint, and another replica joins. In the end
every sample is recomputed under the versions that it claims, and a replica that lies has to be found out.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import evidence
from .processes import Child, World

MAX_LEN, LYING_ANSWERS = 64, 8
LAG = 1
"""Of the overlapping loop: a rollout may start on the version before the head."""


@dataclass(frozen=True)
class Engine:
    """Replicas of one kind. ``tokens``: of an answer; ``flags``: of Miles."""

    python: Path | None
    tokens: int
    flags: tuple[str, ...]
    options: tuple[str, ...]

    def replica(self, world: World, name: str, kv_mode: str) -> Child:
        if self.python is not None:
            return world.sglang(name, self.python, *self.options, kv_mode=kv_mode)
        return world.replica(name, *self.options, kv_mode=kv_mode)

    def liar(self, world: World) -> Child:
        """A replica that takes labels without weights."""
        if self.python is not None:
            program = "recipes.local.sglang_faulty"
            return world.sglang("liar", self.python, *self.options, program=program)
        return world.replica("liar", "--engine", "faulty", *self.options, program="recipes.local.faulty")


def engine_of(options: argparse.Namespace) -> Engine:
    if options.engine == "sglang":
        # Statistics need more and longer answers than bits.
        samples = ("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--global-batch-size", "16")
        room = ("--disable-overlap-schedule", "--max-running-requests", "16", "--max-total-tokens", "4096")
        return Engine(options.python, 48, samples, room)
    # An answer of the overlapping loop has to outlast a training step.
    pace = ("--engine-opt=pace=0.1",) if options.overlap else ()
    return Engine(None, 24 if options.overlap else 12, (), (f"--engine-opt=max_len={MAX_LEN}", *pace))


def main() -> int:
    options = _options()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    engine = engine_of(options)
    world = World(options.out.resolve())
    began = time.monotonic()
    try:
        logs, lies = run(world, engine, options.rollouts, options.overlap)
    finally:
        world.close()
    lines = evidence.trained_on(world.root, options.rollouts)
    noisy = options.engine == "sglang"
    kept = evidence.as_calibration(lines) if noisy else lines
    evidence.write_run(world.root, world.store, MAX_LEN, [*kept, *lies])
    say("recomputing every sample")
    proof = (evidence.prove_noisy if noisy else evidence.prove_bits)(world.root)
    report = {
        "ok": not proof["problems"],
        "engine": options.engine,
        "loop": "overlapping" if options.overlap else "one by one",
        "seconds": round(time.monotonic() - began, 1),
        "rollouts": options.rollouts,
        "samples": len(lines),
        "spanning": sum(len(line["weight_versions"]) > 1 for line in lines),
        "staleness": evidence.staleness(world.store, lines),
        "update_seconds": seconds(r"perf/update_weights_time': ([0-9.e-]+)", logs),
        "publish_seconds": seconds(r"took ([0-9.]+) s from gather to head", logs),
        "proof": proof,
    }
    (world.root / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2) if options.json else text(report, world.root))
    return 0 if report["ok"] else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo-miles", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/miles"), help="where the run is left")
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    parser.add_argument("--python", type=Path, help="of an environment with stock SGLang, for that engine")
    parser.add_argument(
        "--async", dest="overlap", action="store_true",
        help="generate the next rollout while training, publish behind the step, at lag 1",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args()
    if options.engine == "sglang" and options.python is None:
        parser.error("--engine sglang needs --python")
    if options.rollouts < 4:
        parser.error("--rollouts must be at least 4: it is killed half way")
    return options


def run(world: World, engine: Engine, rollouts: int, overlap: bool) -> tuple[list[str], list[dict[str, Any]]]:
    """The two lives of the trainer: what each printed, and the answers of a replica that lies in the end."""
    half = rollouts // 2 - 1
    flags = [*engine.flags, "--rollout-max-response-len", str(engine.tokens)]
    if overlap:
        world.settings(**world.required, stitch_lag=LAG, stitch_async=True)
        flags.insert(0, "overlap")
    gateway = world.gateway()
    replicas = [engine.replica(world, "a", "in_place"), engine.replica(world, "b", "retract")]
    say("starting the trainer (Ray takes a while)")
    first = world.trainer(gateway, rollouts, *flags)
    follow(first, half)
    say("SIGKILL: the trainer with its Ray, and a replica")
    first.kill()
    replicas.pop().kill()
    replicas.append(engine.replica(world, "c", "retract"))
    say("resuming")
    second = world.trainer(gateway, rollouts, *flags)
    follow(second, rollouts - 1)
    if second.wait() != 0:
        raise SystemExit(f"the trainer failed:\n{second.text()[-4000:]}")
    for replica in replicas:
        replica.kill()
    say("asking a replica that lies")
    liar = engine.liar(world)
    liar.until_ready()
    lies = evidence.answers(liar.url(), prompts(world.root), engine.tokens, "faulty")
    return [first.text(), second.text()], lies


def prompts(root: Path) -> list[list[int]]:
    """Some prompts as token ids; a token of the tiny policy is a character."""
    inputs = [json.loads(line)["input"] for line in (root / "prompts.jsonl").read_text().splitlines()]
    return [[ord(character) for character in text] for text in inputs[:LYING_ANSWERS]]


def follow(trainer: Child, last: int) -> None:
    """Say when rollouts end, until the ``last`` one has."""
    seen = 0
    while True:
        text = trainer.until(lambda text: text.count("\nfinished ") > seen, "next rollout")  # noqa: B023
        for match in re.findall(r"\nfinished (\d+)", text)[seen:]:
            seen += 1
            say(f"rollout {match} trained on and published")
            if int(match) >= last:
                return


def seconds(pattern: str, logs: list[str]) -> list[float]:
    """How long each of some events took, as the trainer logs it."""
    return [round(float(found), 3) for log in logs for found in re.findall(pattern, log)]


def text(report: dict[str, Any], root: Path) -> str:
    """The end of the demo, for people."""
    proof = report["proof"]
    behind = ", ".join(f"{count} by {by}" for by, count in report["staleness"].items())
    shifted, lies = (
        f"{control['found']} of {control['tried']}" if "tried" in control
        else f"{control['against']} of {control['for_it'] + control['against'] + control['undecided']} spans"
        for control in (proof["shifted"], proof["faulty"])
    )  # fmt: skip
    lines = [
        ("trained", f"{report['rollouts']} rollouts ({report['loop']}), killed and resumed"),
        ("proven", proof["summary"]),
        (
            "staleness",
            f"{behind} versions, of {report['samples']} samples; {report['spanning']} span an activation",
        ),
        ("found out", f"shifted labels: {shifted}; the replica that lies: {lies}"),
        ("publishing", f"{middle(report['publish_seconds']):.3f} s from gather to head; update_weights held "
         f"the trainer for {middle(report['update_seconds']):.3f} s (medians)"),
        ("all in", f"{report['seconds']:.0f} s; report.json and the rest are in {root}"),
        *(("NOT MET", problem) for problem in proof["problems"]),
    ]  # fmt: skip
    return "\n".join(f"{name:12} {words}" for name, words in lines)


def middle(values: list[float]) -> float:
    return statistics.median(values) if values else math.nan


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
