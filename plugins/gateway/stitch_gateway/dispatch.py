"""Holds a request until a replica can serve it, and tries others where one could not."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from stitch_core.request_ids import Abort
from stitch_core.requests import Refused
from stitch_core.versions import Refusal, VersionConstraint, gone, not_ready, unavailable

from .aborted import aborted_answer
from .attempt import Again, Attempt
from .call import Call
from .consumers import Scope
from .fleet import Fleet
from .routing import Replica, choose, gone_for_good, most
from .waiting import Waiting


class _GivenUp(Exception):
    """The request was aborted while nothing ran for it."""


@dataclass
class Dispatcher:
    """``hold``: seconds that a request may wait in all; ``attempts``: replicas that may fail under it.

    ``spread``: one that was held waits for further replicas of its version, where the first would get more
    than their share, until none has come for so many seconds: replicas look at the store that often.
    ``pause``: seconds for which a request avoids a replica that has just refused it. ``on_acquired`` is told
    the seconds that a request waited for a replica, ``on_held`` what it demands, once it has to wait.
    """

    fleet: Fleet
    attempt: Attempt
    rng: random.Random
    hold: float = 50.0
    attempts: int = 5
    pause: float = 0.25
    spread: float = 5.0
    calls: set[Call] = field(default_factory=set)
    held: set[Call] = field(default_factory=set)
    counters: Counter[str] = field(default_factory=Counter)
    waiting: Waiting = field(default_factory=Waiting)
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

    def abort(self, abort: Abort) -> int:
        """Give up what is held of the requests that ``abort`` means; how many."""
        hit = [call for call in self.held if call.meant_by(abort)]
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
        began, patient, was_held = _now(), True, False
        spread: float | None = None  # not None: there is a replica, and the request waits for its share
        try:
            while True:
                if call.aborted.is_set():
                    raise _GivenUp
                now = _now()
                if now >= call.deadline and spread is None:
                    raise Refused(self._too_late(call))
                avoid = {replica for replica, until in avoided.items() if until > now}
                replica = choose(
                    self.fleet.replicas, call.constraint, self.rng, avoid,
                    key=call.key, sequences=call.sequences,
                )  # fmt: skip
                if replica is None:
                    if gone_for_good(call.constraint, self.fleet.replicas):
                        raise Refused(_gone(call.constraint))
                    self.on_held(call.constraint)
                    was_held, spread = True, None
                    until = min([call.deadline, *(avoided[replica] for replica in avoid)])
                elif was_held and patient and now < call.deadline and self._crowded(replica, call):
                    until, spread = call.deadline, self.spread
                else:
                    replica.in_flight += 1
                    replica.sequences += call.sequences
                    self.on_acquired(now - began)
                    return replica
                patient &= await self.waiting.wait(call.constraint, call.sequences, until, spread)
        finally:
            self.held.discard(call)

    def _crowded(self, replica: Replica, call: Call) -> bool:
        bound = most(self.fleet.replicas, call.constraint, len(self.held))
        return replica.load + call.sequences > bound

    def _changed(self, replica: Replica | None) -> None:
        self.waiting.changed(replica, self.fleet.replicas, len(self.held), self.spread)

    def _too_late(self, call: Call) -> Refusal:
        replicas = self.fleet.replicas
        if not any(replica.alive for replica in replicas):
            reasons = "; ".join(f"{replica.id}: {replica.error}" for replica in replicas[:3])
            return unavailable(f"no replica answers ({reasons or 'none is known'})", retry="here")
        if not call.constraint:
            return unavailable("no replica is ready", retry="here")
        demands = call.constraint.fields()
        served = sorted({str(replica.serving) for replica in replicas if replica.serving})
        return not_ready(
            f"no replica serves {demands} after {self.hold:g} s; now: {', '.join(served) or 'nothing'}",
            demands=demands,
        )


def _gone(constraint: VersionConstraint) -> Refusal:
    return gone(f"every replica has passed version {constraint.exact_version}", demands=constraint.fields())


def _now() -> float:
    return asyncio.get_running_loop().time()
