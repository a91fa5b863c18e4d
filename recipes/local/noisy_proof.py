"""Proof of truth for engines whose arithmetic is not ours: statistics instead of bits.

Every trajectory is recomputed under the versions that it claims, and under neighbours of other states. Real
kernels round differently, so neither is exact; how far they are off when the version is surely right is
measured first, within version 0 before training. For a span of at least 16 tokens of one version:

- its score is the mean distance of its log-probabilities from the neighbour's, less that from the claimed
  version's: above 0 speaks for the claim;
- the undecided band is what the noise alone could make of it: the widest difference between the mean
  distances of any two spans of the measurement.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stitch_embedded.proof import UNREADABLE, ProofError, _manifests, _replay, _shift
from stitch_embedded.recorded import Record, RunFile, read_trajectories
from stitch_embedded.report import token_spans

SPAN_TOKENS = 16
REQUIRED_FRACTION = 0.9
CALIBRATION = "calibration"


@dataclass(frozen=True)
class SpanScore:
    """One span of a trajectory: mean distances from the claimed version's and the neighbour's values."""

    claimed: float
    other: float

    @property
    def score(self) -> float:
        return self.other - self.claimed


@dataclass
class Verdicts:
    """How many spans speak for their label, against it, or are undecided."""

    for_it: int = 0
    against: int = 0
    undecided: int = 0

    @classmethod
    def of(cls, scores: Sequence[float], band: float) -> Verdicts:
        return cls(
            sum(score > band for score in scores),
            sum(score < -band for score in scores),
            sum(-band <= score <= band for score in scores),
        )

    @property
    def spans(self) -> int:
        return self.for_it + self.against + self.undecided


@dataclass
class NoisyReport:
    """``noise``: distances of spans that are surely right; ``shifted`` and ``faulty``: negative controls."""

    noise: list[float]
    band: float
    claims: Verdicts
    shifted: Verdicts
    faulty: Verdicts
    trajectories: int
    spanning: dict[str, int] = field(default_factory=dict)
    median_distance: float = 0.0
    median_score: float = 0.0

    def problems(self) -> list[str]:
        """What is not as it must be; empty: the run is proven."""
        found = []
        claims, shifted, faulty = self.claims, self.shifted, self.faulty
        if not claims.spans or claims.for_it < REQUIRED_FRACTION * claims.spans:
            found.append(f"only {claims.for_it} of {claims.spans} spans speak for their version")
        if claims.against:
            found.append(f"{claims.against} of {claims.spans} spans speak against their version")
        if not shifted.spans or shifted.against < REQUIRED_FRACTION * shifted.spans:
            found.append(
                f"shifted labels: only {shifted.against} of {shifted.spans} spans speak against them"
            )
        if not faulty.spans or faulty.against < REQUIRED_FRACTION * faulty.spans:
            found.append(
                f"the faulty replica: only {faulty.against} of {faulty.spans} spans speak against it"
            )
        found += [
            f"no trajectory spans an activation in mode {mode}"
            for mode in ("in_place", "retract")
            if not self.spanning.get(mode)
        ]
        return found

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "problems": self.problems(), "ok": not self.problems()}


def prove(directory: Path) -> NoisyReport:
    """Prove the run in ``directory``. Raises ProofError when what it needs is missing or damaged."""
    run = RunFile.read(directory)
    records = [record for record in read_trajectories(directory, run.run) if record.claimed.tokens]
    try:
        states = {m.number: m.state for m in asyncio.run(_manifests(run, directory))}
    except UNREADABLE as error:
        raise ProofError(f"run {run.run} cannot be read from its store: {error}") from error
    shifts = [_shift(record, states) for record in records]
    outcomes = _replay((run, directory, [record.claimed for record in records], shifts))
    noise: list[float] = []
    scores: dict[str | None, list[SpanScore]] = {None: [], "faulty": []}
    spanning: dict[str, int] = {}
    for record, (again, other) in zip(records, outcomes, strict=True):
        if record.control == CALIBRATION:
            noise += [distance(record, again, span) for span in spans(record)]
            continue
        if record.control is None and len(record.claimed.versions()) > 1:
            spanning[record.kv_mode] = spanning.get(record.kv_mode, 0) + 1
        if other is None:
            continue
        scores[record.control] += [
            SpanScore(distance(record, again, span), distance(record, other, span)) for span in spans(record)
        ]
    if len(noise) < 2:
        raise ProofError("there is no measurement of the noise: trajectories with control 'calibration'")
    return judge(noise, scores[None], scores["faulty"], len(records), spanning)


def judge(
    noise: Sequence[float],
    claims: Sequence[SpanScore],
    faulty: Sequence[SpanScore],
    trajectories: int,
    spanning: dict[str, int],
) -> NoisyReport:
    """The report of what was measured."""
    band = max(noise) - min(noise)
    scores = [span.score for span in claims]
    return NoisyReport(
        list(noise), band, Verdicts.of(scores, band), Verdicts.of([-score for score in scores], band),
        Verdicts.of([span.score for span in faulty], band), trajectories, spanning,
        statistics.median([span.claimed for span in claims] or [0.0]), statistics.median(scores or [0.0]),
    )  # fmt: skip


def spans(record: Record) -> list[range]:
    """The tokens of each span that is long enough."""
    claimed = record.claimed
    found = token_spans(len(claimed.prompt), len(claimed.tokens), claimed.passes)
    return [range(s.start, s.end) for s in found if s.end - s.start >= SPAN_TOKENS]


def distance(record: Record, values: Sequence[float], span: range) -> float:
    """Mean absolute difference of the recorded log-probabilities from ``values``."""
    return statistics.fmean(abs(record.logprobs[i] - values[i]) for i in span)
