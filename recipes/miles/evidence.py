"""What a run left behind, as the proofs read it, and the proof itself."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import zstandard

from recipes.local import noisy_proof
from stitch_core.chain import ChainReader
from stitch_core.manifest import Manifest
from stitch_core.stores import open_store

REPORT = ("kv", "kv_versions", "kv_passes")
Line = dict[str, Any]


def trained_on(root: Path, rollouts: int) -> list[Line]:
    """Every sample that Miles trained on, with the rollout that it belonged to."""
    lines = []
    for rollout_id in range(rollouts):
        saved = torch.load(root / f"samples_{rollout_id}.pt", weights_only=False)["samples"]
        for sample in saved:
            (report,) = sample["metadata"]["stitch"]
            prompt = len(sample["tokens"]) - sample["response_length"]
            line = _line(
                f"{rollout_id}-{sample['index']}", report["run"], sample["tokens"][:prompt],
                sample["tokens"][prompt:], sample["rollout_log_probs"], report["spans"], report,
            )  # fmt: skip
            lines.append(line | {"rollout_id": rollout_id})
    return lines


def answers(url: str, prompts: Iterable[list[int]], tokens: int, control: str) -> list[Line]:
    """What the replica at ``url`` answers when it is asked directly, marked as ``control``."""
    lines = []
    for number, prompt in enumerate(prompts):
        sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        request = urllib.request.Request(
            f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            meta = json.load(response)["meta_info"]
        chosen = meta["output_token_logprobs"]
        line = _line(
            f"{control}-{number}", meta["run"], prompt, [entry[1] for entry in chosen],
            [entry[0] for entry in chosen], meta["weight_versions"], meta,
        )  # fmt: skip
        lines.append(line | {"control": control})
    return lines


def _line(
    name: str, run: str, prompt: list[int], output: list[int], logprobs: list[float], spans: list[Any],
    report: dict[str, Any],
) -> Line:  # fmt: skip
    retracted = len(spans) > 1 and report.get("kv") == "uniform"
    return {
        "id": name, "run": run, "kv_mode": "retract" if retracted else "in_place", "prompt_ids": prompt,
        "output_ids": output, "logprobs": logprobs, "weight_versions": spans,
        **{key: report[key] for key in REPORT if key in report}, "temperature": 1.0, "control": None,
    }  # fmt: skip


def write_run(root: Path, store: str, max_len: int, lines: list[Line]) -> None:
    """What ``stitch prove`` reads."""
    run = {"store": store, "run": "math", "boot": "boot", "max_len": max_len, "min_spanning": 0}
    (root / "run.json").write_text(json.dumps(run))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (root / "trajectories.jsonl.zst").write_bytes(zstandard.compress(text.encode()))


def prove_bits(root: Path) -> dict[str, Any]:
    """The embedded engine's answers, recomputed bit for bit; with the summary ``proven``."""
    command = [sys.executable, "-W", "ignore", "-m", "stitch_core.cli", "prove", str(root), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.stdout.strip():
        raise SystemExit(f"the proof failed: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    result["summary"] = f"{result['proven']} of {result['trajectories']} samples"
    return result


def prove_noisy(root: Path) -> dict[str, Any]:
    """SGLang's answers, recomputed by arithmetic that is not its own: statistics over spans."""
    report = noisy_proof.prove(root)
    claims = report.claims
    summary = (
        f"{claims.for_it} of {claims.spans} spans speak for their version, {claims.undecided} are "
        f"undecided, {claims.against} speak against it"
    )
    return {**report.to_json(), "summary": summary}


def as_calibration(lines: list[Line]) -> list[Line]:
    """The first rollout as the measurement of noise: there was no other version yet."""
    return [
        line | {"control": noisy_proof.CALIBRATION} if line["rollout_id"] == 0 else line for line in lines
    ]


def staleness(store: str, lines: list[Line]) -> dict[str, int]:
    """Samples by how many versions their oldest was behind the head when they were trained on."""
    made = {m.step: m.number for m in asyncio.run(versions(store)) if m.step is not None}

    def head(rollout_id: int) -> int:
        """What it was trained from. A version has no step if its trainer was killed before it published."""
        return made.get(rollout_id, made.get(rollout_id - 1, 0) + 1) - 1

    oldest = ((line, min(span["version"] for span in line["weight_versions"])) for line in lines)
    counted = Counter(head(line["rollout_id"]) - version for line, version in oldest)
    return {str(key): count for key, count in sorted(counted.items())}


async def versions(url: str) -> list[Manifest]:
    """Every version of the run."""
    chain = ChainReader(open_store(url))
    head, _ = await chain.head("math")
    return list(await chain.back_to(await chain.manifest("math", head), above_floor=False))
