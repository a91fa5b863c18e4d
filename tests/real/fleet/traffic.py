"""Clients of a fleet, what became of each request, and the proof of what was answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import zstandard

from stitch_embedded.proof import ProofReport, prove

from .processes import MAX_LEN, PATIENCE, Fleet

REPORT = ("weight_versions", "kv_versions", "kv_passes", "kv")


@dataclass
class Outcome:
    """One request: ``answers``, or the ``error`` in two words. ``begun``: part of a stream had arrived.

    ``sent`` and ``ended`` are of the monotonic clock.
    """

    prompt: list[int]
    tokens: int
    demand: dict[str, Any]
    stream: bool
    sent: float
    ended: float = 0.0
    status: int = 0
    replica: str = ""
    begun: bool = False
    answers: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.error is None

    def check(self) -> None:
        """A success is whole and is what was asked for."""
        for answer in self.answers:
            meta = answer["meta_info"]
            assert meta["finish_reason"]["type"] == "length", meta
            assert len(answer["output_ids"]) == self.tokens
            versions = [span["version"] for span in meta["weight_versions"]]
            assert versions == sorted(versions)
            assert min(versions) >= self.demand.get("min_version", 0), (self.demand, meta)
            assert self.demand.get("exact_version") in (None, versions[0])
            assert self.demand.get("exact_version") is None or len(versions) == 1
            assert self.demand.get("run") in (None, meta["run"])


async def ask(
    url: str, rng: random.Random, *, demand: dict[str, Any] | None = None, stream: bool = False, n: int = 1,
    tokens: int = 16, patience: float = PATIENCE,
) -> Outcome:  # fmt: skip
    """One request on a connection of its own. Fails the test if it has no end at all."""
    prompt = [rng.randrange(3, 37) for _ in range(rng.randrange(3, 9))]
    outcome = Outcome(prompt, tokens, demand or {}, stream, time.monotonic())
    body: dict[str, Any] = {
        "input_ids": prompt,
        "sampling_params": {"n": n, "max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True,
        "stream": stream,
        "weight_version": outcome.demand,
    }
    try:
        async with (
            asyncio.timeout(patience),
            aiohttp.ClientSession() as session,
            session.post(f"{url}/generate", json=body) as answer,
        ):
            outcome.status, outcome.replica = answer.status, answer.headers.get("X-Stitch-Replica", "")
            if answer.status == 200 and stream:
                await _read_stream(answer, outcome, n)
            else:
                _read_whole(await answer.read(), outcome)
    except (aiohttp.ClientError, ConnectionError) as error:
        outcome.error = f"connection {type(error).__name__}"
    except TimeoutError:
        raise AssertionError(f"no end after {patience:g} s: {outcome}") from None
    outcome.ended = time.monotonic()
    if outcome.ok:
        outcome.check()
    return outcome


def _read_whole(data: bytes, outcome: Outcome) -> None:
    value = json.loads(data)
    if outcome.status == 200:
        outcome.answers = value if isinstance(value, list) else [value]
    else:
        _read_error(value, outcome, str(outcome.status))


async def _read_stream(answer: aiohttp.ClientResponse, outcome: Outcome, n: int) -> None:
    done = False
    async for line in answer.content:
        if not line.startswith(b"data: "):
            assert not line.strip(), line
        elif line.strip() == b"data: [DONE]":
            done = True
        else:
            outcome.begun = True
            value = json.loads(line[6:])
            if "error" in value:
                _read_error(value, outcome, "event")
            elif value["meta_info"]["finish_reason"] is not None:
                outcome.answers.append(value)
    # A stream without its end was cut: an error that is clear only when the peer died.
    if outcome.ok and not (done and len(outcome.answers) == n):
        outcome.error = "connection cut"


def _read_error(value: Any, outcome: Outcome, where: str) -> None:
    error = value["error"]
    assert error["message"], error
    assert isinstance(error["retryable"], bool), error
    assert error["retry"] in ("here", "elsewhere", "never"), error
    outcome.error, outcome.detail = f"{where} {error['type']}", error


class Traffic:
    """Requests of every kind until it is left; then those that run may end. ``outcomes`` has them all."""

    def __init__(
        self,
        url: str,
        demand: Callable[[random.Random], dict[str, Any]],
        *,
        seed: int = 0,
        clients: int = 8,
        tokens: tuple[int, int] = (8, 40),
    ) -> None:
        """``demand`` makes the ``weight_version`` of each request."""
        self.outcomes: list[Outcome] = []
        self.url = url
        self._demand, self._seed, self._clients, self._tokens = demand, seed, clients, tokens
        self._stop = asyncio.Event()

    async def __aenter__(self) -> Traffic:
        self._workers = [asyncio.create_task(self._work(number)) for number in range(self._clients)]
        return self

    async def __aexit__(self, *failure: object) -> None:
        self._stop.set()
        if failure[0] is not None:
            for worker in self._workers:
                worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=failure[0] is not None)

    async def more(self, count: int) -> None:
        """Wait for this many more successes."""
        wanted = sum(o.ok for o in self.outcomes) + count
        end = time.monotonic() + PATIENCE
        while sum(o.ok for o in self.outcomes) < wanted:
            for worker in self._workers:
                if worker.done():
                    worker.result()
            assert time.monotonic() < end, [o.error for o in self.outcomes[-20:]]
            await asyncio.sleep(0.05)

    async def _work(self, number: int) -> None:
        rng = random.Random(1000 * self._seed + number)
        while not self._stop.is_set():
            outcome = await ask(
                self.url, rng, demand=self._demand(rng), stream=rng.random() < 0.5,
                n=rng.choice((1, 1, 3)), tokens=rng.randint(*self._tokens),
            )  # fmt: skip
            self.outcomes.append(outcome)
            if not outcome.ok:
                await asyncio.sleep(0.1)


def failures(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if not outcome.ok]


async def proven(fleet: Fleet, run: str, outcomes: Iterable[Outcome]) -> ProofReport:
    """Every answer of the run, recomputed from the store alone; fails unless all are right to the bit."""
    return await asyncio.to_thread(_prove, fleet, run, list(outcomes))


def _prove(fleet: Fleet, run: str, outcomes: list[Outcome]) -> ProofReport:
    directory = fleet.root / f"proof-{time.monotonic_ns()}"
    directory.mkdir()
    (directory / "run.json").write_text(json.dumps({
        "store": fleet.store_url, "run": run, "boot": "../boot", "max_len": MAX_LEN, "min_spanning": 0,
    }))  # fmt: skip
    lines = [json.dumps(line) for outcome in outcomes for line in _lines(fleet, run, outcome)]
    compressed = zstandard.compress("".join(f"{line}\n" for line in lines).encode())
    (directory / "trajectories.jsonl.zst").write_bytes(compressed)
    report = prove(directory, processes=1)
    assert not report.problems(), (report.problems(), report.failures)
    assert report.proven == len(lines) > 0
    return report


def _lines(fleet: Fleet, run: str, outcome: Outcome) -> list[dict[str, Any]]:
    return [
        {
            "id": answer["meta_info"]["id"],
            "run": run,
            "kv_mode": fleet.kv_modes[outcome.replica],
            "prompt_ids": outcome.prompt,
            "output_ids": answer["output_ids"],
            "logprobs": [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]],
            **{name: answer["meta_info"][name] for name in REPORT if name in answer["meta_info"]},
        }
        for answer in outcome.answers
        if outcome.ok and answer["meta_info"]["run"] == run
    ]


@contextlib.asynccontextmanager
async def stored_away(fleet: Fleet, target: Path) -> AsyncIterator[None]:
    """The store is not where it was; in the end it is again."""
    fleet.point_store(target)
    try:
        yield
    finally:
        fleet.point_store(fleet.root / "real-store")
