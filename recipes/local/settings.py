"""The numbers of one run, in one place."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import task


@dataclass(frozen=True)
class Settings:
    """Times in seconds, staleness in versions.

    ``lag``: a request demands at least version head - lag. ``max_staleness``: a group with a token that is
    further behind the head is not trained on. ``pace``: the engines' declared least time per token; with it a
    generation lasts two trainer steps or more, as long ones do at scale, and so spans activations.
    ``in_flight``: requests at the gateway until training ends, each for ``group_size`` answers.
    """

    seed: int
    steps: int
    out: Path
    groups: int = 20
    group_size: int = 8
    lag: int = 4
    max_staleness: int = 8
    in_flight: int = 54
    pace: float = 0.1
    poll: float = 0.5
    max_len: int = 32

    @property
    def run(self) -> str:
        return f"sort-seed{self.seed}"

    @property
    def store_url(self) -> str:
        return f"file:{self.store}"

    @property
    def store(self) -> Path:
        return self.out / "store"

    @property
    def boot(self) -> Path:
        """The checkpoint that trainer and replicas start from: version 0."""
        return self.out / "boot"

    @property
    def window(self) -> int:
        """Steps at each end of training that are compared."""
        return min(25, self.steps // 2)

    def engine_options(self) -> dict[str, Any]:
        """Room for every sequence at once, so that none waits for a slot or for its prompt's turn."""
        sequences = self.in_flight * self.group_size
        return {
            "max_len": self.max_len,
            "pace": self.pace,
            "max_running": sequences,
            "prefill_rows": 1024,
            "self_check_seconds": 0.5,
        }

    def generate_body(self, prompt: list[int], min_version: int) -> dict[str, Any]:
        """One rollout request: a GRPO group, of a version that is new enough."""
        return {
            "input_ids": prompt,
            "sampling_params": {
                "n": self.group_size,
                "max_new_tokens": task.MAX_NEW_TOKENS,
                "temperature": 1.0,
                "stop_token_ids": [task.EOS],
            },
            "return_logprob": True,
            "weight_version": {"min_version": min_version, "run": self.run},
        }

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "out": os.fspath(self.out)}
