"""One update on a live server, measured and checked: what it answers before, during and after, and the times.

The figures are from outside, except drain and pause, which only the server can tell apart.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field

from .ports import Clock
from .traffic import Json, Server, ServerError, Traffic, request

Prompt = list[int] | str

PROMPT_IDS = range(32, 127)

EXCLUDES = (
    "encoding and uploading the version",
    "starting a reference server, and its memory",
)


@dataclass(frozen=True)
class Output:
    """One greedy answer. ``start``, ``end``: versions of its first and last token; None if nobody said."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    start: int | None = None
    end: int | None = None

    @classmethod
    def of(cls, answer: Json) -> Output:
        """Raises ServerError if it has no tokens, or no log-probability for each."""
        meta = answer.get("meta_info") or {}
        ids, rows = answer.get("output_ids") or [], meta.get("output_token_logprobs") or []
        if not ids or len(rows) != len(ids):
            raise ServerError(f"an answer of {len(ids)} tokens has {len(rows)} log-probabilities")
        start, end = meta.get("weight_version_start"), meta.get("weight_version_end")
        return cls(tuple(ids), tuple(row[0] for row in rows), answer.get("text") or "", start, end)

    def same(self, other: Output) -> bool:
        """The same text, tokens and log-probabilities, to the last bit."""
        return (self.ids, self.logprobs, self.text) == (other.ids, other.logprobs, other.text)


@dataclass(frozen=True)
class Moved:
    """An update as it went. ``began`` and ``served`` are monotonic times, the rest seconds.

    ``began``: the version was there to be taken; ``served``: the first look at which it was served.
    ``pause``: admission was closed; ``copy``: the part of it in which weights changed. ``bytes`` were
    fetched, ``copied`` into the engine.
    """

    path: str
    version: str
    number: int
    began: float
    served: float
    drain: float
    pause: float
    copy: float | None = None
    fetch: float | None = None
    stage: float | None = None
    bytes: int | None = None
    tensors: int | None = None
    copied: int | None = None
    image: int | None = None
    same_state: bool = False
    excludes: tuple[str, ...] = ()

    @property
    def activated(self) -> float:
        """When draining began; up to here all was done while serving."""
        return max(self.began, self.served - self.pause - self.drain)


@dataclass(frozen=True)
class Check:
    what: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True)
class Settings:
    """``idle``: seconds of traffic before the update, ``tail``: after it.

    ``tokens`` are in each answer that is compared; ``load`` streams of ``load_tokens`` are the traffic. A
    staging of less than ``least`` seconds says nothing about throughput.
    """

    tokens: int = 16
    load: int = 4
    load_tokens: int = 64
    idle: float = 5.0
    tail: float = 1.0
    least: float = 0.5
    patience: float = 300.0


@dataclass
class Profile:
    """What ``stitch profile`` reports. Seconds, bytes, tokens a second; None: not known here."""

    moved: Moved
    before: list[Output]
    after: list[Output]
    traffic: Traffic
    idle_window: tuple[float, float]
    memory: dict[str, int | None]
    settings: Settings
    checks: list[Check] = field(default_factory=list)
    seed: int | None = None

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def row(self) -> Json:
        """One line of a table of update times."""
        m = self.moved
        idle, staging = self.traffic.rate(*self.idle_window), None
        if m.activated - m.began >= self.settings.least:
            staging = self.traffic.rate(m.began, m.activated)
        return {
            "path": m.path,
            "version": m.version,
            "preparation": m.activated - m.began,
            "pause": m.pause,
            "total": m.served - m.began,
            "fetch": m.fetch,
            "stage": m.stage,
            "drain": m.drain,
            "copy": m.copy,
            "silence": self.traffic.longest_silence(m.activated, m.served),
            "bytes": m.bytes,
            "tensors": m.tensors,
            "copied": m.copied,
            "memory": {**self.memory, "image": m.image},
            "throughput": {
                "idle": idle,
                "staging": staging,
                "ratio": staging / idle if staging is not None and idle else None,
                "step": self.traffic.step(*self.idle_window),
            },
            "requests": {"answers": len(self.traffic.answers), "refused": self.traffic.refused},
            "seed": self.seed,
            "checks": [asdict(check) for check in self.checks],
            "ok": self.ok,
            "excludes": [*EXCLUDES, *m.excludes],
        }


async def outputs(server: Server, prompts: Sequence[Prompt], tokens: int) -> list[Output]:
    """The greedy answers, one request at a time: a batch may be computed in another order of additions.

    Raises ServerError.
    """
    return [
        Output.of(await server.generate(request(prompt, tokens, return_logprob=True))) for prompt in prompts
    ]


async def profile(
    server: Server,
    move: Callable[[], Awaitable[Moved]],
    prompts: Sequence[Prompt],
    load_prompts: Sequence[list[int]],
    settings: Settings,
    clock: Clock,
    memory: Callable[[], int | None] = lambda: None,
) -> Profile:
    """Measure one update. ``move`` makes it happen and returns once it is served; ``memory``: resident bytes.

    No prompt of the traffic may begin as one of ``prompts`` does, so that all of these are computed anew.
    Raises ServerError, and what ``move`` raises.
    """
    before = await outputs(server, prompts, settings.tokens)
    traffic = Traffic(server, load_prompts, settings.load_tokens, clock)
    with_memory = _Peak(memory)
    traffic.start()
    try:
        await traffic.flows(settings.patience)
        began = clock.monotonic()
        await asyncio.sleep(settings.idle)
        idle_window = (began, clock.monotonic())
        watching = asyncio.ensure_future(with_memory.watch())
        try:
            moved = await move()
        finally:
            watching.cancel()
        await asyncio.sleep(settings.tail)
    finally:
        await traffic.stop(settings.patience)
    after = await outputs(server, prompts, settings.tokens)
    used = {"before": with_memory.before, "peak": with_memory.peak, "after": memory()}
    result = Profile(moved, before, after, traffic, idle_window, used, settings)
    result.checks += checks(result)
    return result


def checks(p: Profile) -> list[Check]:
    """What must be true of every update, whatever it took."""
    old, new = _versions(p.before), _versions(p.after)
    bounds = ("weight_version_start", "weight_version_end")
    said = {answer["meta_info"].get(bound) for answer in p.traffic.answers for bound in bounds}
    numbers = sorted(number for number in said if isinstance(number, int))
    low, high = min(old, default=0), max(new, default=p.moved.number)
    changed = sum(not one.same(two) for one, two in zip(p.before, p.after, strict=True))
    expected = "the state is the same, so must the output be" if p.moved.same_state else "output changed"
    failures = p.traffic.failures
    return [
        Check(
            "before: one version", len(old) <= 1 and p.moved.number not in old, f"versions {sorted(old)}"
        ),
        Check(
            "during: every request answered", not failures and bool(p.traffic.answers),
            failures[0] if failures else f"{len(p.traffic.answers)} answers",
        ),
        Check(
            "during: only versions from the old to the new",
            len(numbers) == len(said) and all(low <= number <= high for number in numbers),
            f"versions {numbers}",
        ),
        Check("after: the new version", new == {p.moved.number}, f"versions {sorted(new)}"),
        Check(
            expected, changed == 0 if p.moved.same_state else changed > 0,
            f"{changed} of {len(p.before)} differ",
        ),
    ]  # fmt: skip


def equals_reference(after: Sequence[Output], fresh: Sequence[Output]) -> Check:
    """Whether the live server now answers as a fresh one that booted from the target's checkpoint."""
    differ = [index for index, (one, two) in enumerate(zip(after, fresh, strict=True)) if not one.same(two)]
    detail = f"{len(fresh)} answers, text, tokens and log-probabilities"
    if differ:
        one, two = after[differ[0]], fresh[differ[0]]
        what = (
            "tokens"
            if one.ids != two.ids
            else "log-probabilities"
            if one.logprobs != two.logprobs
            else "text"
        )
        detail = f"{len(differ)} of {len(fresh)} differ; prompt {differ[0]} in its {what}"
    return Check("after: equal to a fresh server", not differ, detail)


def _versions(answers: Sequence[Output]) -> set[int]:
    """All that were said; an answer without is of no version."""
    return {side if isinstance(side, int) else -1 for one in answers for side in (one.start, one.end)}


class _Peak:
    """Looks at a server's memory now and then: it costs the machine a little, so not often."""

    SECONDS = 0.5

    def __init__(self, memory: Callable[[], int | None]) -> None:
        self._memory = memory
        self.before = self.peak = memory()

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(self.SECONDS)
            now = await asyncio.to_thread(self._memory)
            self.peak = max((one for one in (self.peak, now) if one is not None), default=None)


def prompts_of(count: int, load: int, seed: int, length: int = 8) -> tuple[list[Prompt], list[list[int]]]:
    """``count`` prompts to compare and ``load`` for traffic, of token ids that every vocabulary of 128 has.

    Each begins with an id of its own, so that no cache of prefixes joins two. Raises ValueError for too many.
    """
    if count + load > len(PROMPT_IDS):
        raise ValueError(f"at most {len(PROMPT_IDS)} prompts, those of the traffic included")
    rng = random.Random(seed)
    heads = rng.sample(PROMPT_IDS, count + load)
    rows = [[head, *rng.choices(PROMPT_IDS, k=length - 1)] for head in heads]
    return list(rows[:count]), rows[count:]
