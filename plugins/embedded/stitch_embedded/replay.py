"""Recompute the log-probabilities of past generations to the bit, from their tokens and version reports
alone.

Rows are computed under the versions that the report names (report.py): what `in_place` kept is replayed
with the keys and values that each older version left, what `retract` recomputed starts over. Because rows
do not depend on their batch (model.py), rows of thousands of trajectories share calls, version by version,
and every version is loaded once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .config import ModelConfig
from .model import KVCache, Runner
from .process import settle
from .report import Pass, Span, cut, merge, passes_of
from .sampling import logprobs
from .weights import Weights


class ReplayError(ValueError):
    """The trajectories cannot be replayed with the versions given; the message names the version."""


@dataclass(frozen=True)
class Trajectory:
    """One generation: token ids, what computed them, and what its logits were divided by (the temperature,
    or 1).
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    passes: tuple[Pass, ...]
    divisor: float = 1.0

    @staticmethod
    def of(
        prompt: Sequence[int], tokens: Sequence[int], fields: dict[str, Any], temperature: float = 1.0
    ) -> Trajectory:
        """From a response's version fields (`meta_info`, or `metadata` of the OpenAI routes). ValueError if
        unfit.
        """
        passes = passes_of(len(prompt), fields) if tokens else ()
        end = passes[-1].rows[-1].end if passes else len(prompt) - 1
        if end != len(prompt) - 1 + len(tokens):
            raise ValueError(f"the report covers {end - len(prompt) + 1} tokens, there are {len(tokens)}")
        return Trajectory(prompt, tokens, passes, temperature or 1.0)

    def relabelled(self, version: Callable[[str], str]) -> Trajectory:
        """The same tokens as if `version(v)` had stood wherever the report says `v`."""
        passes = tuple(
            replace(p, rows=merge(replace(s, version=version(s.version)) for s in p.rows))
            for p in self.passes
        )
        return replace(self, passes=passes)

    def versions(self) -> set[str]:
        """All that its replay needs."""
        return {span.version for one in self.passes for span in one.rows}


@dataclass(eq=False)
class _Job:
    """One pass of one trajectory: compute all its rows in order, keep what rows from `scored_from` on say."""

    trajectory: int
    known: Sequence[int]
    rows: tuple[Span, ...]
    scored_from: int
    first_token: int
    done: int = 0
    slot: int = -1


class Replayer:
    """Replays batches of trajectories of one model; `rows_per_call` rows a forward. Used by one thread at a
    time.

    `dtype` is the weights' at the replica. Sets torch to one thread, as the replicas had.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_len: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        rows_per_call: int = 512,
    ) -> None:
        """`max_len` must be the replicas': attention over another cache length may round differently."""
        self._config = config
        self._rows = rows_per_call
        self._weights = Weights(config, dtype)
        cache = KVCache(config, rows_per_call, max_len, dtype)
        self._runner = Runner(self._weights, cache, rows_per_call)

    def replay(
        self, versions: Iterable[tuple[str, Mapping[str, Tensor]]], trajectories: Sequence[Trajectory]
    ) -> list[list[float]]:
        """For each trajectory the fp32 log-probability of each of its tokens, as exact Python floats.

        `versions` yields (label, all tensors by HF name) in the order in which the replicas activated them;
        it may be lazy, and labels that nobody needs cost nothing. Raises ReplayError when a version is
        missing or comes out of order.
        """
        settle()
        results = [[0.0] * len(t.tokens) for t in trajectories]
        by_version: defaultdict[str, list[tuple[_Job, int]]] = defaultdict(list)
        for index, trajectory in enumerate(trajectories):
            for job in _jobs(index, trajectory, self._runner.cache.max_len):
                for number, span in enumerate(job.rows):
                    by_version[span.version].append((job, number))
        free = list(range(self._runner.cache.slots))
        for label, tensors in versions:
            parts = by_version.pop(label, [])
            if not parts:
                continue
            self._load(label, tensors)
            for group in self._groups(parts):
                self._compute(label, group, trajectories, results, free)
        if by_version:
            raise ReplayError(f"version {min(by_version)} was not given ({len(by_version)} missing)")
        return results

    def _load(self, label: str, tensors: Mapping[str, Tensor]) -> None:
        missing = self._weights.named.keys() - tensors.keys()
        if missing:
            raise ReplayError(f"version {label} has no tensor {min(missing)}")
        self._weights.copy_from({name: tensors[name] for name in self._weights.named})

    def _groups(self, parts: Sequence[tuple[_Job, int]]) -> Iterator[list[tuple[_Job, int]]]:
        """Whole spans, together at most one call's rows (a longer span is a group of its own)."""
        group: list[tuple[_Job, int]] = []
        rows = 0
        for job, number in parts:
            size = job.rows[number].end - job.rows[number].start
            if group and rows + size > self._rows:
                yield group
                group, rows = [], 0
            group.append((job, number))
            rows += size
        yield group

    def _compute(
        self,
        label: str,
        group: Sequence[tuple[_Job, int]],
        trajectories: Sequence[Trajectory],
        results: Sequence[list[float]],
        free: list[int],
    ) -> None:
        tokens: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        scored: list[tuple[int, _Job, int]] = []  # (row, job, token it predicts)
        self._give_slots([job for job, number in group if number == 0], free)
        for job, number in group:
            if number != job.done:
                raise ReplayError(f"version {label} came before one that was activated earlier")
            start, end = job.rows[number].start, job.rows[number].end
            first = max(start, job.scored_from)
            scored += [
                (len(tokens) + at - start, job, at - job.scored_from + job.first_token)
                for at in range(first, end)
            ]
            tokens += job.known[start:end]
            slots += [job.slot] * (end - start)
            positions += range(start, end)
            job.done += 1
            if job.done == len(job.rows):
                free.append(job.slot)
        for at in range(0, len(tokens), self._rows):
            to = at + self._rows
            hidden = self._runner.hidden(tokens[at:to], slots[at:to], positions[at:to])
            wanted = [one for one in scored if at <= one[0] < to]
            if not wanted:
                continue
            logits = self._runner.logits(hidden[[row - at for row, _, _ in wanted]])
            logp = logprobs(logits, [trajectories[job.trajectory].divisor for _, job, _ in wanted])
            ids = torch.tensor([trajectories[job.trajectory].tokens[token] for _, job, token in wanted])
            values = logp.gather(-1, ids[:, None])[:, 0].tolist()
            for (_, job, token), value in zip(wanted, values, strict=True):
                results[job.trajectory][token] = value

    def _give_slots(self, jobs: Sequence[_Job], free: list[int]) -> None:
        old = self._runner.cache
        if len(jobs) > len(free):
            new = KVCache(self._config, 2 * old.slots + len(jobs), old.max_len, self._weights.dtype)
            new.keys[:, : old.slots] = old.keys[:, : old.slots]
            new.values[:, : old.slots] = old.values[:, : old.slots]
            free += range(old.slots, new.slots)
            self._runner.cache = new
        for job in jobs:
            job.slot = free.pop()
        if jobs:
            self._runner.cache.clear([job.slot for job in jobs])


def _jobs(index: int, trajectory: Trajectory, max_len: int) -> Iterator[_Job]:
    prompt = len(trajectory.prompt)
    known = [*trajectory.prompt, *trajectory.tokens]
    if len(known) > max_len:
        raise ReplayError(f"trajectory {index} has {len(known)} tokens, more than max_len {max_len}")
    if not trajectory.passes:
        return
    ends = [one.first_token for one in trajectory.passes[1:]] + [len(trajectory.tokens)]
    for one, end in zip(trajectory.passes, ends, strict=True):
        rows = cut(one.rows, 0, prompt - 1 + end)
        yield _Job(index, known, rows, prompt - 1 + one.first_token, one.first_token)
