"""Continuous batching: which rows run in the next forward, what they are worth, when a request ends.

One thread owns a `Scheduler` with everything below it (weights, cache, requests from `add` on):
`worker.Worker` in a server, the caller in tests and replays. Between two calls of `step` every request is
at a token boundary, and that is where pauses, aborts and activations happen. KV never crosses requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from .model import KVCache, Runner
from .report import Pass, Span, merge, token_spans
from .sampling import Draw, SamplingParams, logprobs, sample
from .weights import Weights

PauseMode = Literal["in_place", "retract", "abort"]


@dataclass(eq=False)
class Request:
    """One sequence to generate. The first block is the caller's, the rest belongs to the scheduler."""

    rid: str
    prompt: list[int]
    params: SamplingParams
    seed: int = 0
    """Of the draws, in [0, 2**64)."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end it: `params.stop_ids` and the model's end tokens, unless `ignore_eos`."""
    stop_text: Callable[[list[int]], str | None] | None = None
    """Given the output so far, the stop string it contains, if any. Called on the scheduler's thread."""
    prompt_logprobs_from: int | None = None
    """Report the prompt's log-probabilities from this position on."""
    top_logprobs: int = 0
    stream: bool = False
    """An event for every token, not only the last."""
    asked: str | None = None
    """The id that its client gave, which copies and the rest of a batch share."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[float, int]]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    slot: int = -1
    computed: int = 0
    """Positions whose keys and values are in the slot."""
    marks: list[tuple[str, int]] = field(default_factory=list)
    """(version, first row computed under it) in the present pass."""
    pass_start: int = 0
    """Output tokens there were when the present pass began."""
    passes: list[Pass] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """What became of a request. `logprobs[j]` is that of `tokens[j]`; `passes` say what computed it
    (report.py).

    `prompt_logprobs` belong to the prompt positions from max(1, `prompt_logprobs_from`) on. `label`: the
    engine's version when it ended.
    """

    finish: dict[str, Any]
    tokens: list[int]
    logprobs: list[float]
    tops: list[list[tuple[float, int]]]
    prompt_logprobs: list[float]
    passes: tuple[Pass, ...]
    label: str

    def spans(self, prompt: int) -> tuple[Span, ...]:
        """Versions over the output tokens."""
        return token_spans(prompt, len(self.tokens), self.passes)


@dataclass(frozen=True)
class Event:
    """News of a request: its tokens since the last event or, at the end, `outcome` with all of them."""

    request: Request
    tokens: tuple[int, ...] = ()
    outcome: Outcome | None = None


class Scheduler:
    """See the module. `max_running` sequences hold slots; a step computes at most `prefill_rows` rows of
    prefixes beside one row for each sequence that is decoding.
    """

    def __init__(
        self, weights: Weights, label: str, *, max_len: int, max_running: int = 256, prefill_rows: int = 512
    ) -> None:
        self.weights = weights
        self.label = label
        self.max_len = max_len
        self.prefill_rows = prefill_rows
        self.paused = False
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.steps = 0
        self._cache = KVCache(weights.config, max_running, max_len, weights.dtype)
        self._runner = Runner(weights, self._cache, max_running + prefill_rows)
        self._free = list(range(max_running))
        self._events: list[Event] = []

    @property
    def ready(self) -> bool:
        """A step would compute something."""
        return not self.paused and bool(self.running or self.waiting)

    @property
    def idle(self) -> bool:
        """No request is running or waiting."""
        return not (self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Take a request; it must have been checked against `max_len` and the vocabulary."""
        self.waiting.append(request)

    def abort(self, chosen: Callable[[Request], bool], message: str = "Aborted") -> int:
        """End all requests that `chosen` picks, with what they have; how many."""
        picked = [r for r in (*self.running, *self.waiting) if chosen(r)]
        for request in picked:
            self._finish(request, {"type": "abort", "message": message})
        return len(picked)

    def pause(self, mode: PauseMode) -> None:
        """Compute nothing until `resume`. "retract" drops the KV of what runs, "abort" ends every request."""
        self.paused = True
        if mode == "abort":
            self.abort(lambda _: True)
        elif mode == "retract":
            for request in reversed(self.running):
                self._retract(request)
                self.waiting.appendleft(request)
            self.running.clear()

    def resume(self) -> None:
        """End the pause, if there is one."""
        self.paused = False

    def activate(self, tensors: Mapping[str, Tensor], label: str) -> None:
        """Copy `tensors` over the live weights; all later rows carry `label`. An exception leaves them
        undefined.
        """
        self.weights.copy_from(tensors)
        self.label = label

    def take_events(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    @torch.inference_mode()
    def step(self) -> None:
        """One forward over a row of every decoding sequence and some rows of prefixes, and one token where
        due.
        """
        self._admit()
        tokens: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []  # rows whose logits are needed
        ends: list[tuple[int, Request]] = []  # (index in `wanted`, request that gets a token)
        scored: list[tuple[int, Request, int]] = []  # (index in `wanted`, request, prompt token to score)
        budget = self.prefill_rows
        for request in self.running:
            known = len(request.prompt) + len(request.tokens)
            start = request.computed
            if known - start == 1:
                count = 1
            else:
                count = min(known - start, budget)
                budget -= count
                if not count:
                    continue
            if not request.marks or request.marks[-1][0] != self.label:
                request.marks.append((self.label, start))
            end = request.computed = start + count
            if request.prompt_logprobs_from is not None and not request.tokens:
                first = max(start, request.prompt_logprobs_from - 1)
                for position in range(first, min(end, len(request.prompt) - 1)):
                    scored.append((len(wanted), request, request.prompt[position + 1]))
                    wanted.append(len(tokens) + position - start)
            if end == known:
                ends.append((len(wanted), request))
                wanted.append(len(tokens) + count - 1)
            tokens += _slice(request, start, end)
            slots += [request.slot] * count
            positions += range(start, end)
        if not tokens:
            return
        hidden = self._runner.hidden(tokens, slots, positions)
        self.steps += 1
        if wanted:
            rows = hidden if len(wanted) == len(tokens) else hidden[wanted]
            self._score(self._runner.logits(rows), ends, scored)

    def _score(
        self, logits: Tensor, ends: Sequence[tuple[int, Request]], scored: Sequence[tuple[int, Request, int]]
    ) -> None:
        if scored:
            raw = logprobs(logits, [1.0])
            for row, request, token in scored:
                request.prompt_logprobs.append(float(raw[row, token]))
            if not ends:
                return
            logits = logits[[row for row, _ in ends]]
        batch = [request for _, request in ends]
        logp = logprobs(logits, [r.params.divisor for r in batch])
        draws = [Draw(r.params, r.seed, len(r.tokens), _barred(r)) for r in batch]
        chosen = sample(logp, draws)
        values = logp.gather(-1, chosen[:, None])[:, 0].tolist()
        for row, (request, token, value) in enumerate(zip(batch, chosen.tolist(), values, strict=True)):
            self._take(request, token, value, logp[row] if request.top_logprobs else None)

    def _take(self, request: Request, token: int, logprob: float, row: Tensor | None) -> None:
        if request.params.max_new_tokens == 0:
            self._finish(request, {"type": "length", "length": 0})
            return
        request.tokens.append(token)
        request.logprobs.append(logprob)
        if row is not None:
            top = torch.topk(row, min(request.top_logprobs, len(row)))
            request.tops.append(list(zip(top.values.tolist(), top.indices.tolist(), strict=True)))
        matched: str | int | None = token if token in request.stop_ids else None
        if matched is None and request.stop_text is not None:
            matched = request.stop_text(request.tokens)
        if matched is not None:
            self._finish(request, {"type": "stop", "matched": matched})
        elif len(request.tokens) >= request.params.max_new_tokens:
            self._finish(request, {"type": "length", "length": len(request.tokens)})
        elif request.stream:
            self._events.append(Event(request, (token,)))

    def _admit(self) -> None:
        fresh = []
        while self.waiting and self._free:
            request = self.waiting.popleft()
            request.slot = self._free.pop()
            fresh.append(request.slot)
            self.running.append(request)
        if fresh:
            self._cache.clear(fresh)

    def _retract(self, request: Request) -> None:
        """Drop a running request's KV; what it has sampled stays."""
        if len(request.tokens) > request.pass_start:
            self._close_pass(request)
        elif not request.tokens:
            request.prompt_logprobs.clear()
        request.marks = []
        self._free.append(request.slot)
        request.slot, request.computed, request.pass_start = -1, 0, len(request.tokens)

    def _close_pass(self, request: Request) -> None:
        """Record what the present pass computed and under which versions."""
        ends = [start for _, start in request.marks[1:]] + [request.computed]
        rows = (Span(v, start, end) for (v, start), end in zip(request.marks, ends, strict=True))
        request.passes.append(Pass(request.pass_start, merge(rows)))

    def _finish(self, request: Request, finish: dict[str, Any]) -> None:
        # A pass that gave no token explains none; without any token it still explains the prompt's scores.
        if len(request.tokens) > request.pass_start or (not request.tokens and request.marks):
            self._close_pass(request)
        if request.slot >= 0:
            self.running.remove(request)
            self._free.append(request.slot)
            request.slot = -1
        elif request in self.waiting:
            self.waiting.remove(request)
        outcome = Outcome(
            finish,
            request.tokens,
            request.logprobs,
            request.tops,
            request.prompt_logprobs,
            tuple(request.passes),
            self.label,
        )
        self._events.append(Event(request, outcome=outcome))


def _slice(request: Request, start: int, end: int) -> list[int]:
    """Tokens [start, end) of prompt + output."""
    split = len(request.prompt)
    if start >= split:
        return request.tokens[start - split : end - split]
    if end <= split:
        return request.prompt[start:end]
    return request.prompt[start:] + request.tokens[: end - split]


def _barred(request: Request) -> frozenset[int]:
    return request.stop_ids if len(request.tokens) < request.params.min_new_tokens else frozenset()
