"""The local recipe's trajectories: the proof reads back what a response said, bit for bit."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.local.trajectory import Trajectory, TrajectoryFile
from stitch_embedded.recorded import read_trajectories
from stitch_embedded.replay import Trajectory as Replayed

PROMPT = [0, 7, 5, 1]
LOGPROBS = [float(np.float32(-random.Random(i).random())) for i in range(3)]


def answer(**meta: Any) -> dict[str, Any]:
    report = {
        "id": "a_0",
        "run": "r",
        "weight_version": "4",
        "weight_versions": [{"version": 4, "start": 0, "end": 1}, {"version": 6, "start": 1, "end": 3}],
        "kv_versions": [{"version": 4, "start": 0, "end": 3}],
        "kv": "mixed",
        "output_token_logprobs": [[value, 5, None] for value in LOGPROBS],
    }
    return {"output_ids": [5, 7, 2], "meta_info": report | meta}


def trajectory(**meta: Any) -> Trajectory:
    return Trajectory.of(PROMPT, answer(**meta), replica="r0", kv_mode="in_place")


def test_versions_and_staleness_are_those_of_the_tokens() -> None:
    one = trajectory()
    assert (one.oldest, one.versions) == (4, 2)
    assert one.staleness(head=7) == pytest.approx((3 + 1 + 1) / 3)
    assert trajectory(weight_version="3").oldest == 3, "the prompt may have been computed under an older one"


def test_the_proof_reads_what_was_written(tmp_path: Path) -> None:
    file = TrajectoryFile(tmp_path / "trajectories.jsonl.zst")
    lie = Trajectory.of(PROMPT, answer(id="b_0"), replica="r9", kv_mode="in_place", control="faulty")
    file.write([trajectory(), lie])
    file.close()
    assert file.written == 2
    first, second = read_trajectories(tmp_path, "r")
    assert first.logprobs == tuple(LOGPROBS)
    assert first.claimed == Replayed.of(PROMPT, [5, 7, 2], answer()["meta_info"])
    assert (first.id, first.kv_mode, first.control) == ("a_0", "in_place", None)
    assert (second.id, second.control) == ("b_0", "faulty")
