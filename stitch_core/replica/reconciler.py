"""Follows the store: what is the next version, stage it while serving, activate it, again.

One task (``run``) owns the stager and the activator; other tasks may call ``wake`` and ``mismatch`` and
read ``status``. A wake is only a hint to look now: the timer alone would converge.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..chain import ChainReader, NoHead
from ..head import Channel
from ..host_checkpoint import HostCheckpoint
from ..manifest import Manifest
from ..ports import Clock, Engine, Files, NotFound, RunBlocking, Store
from ..retry import Retry
from ..versions import PolicyVersion
from .activation import ActivationSettings, Activator, CannotFollow, Prepared, ReplicaFailed
from .admission import Gate
from .anchoring import ReplicaAnchors
from .fetching import Fetcher
from .probe import Probe
from .problem import Problem, noted
from .progress import now_and_then
from .staging import Announce, Staged, Stager, Staging, WrongBase, tell_nobody

KEPT_UPDATES = 512
LEAST_GAP = 0.05


@dataclass(frozen=True)
class Follow:
    """What to follow: the newest version of ``run``, or what ``channel`` says. Exactly one is set."""

    run: str | None = None
    channel: str | None = None

    def __post_init__(self) -> None:
        if (self.run is None) == (self.channel is None):
            raise ValueError("follow either a run or a channel")


@dataclass(frozen=True)
class Update:
    """One activation, for status and metrics: bytes fetched, ``time`` on the wall, the rest in seconds."""

    version: str
    time: float
    bytes: int
    tensors: int
    fetch: float
    stage: float
    drain: float
    pause: float


@dataclass
class Reconciler:
    """Drives one engine behind one gate. ``boot`` is the checkpoint directory that the engine booted from.

    It stages into ``host`` what ``fetcher`` fetches, and ``anchors`` uploads fulls from there; or as
    ``make_stager`` says, which gets a function to be told the activity. ``probe`` compares weights that come
    back with what they were. ``poll`` is the time between looks at
    the store, in seconds; the backoff after errors goes from ``first_backoff`` to ``max_backoff``, and no
    wake shortens it to less than ``first_backoff``. ``say`` is told when what stands in the way changes, and
    now and then how far something is that takes long.
    """

    store: Store
    engine: Engine
    gate: Gate
    host: HostCheckpoint | None
    follow: Follow
    boot: Path
    files: Files
    clock: Clock
    rng: random.Random
    run_blocking: RunBlocking
    activation: ActivationSettings = field(default_factory=ActivationSettings)
    poll: float = 5.0
    first_backoff: float = 0.5
    max_backoff: float = 30.0
    on_update: Callable[[], None] = lambda: None
    on_fetch: Announce = tell_nobody
    on_activated: Callable[[Update], None] = lambda _: None
    say: Callable[[str], None] = lambda _: None
    fetcher: Fetcher | None = None
    anchors: ReplicaAnchors | None = None
    make_stager: Callable[[Callable[[str], None]], Staging] | None = None
    probe: Probe | None = None

    def __post_init__(self) -> None:
        self.updates: deque[Update] = deque(maxlen=KEPT_UPDATES)
        self.failed_passes = 0
        self._chain = ChainReader(self.store)
        self._stager = (self.make_stager or self._stage_here)(self._set_activity)
        self._activator = Activator(self.engine, self.gate, self.clock, self.activation, self.say, self.probe)
        self._wake = asyncio.Event()
        self._activity = "idle"
        self._say_progress = now_and_then(self.say, self.clock)
        self._target: PolicyVersion | None = None
        self._problem: Problem | None = None
        self._last_success: float | None = None
        self._prepared: tuple[Prepared, Staged] | None = None

    # ---------------------------------------------------------------------------------- for other tasks

    def wake(self) -> None:
        """Look at the store now, or once more after the pass that is running."""
        self._wake.set()

    def mismatch(self, reason: str) -> None:
        """A response carried what the engine should not have said."""
        self._activator.doubt(reason)
        self.wake()

    def status(self) -> dict[str, Any]:
        """What ``/server_info`` and ``/ready`` say."""
        serving, now = self.gate.serving, self.clock.monotonic()
        return {
            "state": self._state(),
            "activity": self._activity,
            "ready": self.gate.ready,
            "why_not_ready": self.gate.why_closed,
            "run": serving.run if serving else None,
            "applied": serving.number if serving else None,
            "target": str(self._target) if self._target else None,
            "kv_mode": self.activation.kv_mode,
            "active_requests": self.gate.active,
            "last_success_age": None if self._last_success is None else now - self._last_success,
            "problem": None if self._problem is None else self._problem.shown(self.clock),
            "probe": None if self.probe is None else self.probe.status(),
            "updates": [asdict(update) for update in list(self.updates)[-8:]],
        }

    def record(self, replica_id: str, address: str, lifetime: float) -> dict[str, Any]:
        """The hint that this replica leaves under ``replicas/``; it expires ``lifetime`` seconds from now."""
        serving, now = self.gate.serving, self.clock.time()
        return {
            "id": replica_id,
            "address": address,
            "run": serving.run if serving else None,
            "applied": serving.number if serving else None,
            "target": str(self._target) if self._target else None,
            "fetching": list(self._stager.fetching),
            "status": self._state(),
            "time": now,
            "expires": now + lifetime,
        }

    # ----------------------------------------------------------------------------------------- the loop

    async def run(self) -> None:
        """Reconcile until cancelled.

        Raises ReplicaFailed when the engine can no longer be trusted, and WrongBase when the first run that
        it meets is not of the checkpoint that the engine booted from.
        """
        try:
            await self._run()
        finally:
            self._activator.close()

    async def _run(self) -> None:
        backoff = Retry(first=self.first_backoff, cap=self.max_backoff)
        failures = 0
        while True:
            self._wake.clear()
            try:
                moved = await self.reconcile()
            except ReplicaFailed as failure:
                self.gate.fail(str(failure))
                raise
            except (NoHead, CannotFollow, WrongBase) as waiting:
                if isinstance(waiting, WrongBase) and self.gate.serving is None:
                    self.gate.close(str(waiting))  # not said here: it is what this replica ends with
                    raise
                self._note(waiting)
                moved, failures = False, 0
            except Exception as error:  # whatever it is, the replica goes on serving and tries again
                self._note(error)
                self.failed_passes += 1
                moved, failures = False, failures + 1
            else:
                self._note(None)
                failures = 0
                self._last_success = self.clock.monotonic()
            self._activity = "idle"
            if moved:
                continue
            pause, least = self.poll * self.rng.uniform(0.8, 1.2), LEAST_GAP
            if failures:
                pause, least = backoff.delay(failures, self.rng), self.first_backoff
            # Every refused request wakes: that must not become a storm on the store.
            least = min(pause, least)
            await asyncio.sleep(least)
            pause -= least
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()

    async def reconcile(self) -> bool:
        """One pass; whether a version was activated. Any failure leaves what is served as it was."""
        if await self._activator.know(self._stager.boot):
            self._prepared = None
        await self._settle()
        target = await self._find_target()
        serving = self._activator.serving
        if serving is not None and serving.digest() == target.digest():
            return False
        if self._prepared is None or self._prepared[0].manifest.digest() != target.digest():
            self._prepared = None
            staged = await self._stager.stage(target, self.on_fetch)
            prepared = await self._activator.prepare(target, staged.table, staged.directory)
            self._prepared = (prepared, staged)
        prepared, staged = self._prepared
        self._activity = "staged"
        if not await self._still_wanted(prepared.manifest):
            self.wake()
            return False
        self._activity = "activating"
        drain, pause = await self._activator.activate(prepared)
        self._prepared = None
        version, changed = str(prepared.manifest.version), len(prepared.changed)
        self.updates.append(Update(
            version, self.clock.time(), staged.bytes, changed, staged.fetch, staged.apply, drain, pause
        ))  # fmt: skip
        self.on_activated(self.updates[-1])
        if not await self._settle():
            self.on_update()
        return True

    async def _settle(self) -> bool:
        """Serve what waits for the comparison of its weights; whether anything did."""
        settled = await self._activator.settle()
        if settled:
            self.on_update()
        return settled

    def _stage_here(self, activity: Callable[[str], None]) -> Staging:
        assert self.host is not None, "without a make_stager there must be a host checkpoint"
        return Stager(
            self.store, self._chain, self.host, self.boot, files=self.files, clock=self.clock, rng=self.rng,
            run_blocking=self.run_blocking, activity=activity, fetcher=self.fetcher,
            anchors=self.anchors,
        )  # fmt: skip

    def _set_activity(self, activity: str) -> None:
        self._activity = activity
        self._say_progress(activity)

    def _state(self) -> str:
        if self.gate.failed:
            return "failed"
        if self.gate.serving is not None:
            return "serving"
        return "booting" if self._target is None else "catching_up"

    def _note(self, error: Exception | None) -> None:
        """Keep what stands in the way for status; None: nothing does."""
        before = self._problem
        if error is None:
            self._problem = None
            if before is not None:
                self.say(f"all is well again, after {self.clock.monotonic() - before.began:.0f} s")
            return
        message = str(error) or type(error).__name__
        self._problem = noted(before, message, self.clock)
        if self._problem.count == 1:
            self.say(message)
        if self.gate.serving is None:
            self.gate.close(f"this replica has not caught up: {message}")

    # ------------------------------------------------------------------------------------ what to serve

    async def _read_channel(self) -> Channel:
        if self.follow.run is not None:
            return Channel(self.follow.run)
        assert self.follow.channel is not None
        try:
            return await self._chain.channel(self.follow.channel)
        except NotFound:
            message = f"channel {self.follow.channel} is not there: nothing says which run to follow"
            raise CannotFollow(message) from None

    async def _find_target(self) -> Manifest:
        began = self.clock.monotonic()
        channel = await self._read_channel()
        self.gate.saw_channel(channel.run, began)
        head, _ = await self._chain.head(channel.run)
        target = await self._chain.manifest(channel.run, head)
        if channel.exact is not None:
            found = await self._chain.find(target, lambda row: row.number == channel.exact)
            if found is None:
                raise CannotFollow(
                    f"the channel names version {channel.exact} of {channel.run}: there is none"
                )
            target = found
        else:
            self._check_progress(target)
        self._target = target.version
        return target

    def _check_progress(self, newest: Manifest) -> None:
        serving = self._activator.serving
        if serving is None or serving.run != newest.run:
            return
        if newest.number < serving.number:
            raise CannotFollow(
                f"the head of run {newest.run} is at {newest.number}, behind version {serving.number}, which "
                "is served: a head never goes down, so the store was changed from outside"
            )
        if newest.number == serving.number and newest.digest() != serving.digest():
            raise CannotFollow(
                f"{newest.version} is not what is served by that name: the run id was used again"
            )

    async def _still_wanted(self, manifest: Manifest) -> bool:
        """Whether the channel still means this run, and no rollback has passed the version over.

        That newer versions exist is the next pass's work.
        """
        channel = await self._read_channel()
        if channel.run != manifest.run or channel.exact is not None:
            return (channel.run, channel.exact) == (manifest.run, manifest.number)
        head, _ = await self._chain.head(channel.run)
        # One that is given up and still the head is served until the rollback is there.
        return head.number == manifest.number or head.abandoned_range(manifest.number) is None
