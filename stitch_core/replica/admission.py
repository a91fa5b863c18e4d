"""The admission gate: which requests may run now, and under which version they were let in.

The gate decides and counts; it does no I/O and knows no engine. It is owned by one event loop: the
middleware admits and releases, the reconciler closes, drains and opens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..ports import Clock
from ..versions import (
    PolicyVersion,
    Refusal,
    VersionConstraint,
    elsewhere,
    judge,
    malformed,
    not_ready,
    unavailable,
)

REMEMBERED_RUNS = 64


@dataclass(eq=False)
class Ticket:
    """One admitted request. ``revoked`` is set when the gate gives it up: then no success may be answered."""

    request_id: str
    constraint: VersionConstraint
    admitted: PolicyVersion
    revoked: Refusal | None = None
    on_revoke: Callable[[], None] | None = field(default=None, repr=False)

    @property
    def pinned(self) -> bool:
        return self.constraint.exact_version is not None


class Gate:
    """Admits requests while a version is served; ``serving`` is None until the replica has caught up."""

    def __init__(
        self, clock: Clock, *, hold: float = 10.0, on_refused: Callable[[], None] = lambda: None
    ) -> None:
        """``hold``: seconds that a request waits in a short pause before it is refused."""
        self.serving: PolicyVersion | None = None
        self.failed: str | None = None
        self.on_refused = on_refused
        self._clock = clock
        self._hold = hold
        self._open = asyncio.Event()
        self._may_answer = asyncio.Event()
        self._may_answer.set()
        self._leaving = False
        self._stopping = False
        self._why_closed = "this replica is booting"
        self._tickets: dict[Ticket, None] = {}  # in the order of admission
        self._answering: set[Ticket] = set()
        self._changed = asyncio.Event()
        self._runs: list[str] = []
        self._channel_run: str | None = None
        self._channel_read_at = float("-inf")
        self._asked_runs: dict[str, float] = {}

    # -------------------------------------------------------------------------------- middleware's side

    @property
    def active(self) -> int:
        """Requests that the engine runs."""
        return len(self._tickets)

    @property
    def running(self) -> list[Ticket]:
        """They themselves, in the order of admission."""
        return list(self._tickets)

    @property
    def ready(self) -> bool:
        """Whether an unconstrained request would be admitted now."""
        return self._open.is_set() and self.failed is None and not self._stopping

    @property
    def why_closed(self) -> str | None:
        """One sentence, or None while ready."""
        if self.ready:
            return None
        return self.failed or ("this replica is shutting down" if self._stopping else self._why_closed)

    async def admit(self, constraint: VersionConstraint, request_id: str) -> Ticket | Refusal:
        """Admit now, wait out a short pause, or refuse. Every Ticket must be released."""
        refusal = await self._pass(constraint)
        if refusal is not None:
            self.on_refused()
            return refusal
        assert self.serving is not None
        ticket = Ticket(request_id, constraint, self.serving)
        self._tickets[ticket] = None
        return ticket

    def release(self, ticket: Ticket, *, answering: bool = False) -> None:
        """The request has ended, however; ``answering``: for the engine, its client has not read all yet."""
        self._tickets.pop(ticket, None)
        if answering:
            self._answering.add(ticket)
        else:
            self._answering.discard(ticket)
        self._notify()

    @property
    def holds_answers(self) -> bool:
        """Whether nothing is sent now: weights that came back are being compared with what they were."""
        return not self._may_answer.is_set()

    async def answering(self) -> None:
        """Return once answers may go out: not while weights that came back are being compared."""
        await self._may_answer.wait()

    async def _pass(self, constraint: VersionConstraint) -> Refusal | None:
        deadline = self._clock.monotonic() + self._hold
        while True:
            if self.failed or self._stopping:
                return unavailable(self.why_closed or "")
            refusal = self._judge(constraint)
            # In the middle of an activation "not ready" is about to change.
            if self._open.is_set() or (refusal is not None and refusal.retry != "here"):
                return refusal
            left = deadline - self._clock.monotonic()
            # Before the first version is served nobody knows how long it takes: others should try elsewhere.
            if self.serving is None or left <= 0:
                return refusal or unavailable(self._why_closed)
            await self._change(left)

    def _judge(self, constraint: VersionConstraint) -> Refusal | None:
        serving = self.serving
        if constraint.run is not None and (serving is None or constraint.run != serving.run):
            return self._judge_other_run(constraint.run)
        if serving is None:
            return None
        numbered = constraint.min_version is not None or constraint.exact_version is not None
        if numbered and constraint.run is None and len(self._runs) > 1:
            return malformed(
                f"a version number without a run is ambiguous: this replica has served "
                f"{', '.join(self._runs)}; "
                "name the run in weight_version.run or X-Stitch-Run"
            )
        if self._leaving and constraint.exact_version == serving.number:
            return elsewhere(
                f"this replica is leaving version {serving.number}",
                target_version=serving.number, run=serving.run, applied=serving.number,
            )  # fmt: skip
        return judge(constraint, serving)

    def _judge_other_run(self, run: str) -> Refusal:
        served = None if self.serving is None else self.serving.run
        details: dict[str, Any] = {"target_run": run, "run": served}
        if run == self._channel_run:
            return not_ready(f"this replica is on its way to run {run}", **details)
        now = self._clock.monotonic()
        asked = self._asked_runs.setdefault(run, now)
        if len(self._asked_runs) > REMEMBERED_RUNS:
            del self._asked_runs[next(iter(self._asked_runs))]
        # Only a look at the channel that began after the run was asked for can say that no switch is coming.
        if self._channel_read_at <= asked:
            return not_ready(f"this replica has not heard of run {run} yet", **details)
        return elsewhere(f"this replica follows run {self._channel_run}, not {run}", **details)

    # --------------------------------------------------------------------------------- reconciler's side

    def saw_channel(self, run: str, read_at: float) -> None:
        """The channel named ``run`` in a read that began at monotonic time ``read_at``."""
        self._channel_run, self._channel_read_at = run, read_at
        self._asked_runs.pop(run, None)
        self._notify()

    def leave_version(self) -> None:
        """Refuse new exact pins on the served version from now on; the rest flows."""
        self._leaving = True

    def close(self, why: str, *, hold_answers: bool = False) -> None:
        """Admit nobody until ``open``; requests wait up to ``hold``.

        ``hold_answers``: until then nothing is sent of what runs, and what is revoked meanwhile never is.
        """
        self._why_closed = why
        self._open.clear()
        if hold_answers:
            self._may_answer.clear()

    def open(self, version: PolicyVersion) -> None:
        """Serve ``version`` from now on."""
        self.serving = version
        if version.run not in self._runs:
            self._runs.append(version.run)
        self._leaving = False
        self._open.set()
        self._may_answer.set()
        self._notify()

    def forget(self, why: str) -> None:
        """The engine's weights are not those of the served version: admit nobody, give up what runs."""
        self.close(why)
        self.serving = None
        for ticket in self._tickets:
            _revoke(ticket, unavailable(why))
        self._may_answer.set()
        self._notify()

    def fail(self, why: str) -> None:
        """Terminal: refuse all from now on, give up what runs."""
        self.failed = why
        self.forget(why)

    def stop(self) -> None:
        """Leave rotation: admit nobody any more, let run what runs."""
        self._stopping = True
        self._notify()

    async def drain(self, deadline: float, *, pins_only: bool) -> list[Ticket]:
        """Wait until (pinned) requests are gone or monotonic ``deadline``; those that are left are revoked.

        The caller aborts what is returned in the engine; a revoked request can no longer succeed.
        """
        while left := [t for t in self._tickets if (t.pinned or not pins_only) and t.revoked is None]:
            remaining = deadline - self._clock.monotonic()
            if remaining <= 0:
                for ticket in left:
                    _revoke(ticket, elsewhere(
                        f"the request outlived the drain deadline of {ticket.admitted}",
                        run=ticket.admitted.run, applied=ticket.admitted.number,
                    ))  # fmt: skip
                return left
            await self._change(remaining)
        return []

    async def empty(self, deadline: float) -> None:
        """As ``drain`` of all requests, and then until clients have read their answers, or ``deadline``."""
        await self.drain(deadline, pins_only=False)
        while self._answering and (remaining := deadline - self._clock.monotonic()) > 0:
            await self._change(remaining)

    async def wait_gone(self, tickets: list[Ticket], seconds: float) -> bool:
        """Whether all of ``tickets`` were released within ``seconds``."""
        deadline = self._clock.monotonic() + seconds
        while any(ticket in self._tickets for ticket in tickets):
            remaining = deadline - self._clock.monotonic()
            if remaining <= 0:
                return False
            await self._change(remaining)
        return True

    def _notify(self) -> None:
        self._changed.set()

    async def _change(self, seconds: float) -> None:
        """Wait for the next notice, so long at most; no await may stand between a look and this."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()


def _revoke(ticket: Ticket, refusal: Refusal) -> None:
    if ticket.revoked is None:
        ticket.revoked = refusal
        if ticket.on_revoke is not None:
            ticket.on_revoke()
