"""A probe of weights, not of labels: what the live weights make of a fixed prompt, kept by state.

All else that an engine says of itself (its instance, its version, that it has copied) proves nothing about
its weights. The log-probabilities that they give a few fixed tokens depend on every layer. What they should
be is not known when a state is seen for the first time; when it comes back (a rollback, a channel moved back,
an engine or a replica that restarted, a receiver's return to the boot copy) they must be what they were.

It costs one request of 32 tokens a version, behind the opened gate; where a state comes back, one before the
gate opens, or three that differ; 11 when an engine has started. It does not find weights that were wrong when
their state was seen first, a difference within the tolerance, as between neighbouring steps of training, and
what 32 tokens do not touch, as another token's embedding or an expert.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from ..ports import Clock, Engine, EngineError, Files, ProbeAnswer, RunBlocking
from .probe_kept import FILE_NAME, KeptAnswers

ALONE, TOGETHER = 3, 8
"""Requests that measure an engine's noise: one after the other, then at once."""
TRIES = 3
"""Answers that must differ before weights are said to."""
LEAST_TOLERANCE = 0.05
NOISE_FACTOR = 4.0
_LEAST_SCALE = 1e-3

Confirm = Callable[[], Awaitable[None]]
"""Raises EngineError unless the engine is still the one that was asked, under the same version."""


class WeightsDiffer(Exception):
    """An engine's weights are not those that it had, or another one had, when their state was here before."""


def difference(kept: Sequence[float], now: Sequence[float]) -> float:
    """Root mean square of the differences, in standard deviations of ``kept`` over the prompt.

    Relative, since rounding errors grow with the logits, and so does what other weights change; a mean, since
    one token's may be large where two experts or two roundings are nearly tied. inf where they cannot be
    compared.
    """
    if kept == now:
        return 0.0
    if len(kept) != len(now) or not all(map(math.isfinite, (*kept, *now))):
        return math.inf
    mean = sum(kept) / len(kept)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in kept) / len(kept))
    squares = sum((a - b) ** 2 for a, b in zip(kept, now, strict=True))
    return math.sqrt(squares / len(kept)) / max(deviation, _LEAST_SCALE)


def noise_of(answers: Sequence[Sequence[float]]) -> float:
    """The largest difference between answers of the same weights."""
    return max((difference(a, b) for a, b in combinations(answers, 2)), default=0.0)


def tolerance(noise: float) -> float:
    """The greatest difference that may be noise: four times what was measured, 0.05 at least.

    Four times, since at start nothing else runs: batches of every size, chunks of other prompts and another
    start's choice of kernels add to it. The floor is for engines that show none at start. A stock SGLang
    0.5.23 (bf16 on a CPU, 8 layers of width 512) differed by 0 alone, and by 0.011 at most among 16 at once
    or beside 12 requests that generate; the embedded engine by 0. Other weights differ by more: one layer of
    eight by 0.53 to 1.6, one matrix by 0.27 or more, the norm of one head's width by 0.15; all weights off by
    a hundredth by 0.064, by a thousandth by 0.017.
    """
    return max(LEAST_TOLERANCE, NOISE_FACTOR * noise)


class Probe:
    """Asks ``engine``, keeps what it answers in ``kept``, and compares. Driven by the Activator alone.

    Seconds: ``answer`` for one answer before the gate opens, ``patience`` for those that nobody waits for.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        kept: KeptAnswers,
        *,
        answer: float = 60.0,
        patience: float = 600.0,
    ) -> None:
        self._engine, self._clock, self._kept = engine, clock, kept
        self._answer_seconds, self._patience = answer, patience
        self._able: bool | None = None
        self._measured = False
        self._noise = 0.0
        self._last: dict[str, Any] | None = None
        self._counts: Counter[str] = Counter()

    @classmethod
    def kept_in(
        cls,
        directory: Path,
        engine: Engine,
        clock: Clock,
        files: Files,
        run_blocking: RunBlocking,
        say: Callable[[str], None],
    ) -> Probe:
        """One that remembers in a file in ``directory``, a host checkpoint's."""
        return cls(engine, clock, KeptAnswers(files, directory / FILE_NAME, run_blocking, say))

    def must_ask(self, state: str) -> bool:
        """Whether ``prove`` has to come before an engine that now holds ``state`` may answer others."""
        return not self._measured or (self._able is True and self._kept.get(state) is not None)

    def renew(self) -> None:
        """The engine is another one: nothing is known of it."""
        self._measured = False

    def status(self) -> dict[str, Any]:
        """For ``/ready``; ``able`` is None until the engine was asked, False where it cannot tell."""
        return {
            "able": self._able,
            "noise": self._noise,
            "tolerance": tolerance(self._noise),
            "states": len(self._kept),
            "outcomes": dict(self._counts),
            "last": self._last,
        }

    async def prove(self, state: str, confirm: Confirm, *, boot: bool = False) -> None:
        """The engine should hold ``state``: if that was here before, its weights must be what they were then.

        The first time that an engine is asked its noise is measured too. ``boot``: it is the boot
        checkpoint's. Raises EngineError without an answer, or if it was another engine's; WeightsDiffer.
        """
        try:
            answers = await (self._again(state) if self._measured else self._first())
            await confirm()
        except EngineError:
            self._note("no_answer", state)
            raise
        if answers:
            if boot:
                self._kept.boot = state
            self._judge(state, answers)
        self._measured = True

    async def learn(self, state: str, confirm: Confirm) -> None:
        """A state that is new: keep its answer, unless the version changed before ``confirm`` returned.

        Runs beside whatever the Activator does, and touches no file.
        """
        if not self._able:
            return
        try:
            found = await self._answer(self._patience, self._kept.signature)
            await confirm()
        except EngineError:
            self._note("no_answer", state)
        else:
            self._keep(state, found.logprobs)

    async def save(self) -> None:
        """Make what was learned last a restart."""
        await self._kept.save()

    # ------------------------------------------------------------------------------------------ inside

    async def _first(self) -> list[tuple[float, ...]]:
        """Answers of an engine that was never asked, and their noise; none where it cannot tell."""
        first = await self._ask(self._patience)
        self._able = first is not None
        if first is None:
            return []
        answers = [first]
        for _ in range(ALONE - 1):
            answers.append(await self._answer(self._patience, first.signature))
        asked = [self._answer(self._patience, first.signature) for _ in range(TOGETHER)]
        for one in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(one, BaseException):
                raise one
            answers.append(one)
        self._noise = noise_of([one.logprobs for one in answers if all(map(math.isfinite, one.logprobs))])
        await self._kept.use(first.signature)
        return [one.logprobs for one in answers[:ALONE]]

    async def _again(self, state: str) -> list[tuple[float, ...]]:
        """Answers until one is as the kept one."""
        kept, answers = self._kept.get(state), []
        for _ in range(TRIES):
            found = await self._answer(self._answer_seconds, self._kept.signature)
            answers.append(found.logprobs)
            if kept is None or difference(kept, found.logprobs) <= tolerance(self._noise):
                break
        return answers

    def _judge(self, state: str, answers: Sequence[tuple[float, ...]]) -> None:
        kept, most = self._kept.get(state), tolerance(self._noise)
        if kept is None:
            self._keep(state, answers[-1])
            return
        found = min(difference(kept, one) for one in answers)
        self._note("same" if found <= most else "differs", state, found)
        if found <= most:
            return
        where = "" if self._kept.path is None else f" (remove {self._kept.path} if those were wrong)"
        raise WeightsDiffer(
            f"the engine's weights are not those that had state {state} before{where}: what they make of the "
            f"probe's prompt differs by {found:.3g} standard deviations, {most:.3g} may be noise"
        )

    def _keep(self, state: str, answer: tuple[float, ...]) -> None:
        if not all(map(math.isfinite, answer)):
            self._note("not_finite", state)
            return
        self._kept.keep(state, answer)
        self._note("kept", state)

    def _note(self, outcome: str, state: str, found: float | None = None) -> None:
        self._counts[outcome] += 1
        self._last = {
            "state": state, "outcome": outcome, "time": self._clock.time(),
            "difference": found if found is None or math.isfinite(found) else None,
            "tolerance": tolerance(self._noise),
        }  # fmt: skip

    async def _answer(self, seconds: float, signature: str | None) -> ProbeAnswer:
        found = await self._ask(seconds)
        if found is None or found.signature != signature:
            raise EngineError("the engine does not answer the probe as it did: it is looked at again")
        return found

    async def _ask(self, seconds: float) -> ProbeAnswer | None:
        try:
            async with asyncio.timeout(seconds):
                return await self._engine.probe()
        except TimeoutError:
            raise EngineError(f"the engine did not answer the probe in {seconds:g} s") from None
