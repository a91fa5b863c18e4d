"""Streams of tokens that keep a server busy, and when each token came: a server's pace during an update."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

from .ports import Clock

Json = dict[str, Any]


class ServerError(Exception):
    """A server did not answer as it should; ``again``: the same may succeed in a moment."""

    def __init__(self, message: str, again: bool = False) -> None:
        super().__init__(message)
        self.again = again


class Server(Protocol):
    """A server that speaks the SGLang subset, over HTTP. Everything raises ServerError."""

    async def generate(self, body: Json) -> Json:
        """The answer of ``/generate``."""
        ...

    def stream(self, body: Json) -> AsyncIterator[Json]:
        """The events of a streaming ``/generate``."""
        ...

    async def ask(self, method: str, path: str, body: Json | None = None) -> tuple[int, Any]:
        """Status and JSON of any route; only an answer that never came raises."""
        ...


def request(prompt: Sequence[int] | str, tokens: int, **fields: Any) -> Json:
    """A greedy ``/generate`` of exactly ``tokens`` tokens for token ids or a text."""
    key = "text" if isinstance(prompt, str) else "input_ids"
    value = prompt if isinstance(prompt, str) else list(prompt)
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {key: value, "sampling_params": sampling, **fields}


class Traffic:
    """``prompts`` side by side, each again and again until ``stop``, in answers of ``tokens`` tokens.

    What is refused for the moment (the pause of an activation) is tried again and counted in ``refused``;
    every other failure is kept in ``failures``. Times are of the clock's ``monotonic``, in seconds.
    """

    RETRY_SECONDS = 0.02

    def __init__(self, server: Server, prompts: Sequence[Sequence[int]], tokens: int, clock: Clock) -> None:
        self._server, self._prompts, self._tokens, self._clock = server, prompts, tokens, clock
        self.came: list[tuple[float, int, int]] = []  # (time, tokens, stream)
        self.answers: list[Json] = []
        self.failures: list[str] = []
        self.refused = 0
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.ensure_future(self._repeat(index)) for index in range(len(self._prompts))]

    async def flows(self, seconds: float) -> None:
        """Wait until every stream gave a token. Raises ServerError."""
        deadline = self._clock.monotonic() + seconds
        while len({stream for _, _, stream in self.came}) < len(self._prompts):
            if self.failures or self._clock.monotonic() > deadline:
                raise ServerError(f"no tokens: {self.failures[0] if self.failures else 'the server is slow'}")
            await asyncio.sleep(0.01)

    async def stop(self, seconds: float) -> None:
        """Let the answers that run end, up to ``seconds``; safe to call twice."""
        self._stopping = True
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def rate(self, began: float, ended: float) -> float | None:
        """Tokens a second of all streams in ``[began, ended)``; None for no time at all."""
        if ended <= began:
            return None
        return sum(n for time, n, _ in self.came if began <= time < ended) / (ended - began)

    def step(self, began: float, ended: float) -> float | None:
        """Median seconds between two events of one stream in ``[began, ended)``: a decoding step."""
        between = []
        for stream in range(len(self._prompts)):
            times = [time for time, _, one in self.came if one == stream and began <= time < ended]
            between += [after - before for before, after in pairwise(times)]
        return statistics.median(between) if between else None

    def longest_silence(self, began: float, ended: float) -> float | None:
        """The longest time without a token of any stream that touches ``[began, ended)``."""
        times = [time for time, _, _ in self.came]
        between = [b - a for a, b in pairwise(times) if b > began and a < ended]
        return max(between, default=None)

    async def _repeat(self, index: int) -> None:
        while not self._stopping:
            seen = 0
            try:
                last: Json = {}
                async for last in self._server.stream(
                    request(self._prompts[index], self._tokens, stream=True)
                ):
                    total = last["meta_info"]["completion_tokens"]
                    if total > seen:
                        self.came.append((self._clock.monotonic(), total - seen, index))
                        seen = total
                self.answers.append(last)
            except ServerError as error:
                if error.again and not seen:
                    self.refused += 1
                else:
                    self.failures.append(str(error))
                await asyncio.sleep(self.RETRY_SECONDS)
