"""One finished generation with its version report, and the file that keeps all of them for the proof."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from .grpo import Sample

REPORT_FIELDS = ("weight_versions", "kv_versions", "kv_passes", "kv")


@dataclass(frozen=True)
class Trajectory(Sample):
    """A sample, where it came from and what it says of versions. ``control`` marks a negative control's."""

    id: str
    run: str
    replica: str
    kv_mode: str
    report: Mapping[str, Any]
    control: str | None = None

    @classmethod
    def of(
        cls,
        prompt: list[int],
        answer: Mapping[str, Any],
        *,
        replica: str,
        kv_mode: str,
        control: str | None = None,
    ) -> Trajectory:
        """From one element of a ``/generate`` answer."""
        meta = answer["meta_info"]
        return cls(
            prompt, answer["output_ids"], [entry[0] for entry in meta["output_token_logprobs"]],
            meta["id"], meta["run"], replica, kv_mode, meta, control,
        )  # fmt: skip

    @property
    def oldest(self) -> int:
        """The oldest version that had a part in it."""
        return int(self.report["weight_version"])

    @property
    def versions(self) -> int:
        """How many versions its tokens come from."""
        return len(self.report["weight_versions"])

    def staleness(self, head: int) -> float:
        """How many versions its tokens are behind ``head``, on average."""
        behind = sum((head - s["version"]) * (s["end"] - s["start"]) for s in self.report["weight_versions"])
        return behind / max(1, len(self.output))

    def to_json(self) -> dict[str, Any]:
        """A line of the file. Log-probabilities keep every bit: floats print as they read back."""
        return {
            "id": self.id,
            "run": self.run,
            "replica": self.replica,
            "kv_mode": self.kv_mode,
            "prompt_ids": self.prompt,
            "output_ids": self.output,
            "logprobs": self.logprobs,
            **{name: self.report[name] for name in REPORT_FIELDS if name in self.report},
            "temperature": 1.0,
            "control": self.control,
        }


class TrajectoryFile:
    """Writes ``trajectories.jsonl.zst``. Used by one thread."""

    def __init__(self, path: Path) -> None:
        self.written = 0
        self._raw = path.open("xb")
        self._text = io.TextIOWrapper(zstandard.ZstdCompressor().stream_writer(self._raw), encoding="utf-8")

    def write(self, trajectories: Iterable[Trajectory]) -> None:
        for trajectory in trajectories:
            self._text.write(json.dumps(trajectory.to_json(), separators=(",", ":")) + "\n")
            self.written += 1

    def close(self) -> None:
        self._text.close()
        self._raw.close()
