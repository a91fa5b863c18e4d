"""What goes wrong in one simulated world, and when: a plan drawn from a seed, and the dice that carry it out.

A plan switches most kinds of fault off and draws the rates of the rest. That finds more than all faults at
once, under which nothing gets far enough to break.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Literal

Moment = Literal["before", "partial", "after"]


@dataclass(frozen=True)
class Outage:
    """From ``start`` to ``end`` (virtual seconds) the store does not answer ``who``; everybody if None."""

    start: float
    end: float
    who: str | None = None


@dataclass(frozen=True)
class Lack:
    """From ``start`` to ``end`` (virtual seconds) the store refuses what ``host`` (None: anybody) writes.

    ``what``: "create", as on a mount that has lost its hard links, or "write", as on one that is read-only.
    """

    start: float
    end: float
    host: str | None = None
    what: Literal["create", "write"] = "write"


@dataclass(frozen=True)
class FaultPlan:
    """Rates are probabilities for one operation; ``*_every`` are mean seconds between events, 0 for never.

    After ``quiet_after`` seconds nothing new goes wrong; a write that was late by then may still land,
    ``late`` seconds after at most.
    """

    quiet_after: float = float("inf")

    latency: float = 0.02
    """Mean seconds on the way to the store, and as much back."""
    near: float = 0.01
    """Mean seconds on the way to a replica or to an engine."""
    slow: float = 0.0
    """Calls that take up to 50 times as long."""
    timeout: float = 20.0
    """Seconds that a caller waits at most for an answer that does not come."""

    store_lost: float = 0.0
    """The call never arrives."""
    store_unknown: float = 0.0
    """It arrives, the answer does not."""
    store_late: float = 0.0
    """A write arrives up to ``late`` seconds after the caller was told that it failed."""
    store_twice: float = 0.0
    """A write is delivered a second time, up to ``late`` seconds later."""
    store_bad_read: float = 0.0
    """A read of a file in the store answers other bytes: one bit flipped, the end missing, or zeros."""
    late: float = 60.0
    outages: tuple[Outage, ...] = ()
    lacks: tuple[Lack, ...] = ()

    crash: float = 0.0
    """A process dies at a change to a file: before, in the middle of, or after it."""
    host_crash: float = 0.0
    """Of the deaths of processes, those that take the machine along."""
    disk_full: float = 0.0
    """A write to a file fails with ENOSPC, some of it written."""

    kill_every: float = 0.0
    """One process is killed at any await."""
    stall_every: float = 0.0
    """One process stands still for ``stall`` seconds at most."""
    stall: float = 120.0
    clock_skew: float = 0.0
    """Wall clocks differ by up to so many seconds."""

    engine_silent: float = 0.0
    """A call to the engine gets no answer; it may have been carried out."""
    engine_refuses: float = 0.0
    """The engine refuses to prepare, pause, activate or resume, and is as it was."""
    engine_uncertain: float = 0.0
    """An activation stops somewhere in the middle."""
    engine_restart_every: float = 0.0
    """The engine process dies and comes back with its boot weights."""
    engine_other_weights: float = 0.0
    """An engine that starts loads other weights than the boot checkpoint's: from elsewhere, or because that
    is exchanged for a while."""
    engine_dies: float = 0.0
    """It does so within a second of a call that is to change it."""
    caller_dies: float = 0.0
    """The process that called the engine dies within a second of such a call."""
    engine_lies: float = 0.0
    """The engine says that it has activated, and has not copied all; or boots with one tensor wrong."""

    @classmethod
    def draw(cls, random: Random, quiet_after: float, names: Sequence[str] = ()) -> FaultPlan:
        """A random plan: each kind of fault is in it with one chance in three. ``names`` may be cut off."""

        def rate(most: float) -> float:
            return most * random.random() ** 2 if random.random() < 0.35 else 0.0

        def every(least: float, most: float) -> float:
            return random.uniform(least, most) if random.random() < 0.35 else 0.0

        def outage() -> Outage:
            start = random.uniform(0, quiet_after)
            who = random.choice([None, *names])
            return Outage(start, min(quiet_after, start + random.uniform(1, 300)), who)

        def lack() -> Lack:
            start = random.uniform(0, quiet_after)
            host = random.choice([None, *(name.partition("#")[0] for name in names)])
            end = min(quiet_after, start + random.uniform(1, 300))
            return Lack(start, end, host, random.choice(("create", "write")))

        return cls(
            quiet_after=quiet_after,
            latency=random.choice([0.001, 0.02, 0.2, 1.0]),
            near=random.choice([0.001, 0.05, 0.5]),
            slow=rate(0.2),
            timeout=random.choice([2.0, 20.0, 90.0]),
            store_lost=rate(0.3),
            store_unknown=rate(0.3),
            store_late=rate(0.3),
            store_twice=rate(0.3),
            late=random.choice([5.0, 60.0, 240.0]),
            outages=tuple(outage() for _ in range(random.choice([0, 0, 1, 3]))),
            crash=rate(0.02),
            host_crash=rate(1.0),
            disk_full=rate(0.05),
            kill_every=every(20, 300),
            stall_every=every(20, 300),
            stall=random.choice([10.0, 120.0]),
            clock_skew=random.choice([0.0, 1.0, 200_000.0]),
            engine_silent=rate(0.2),
            engine_refuses=rate(0.2),
            engine_uncertain=rate(0.1),
            engine_restart_every=every(30, 300),
            engine_dies=rate(0.2),
            caller_dies=rate(0.2),
            store_bad_read=rate(0.3),
            engine_other_weights=rate(1.0),
            lacks=tuple(lack() for _ in range(random.choice([0, 0, 0, 2]))),
            engine_lies=rate(0.3) if random.random() < 0.3 else 0.0,
        )

    def __str__(self) -> str:
        """What differs from a world without faults."""
        quiet = FaultPlan()
        changed = {f.name: getattr(self, f.name) for f in fields(self)}
        return ", ".join(f"{k}={v!r}" for k, v in changed.items() if v != getattr(quiet, k))


class Trace:
    """The last ``limit`` things that happened, to be read by a person after a failure."""

    def __init__(self, time: Callable[[], float], limit: int = 2000) -> None:
        self._time = time
        self._lines: deque[tuple[float, str]] = deque(maxlen=limit)

    def add(self, text: str) -> None:
        self._lines.append((self._time(), text))

    def lines(self) -> list[str]:
        return [f"{time:10.3f} {text}" for time, text in self._lines]


class Faults:
    """Throws the dice of a plan. Everything that may go wrong asks here, so that one seed replays it all.

    While not ``armed`` nothing goes wrong: for preparations.
    """

    def __init__(self, plan: FaultPlan, random: Random, time: Callable[[], float]) -> None:
        self.plan = plan
        self.random = random
        self.trace = Trace(time)
        self.armed = True
        self._time = time

    @property
    def quiet(self) -> bool:
        """Whether nothing new goes wrong any more."""
        return self._time() >= self.plan.quiet_after

    def hit(self, rate: float) -> bool:
        """Whether a fault of this rate happens now."""
        return rate > 0.0 and self.armed and not self.quiet and self.random.random() < rate

    def latency(self) -> float:
        """Seconds for one way to the store."""
        return self._travel(self.plan.latency)

    def near(self) -> float:
        """Seconds for one way to a replica or an engine."""
        return self._travel(self.plan.near)

    def _travel(self, mean: float) -> float:
        seconds = self.random.expovariate(1.0 / mean)
        if self.hit(self.plan.slow):
            seconds *= 50 * self.random.random()
        return seconds

    def cut_off(self, who: str) -> bool:
        """Whether the store cannot be reached by ``who`` now."""
        now = self._time()
        return any(o.start <= now < o.end and o.who in (None, who) for o in self.plan.outages)

    def as_read(self, data: bytes) -> bytes:
        """What a read of ``data`` answers; the next read is another one."""
        if not data or not self.hit(self.plan.store_bad_read):
            return data
        at = self.random.randrange(len(data))
        flipped = bytes([data[at] ^ 1 << self.random.randrange(8)])
        return self.random.choice((data[:at] + flipped + data[at + 1 :], data[:at], bytes(len(data))))

    def refused(self, who: str, what: str) -> bool:
        """Whether the store refuses a write of this kind to ``who`` now."""
        now, host = self._time(), who.partition("#")[0]
        return any(
            lack.start <= now < lack.end and lack.host in (None, host) and lack.what in ("write", what)
            for lack in self.plan.lacks
        )

    def crash_moment(self) -> Moment | None:
        """When, in the change to a file that is about to happen, the process dies; None: it does not."""
        if not self.hit(self.plan.crash):
            return None
        return self.random.choice(("before", "partial", "after"))
