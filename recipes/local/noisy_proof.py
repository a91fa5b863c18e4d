"""Proof of truth for engines whose arithmetic is not ours: statistics instead of bits.

Every trajectory is recomputed under the versions that it claims, and under neighbours of other states. Real
kernels round differently, so neither is exact; how far they are off when the version is surely right is
measured first, within version 0 before training. For a span of n tokens, at least 16, of one version:

- its distance from a version is the mean difference of its tokens' log-odds from those recomputed: in
  log-odds rounding counts the same whether a token was sure or not;
- it speaks for its label if the neighbour is further away, by more than noise makes of the mean of n tokens:
  three standard errors, the undecided band;
- it speaks against its label if the neighbour is as much nearer, or if its distance is four times that of
  any span of the measurement, as when the weights are those of neither.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from stitch_embedded.proof import UNREADABLE, ProofError, manifests_of, replay_part, under_neighbours
from stitch_embedded.recorded import Record, RunFile, read_trajectories
from stitch_embedded.report import token_spans

SPAN_TOKENS = 16
REQUIRED_FRACTION = 0.9
ERRORS, FAR = 3.0, 4.0
SURE = -1e-5
CALIBRATION = "calibration"


@dataclass(frozen=True)
class SpanScore:
    """One span of ``tokens``: distances from the claimed version and from its neighbour."""

    claimed: float
    other: float
    tokens: int

    def swapped(self) -> SpanScore:
        """As if it claimed the neighbour."""
        return SpanScore(self.other, self.claimed, self.tokens)


@dataclass(frozen=True)
class Noise:
    """``sigma``: standard deviation of one token's distance; ``widest``: the largest distance of a span."""

    sigma: float
    widest: float

    @classmethod
    def of(cls, spans: Sequence[Sequence[float]]) -> Noise:
        """From the distances of every token of spans that are surely right."""
        tokens = [value for span in spans for value in span]
        return cls(statistics.pstdev(tokens), max(statistics.fmean(span) for span in spans))

    def band(self, tokens: int) -> float:
        """What noise can make of the mean of so many tokens."""
        return ERRORS * self.sigma / math.sqrt(tokens)


@dataclass
class Verdicts:
    """How many spans speak for their label, against it, or are undecided."""

    for_it: int = 0
    against: int = 0
    undecided: int = 0

    @classmethod
    def of(cls, spans: Sequence[SpanScore], noise: Noise) -> Verdicts:
        result = cls()
        for span in spans:
            score, band = span.other - span.claimed, noise.band(span.tokens)
            if score < -band or span.claimed > FAR * noise.widest:
                result.against += 1
            elif score > band:
                result.for_it += 1
            else:
                result.undecided += 1
        return result

    @property
    def spans(self) -> int:
        return self.for_it + self.against + self.undecided


@dataclass
class NoisyReport:
    """``shifted`` and ``faulty`` are the negative controls; ``spanning`` counts trajectories by KV mode."""

    noise: Noise
    claims: Verdicts
    shifted: Verdicts
    faulty: Verdicts
    trajectories: int
    spanning: dict[str, int] = field(default_factory=dict)
    median_distance: float = 0.0
    median_other: float = 0.0
    min_spanning: int = 1

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
            if self.spanning.get(mode, 0) < self.min_spanning
        ]
        return found

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "problems": self.problems(), "ok": not self.problems()}


def prove(directory: Path) -> NoisyReport:
    """Prove the run in ``directory``. Raises ProofError when what it needs is missing or damaged."""
    run = RunFile.read(directory)
    records = [record for record in read_trajectories(directory, run.run) if record.claimed.tokens]
    try:
        states = {m.number: m.state for m in asyncio.run(manifests_of(run, directory))}
    except UNREADABLE as error:
        raise ProofError(f"run {run.run} cannot be read from its store: {error}") from error
    shifts = [under_neighbours(record, states) for record in records]
    outcomes = replay_part((run, directory, [record.claimed for record in records], shifts))
    noise: list[list[float]] = []
    scores: dict[str | None, list[SpanScore]] = {None: [], "faulty": []}
    spanning: dict[str, int] = {}
    for record, (again, other) in zip(records, outcomes, strict=True):
        if record.control == CALIBRATION:
            noise += [distances(record, again, span) for span in spans(record)]
            continue
        if record.control is None and len(record.claimed.versions()) > 1:
            spanning[record.kv_mode] = spanning.get(record.kv_mode, 0) + 1
        if other is None:
            continue
        for span in spans(record):
            claimed, neighbour = (
                statistics.fmean(distances(record, values, span)) for values in (again, other)
            )
            scores[record.control].append(SpanScore(claimed, neighbour, len(span)))
    if not noise:
        raise ProofError("there is no measurement of the noise: trajectories with control 'calibration'")
    report = judge(Noise.of(noise), scores[None], scores["faulty"], len(records), spanning)
    return replace(report, min_spanning=min(1, run.min_spanning))


def judge(
    noise: Noise,
    claims: Sequence[SpanScore],
    faulty: Sequence[SpanScore],
    trajectories: int,
    spanning: dict[str, int],
) -> NoisyReport:
    """The report of what was measured."""
    return NoisyReport(
        noise, Verdicts.of(claims, noise), Verdicts.of([span.swapped() for span in claims], noise),
        Verdicts.of(faulty, noise), trajectories, spanning,
        statistics.median([span.claimed for span in claims] or [0.0]),
        statistics.median([span.other for span in claims] or [0.0]),
    )  # fmt: skip


def spans(record: Record) -> list[range]:
    """The tokens of each span that is long enough."""
    claimed = record.claimed
    found = token_spans(len(claimed.prompt), len(claimed.tokens), claimed.passes)
    return [range(s.start, s.end) for s in found if s.end - s.start >= SPAN_TOKENS]


def distances(record: Record, values: Sequence[float], span: range) -> list[float]:
    """How far each token of the span is in log-odds from ``values``, its log-probabilities recomputed."""
    return [abs(log_odds(record.logprobs[i]) - log_odds(values[i])) for i in span]


def log_odds(logprob: float) -> float:
    """log(p / (1 - p)); what is surer than SURE counts as that."""
    bounded = min(logprob, SURE)
    return bounded - math.log(-math.expm1(bounded))
