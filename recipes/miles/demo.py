"""``make demo-miles``: the stock trainer of miles-rl behind a gateway, killed, resumed, every sample proven.

Runs in the environment of miles-rl on CPUs. Half way the trainer with all of its Ray, and one replica, are
killed with SIGKILL; the trainer is started again from its checkpoint, and another replica joins. In the end
every sample is recomputed under the versions that it claims.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import zstandard

from stitch_core.chain import ChainReader
from stitch_core.stores import open_store

from .processes import Child, World

MAX_LEN = 64
REPORT = ("kv", "kv_versions", "kv_passes")


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo-miles", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/miles"), help="where the run is left")
    parser.add_argument("--rollouts", type=int, default=8)
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    world = World(options.out.resolve())
    began = time.monotonic()
    try:
        logs = run(world, options.rollouts)
    finally:
        world.close()
    lines = trajectories(world.root, options.rollouts)
    write_run(world, lines)
    say("recomputing every sample")
    proof = prove(world)
    report = {
        "seconds": round(time.monotonic() - began, 1),
        "rollouts": options.rollouts,
        "staleness": staleness(world, lines),
        "publish_seconds": publish_seconds(logs),
        "proof": proof,
    }
    (world.root / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    return 0 if proof.get("ok") else 1


def run(world: World, rollouts: int) -> list[str]:
    """The two lives of the trainer; what each printed."""
    half = rollouts // 2 - 1
    gateway = world.gateway()
    options = (f"--engine-opt=max_len={MAX_LEN}",)
    world.replica("a", *options)
    doomed = world.replica("b", *options)
    say("starting the trainer (Ray takes a while)")
    first = world.trainer(gateway, rollouts)
    follow(first, half)
    say("SIGKILL: the trainer with its Ray, and a replica")
    first.kill()
    doomed.kill()
    world.replica("c", *options)
    say("resuming")
    second = world.trainer(gateway, rollouts)
    follow(second, rollouts - 1)
    if second.wait() != 0:
        raise SystemExit(f"the trainer failed:\n{second.text()[-4000:]}")
    return [first.text(), second.text()]


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


def trajectories(root: Path, rollouts: int) -> list[dict[str, Any]]:
    """Every sample as the proof reads it, with the rollout that trained on it."""
    lines = []
    for rollout_id in range(rollouts):
        saved = torch.load(root / f"samples_{rollout_id}.pt", weights_only=False)["samples"]
        for sample in saved:
            (report,) = sample["metadata"]["stitch"]
            count = sample["response_length"]
            lines.append({
                "id": f"{rollout_id}-{sample['index']}", "run": report["run"], "kv_mode": "in_place",
                "prompt_ids": sample["tokens"][: len(sample["tokens"]) - count],
                "output_ids": sample["tokens"][len(sample["tokens"]) - count :],
                "logprobs": sample["rollout_log_probs"], "weight_versions": report["spans"],
                **{key: report[key] for key in REPORT if key in report}, "temperature": 1.0, "control": None,
                "rollout_id": rollout_id,
            })  # fmt: skip
    return lines


def write_run(world: World, lines: list[dict[str, Any]]) -> None:
    """What ``stitch prove`` reads."""
    run = {"store": world.store, "run": "math", "boot": "boot", "max_len": MAX_LEN, "min_spanning": 0}
    (world.root / "run.json").write_text(json.dumps(run))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (world.root / "trajectories.jsonl.zst").write_bytes(zstandard.compress(text.encode()))


def prove(world: World) -> dict[str, Any]:
    command = [sys.executable, "-m", "stitch_core.cli", "prove", str(world.root), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.stdout.strip():
        raise SystemExit(f"the proof failed: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def staleness(world: World, lines: list[dict[str, Any]]) -> dict[str, int]:
    """How many samples started how many versions before the one that their training step was made from."""
    made = asyncio.run(numbers(world.store))
    counted = Counter(made[line["rollout_id"]] - 1 - line["weight_versions"][0]["version"] for line in lines)
    return {str(key): count for key, count in sorted(counted.items())}


async def numbers(url: str) -> dict[int, int]:
    """The version that each rollout's training step made."""
    chain = ChainReader(open_store(url))
    head, _ = await chain.head("math")
    versions = await chain.back_to(await chain.manifest("math", head), above_floor=False)
    return {m.step: m.number for m in versions if m.step is not None}


def publish_seconds(logs: list[str]) -> list[float]:
    """What ``update_weights`` took, as Miles itself measures it."""
    pattern = re.compile(r"perf/update_weights_time': ([0-9.e-]+)")
    return [round(float(seconds), 3) for log in logs for seconds in pattern.findall(log)]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
