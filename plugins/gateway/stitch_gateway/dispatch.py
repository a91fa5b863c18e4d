"""Holds a request until a replica can serve it, and tries others where one could not."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from aiohttp import web

from stitch_core.requests import Refused
from stitch_core.versions import Refusal, VersionConstraint, gone, not_ready, unavailable

from .aborted import aborted_answer
from .attempt import Again, Attempt
from .call import Call
from .consumers import Scope
from .fleet import Fleet
from .routing import Replica, choose, crowded, eligible


class _GivenUp(Exception):
    """The request was aborted while nothing ran for it."""


@dataclass
class Dispatcher:
    """``hold``: seconds that a request may wait in all; ``attempts``: replicas that may fail under it.

    ``spread``: seconds for which one that was held waits for further replicas of its version, where the first
    would get more than their share. ``pause``: seconds for which a request avoids a replica that has just
    refused it. ``on_acquired`` is told the seconds that a request waited for a replica, ``on_held`` what it
    demands, once it has to wait.
    """

    fleet: Fleet
    attempt: Attempt
    rng: random.Random
    hold: float = 50.0
    attempts: int = 5
    pause: float = 0.25
    spread: float = 2.0
    calls: set[Call] = field(default_factory=set)
    held: set[Call] = field(default_factory=set)
    counters: Counter[str] = field(default_factory=Counter)
    waiting: dict[VersionConstraint, set[asyncio.Future[None]]] = field(default_factory=dict)
    on_acquired: Callable[[float], None] = lambda _: None
    on_held: Callable[[VersionConstraint], None] = lambda _: None

    def __post_init__(self) -> None:
        self.fleet.on_change = self._changed

    async def run(self, request: web.Request, call: Call) -> web.StreamResponse:
        """The answer of the first replica that gives one. Raises Refused."""
        self.counters["requests"] += 1
        self.calls.add(call)
        try:
            return await self._run(request, call)
        except _GivenUp:
            if call.with_scope:
                return aborted_answer(call, self.fleet.replicas)
            raise Refused(Refusal(409, "RequestAborted", "the request was aborted", "never")) from None
        finally:
            self.calls.discard(call)

    async def _run(self, request: web.Request, call: Call) -> web.StreamResponse:
        avoided: dict[Replica, float] = {}
        failures = 0
        while True:
            call.replica = replica = await self._acquire(call, avoided)
            try:
                result = await self.attempt.run(request, call, replica)
            finally:
                replica.in_flight -= 1
                replica.sequences -= call.sequences
                call.replica = None
            if not isinstance(result, Again):
                return result
            if not result.repeat:
                message = (
                    f"{result.reason}; what became of the request is unknown, and it may not be repeated"
                )
                raise Refused(unavailable(message, retry="never"))
            avoided[replica] = _now() + self.pause
            self.counters["failures" if result.failure else "refusals"] += 1
            failures += result.failure
            if failures >= self.attempts:
                raise Refused(unavailable(f"{failures} replicas failed, the last one with: {result.reason}"))

    def abort(self, prefix: str) -> int:
        """Give up what is held under ids that start with ``prefix``; how many."""
        hit = [c for c in self.held if any(own.startswith(prefix) for own in (*c.ids, *c.engine_ids))]
        for call in hit:
            call.aborted.set()
        self._changed(None)
        return len(hit)

    def of(self, scope: Scope | None) -> set[Call]:
        """The requests of one consumer that are held or in flight."""
        return {call for call in self.calls if call.scope == scope}

    def abort_scope(self, scope: Scope) -> set[Call]:
        """Give up all requests of one consumer: no replica begins one of these any more. Returns them."""
        hit = self.of(scope)
        for call in hit:
            call.with_scope = True
            call.aborted.set()
        self._changed(None)
        return hit

    async def _acquire(self, call: Call, avoided: dict[Replica, float]) -> Replica:
        """Wait for a replica and count the request as running there."""
        self.held.add(call)
        began, patient, was_held = _now(), float("inf"), False
        try:
            while True:
                if call.aborted.is_set():
                    raise _GivenUp
                now = _now()
                if now >= call.deadline:
                    raise Refused(self._too_late(call))
                avoid = {replica for replica, until in avoided.items() if until > now}
                replica = choose(
                    self.fleet.replicas, call.constraint, self.rng, avoid,
                    key=call.key, sequences=call.sequences,
                )  # fmt: skip
                if replica is None:
                    self.on_held(call.constraint)
                    was_held = True
                    until = min([call.deadline, *(avoided[replica] for replica in avoid)])
                elif was_held and now < patient and self._crowded(replica, call):
                    patient = min(patient, now + self.spread)
                    until = min(call.deadline, patient)
                else:
                    replica.in_flight += 1
                    replica.sequences += call.sequences
                    self.on_acquired(now - began)
                    return replica
                await self._wait(call.constraint, until)
        finally:
            self.held.discard(call)

    def _crowded(self, replica: Replica, call: Call) -> bool:
        return crowded(replica, self.fleet.replicas, call.constraint, len(self.held), call.sequences)

    async def _wait(self, constraint: VersionConstraint, until: float) -> None:
        """Until a replica that changed may take the request, or something was aborted, or it is time."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        group = self.waiting.setdefault(constraint, set())
        group.add(waiter)
        try:
            async with asyncio.timeout_at(until):
                await waiter
        except TimeoutError:
            pass
        finally:
            group.discard(waiter)
            if not group:
                self.waiting.pop(constraint, None)

    def _changed(self, replica: Replica | None) -> None:
        """Wake whom the change may concern: all who wait cost too much where thousands do."""
        for constraint, group in self.waiting.items():
            if replica is None or eligible(replica, constraint):
                for waiter in group:
                    if not waiter.done():
                        waiter.set_result(None)

    def _too_late(self, call: Call) -> Refusal:
        replicas = self.fleet.replicas
        if not any(replica.alive for replica in replicas):
            reasons = "; ".join(f"{replica.id}: {replica.error}" for replica in replicas[:3])
            return unavailable(f"no replica answers ({reasons or 'none is known'})", retry="here")
        if not call.constraint:
            return unavailable("no replica is ready", retry="here")
        if _passed_by_all(call.constraint, replicas):
            return gone(f"every replica has passed version {call.constraint.exact_version}")
        demands = call.constraint.fields()
        served = sorted({str(replica.serving) for replica in replicas if replica.serving})
        return not_ready(
            f"no replica serves {demands} after {self.hold:g} s; now: {', '.join(served) or 'nothing'}",
            demands=demands,
        )


def _passed_by_all(constraint: VersionConstraint, replicas: Sequence[Replica]) -> bool:
    """Nobody serves the exact version and nobody will, as far as replicas that all answer can say."""
    exact, served = constraint.exact_version, [r.serving for r in replicas if r.alive and r.serving]
    if exact is None or len(served) < len(replicas) or len({version.run for version in served}) != 1:
        return False
    return constraint.run in (None, served[0].run) and all(version.number > exact for version in served)


def _now() -> float:
    return asyncio.get_running_loop().time()
