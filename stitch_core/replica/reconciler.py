"""Follows the store: finds the next version, stages it while the engine serves, activates it in a pause.

One task (``run``) owns every field here and is the only caller of the engine's pause, activate and
resume; other tasks may call ``wake`` and read ``status``. A wake is only a hint to look now.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..chain import ChainReader
from ..checkpoint import Checkpoint
from ..head import Channel
from ..host_checkpoint import HostCheckpoint, RepresentationInvalid
from ..lineage import Plan, cheapest_plan
from ..manifest import Manifest
from ..ports import (
    Clock,
    Engine,
    EngineError,
    EngineUncertain,
    Files,
    KVMode,
    NotFound,
    RunBlocking,
    Store,
)
from ..retry import Retry
from ..state import TensorTable, changed_tensors, layout_difference
from ..stores.transfer import DigestMismatch, download
from ..versions import PolicyVersion
from .admission import Gate

T = TypeVar("T")
BOOT_LABEL = "default"


class ReplicaFailed(Exception):
    """The engine's weights can no longer be known; the replica must be replaced."""


class Wrong(Exception):
    """What the store says cannot be followed; said in status, tried again, serving goes on."""


@dataclass(frozen=True)
class Follow:
    """What to follow: a run's newest version, or what a channel says. Exactly one is set."""

    run: str | None = None
    channel: str | None = None


@dataclass(frozen=True)
class Settings:
    """All times in seconds."""

    kv_mode: KVMode = "in_place"
    drain_all: bool = False
    poll: float = 5.0
    first_backoff: float = 0.5
    max_backoff: float = 30.0
    pin_drain: float = 60.0
    switch_drain: float = 600.0
    abort_grace: float = 10.0
    store_timeout: float = 60.0
    engine_timeout: float = 60.0
    activate_timeout: float = 600.0


@dataclass
class Update:
    """One activation, for status and metrics. ``bytes`` were fetched; times in seconds."""

    version: str
    time: float
    bytes: int
    tensors: int
    fetch: float
    stage: float
    drain: float
    pause: float


@dataclass
class Staged:
    """A version that the host checkpoint holds and the engine has prepared."""

    manifest: Manifest
    table: TensorTable
    changed: Collection[str]
    bytes: int = 0
    fetch: float = 0.0
    stage: float = 0.0


@dataclass
class Problem:
    """The error that stands in the way now. ``since`` and ``last`` are wall times."""

    message: str
    since: float
    last: float
    count: int = 1


@dataclass
class Reconciler:
    """Drives one engine behind one gate. ``boot`` is the checkpoint directory that the engine booted from."""

    store: Store
    engine: Engine
    gate: Gate
    host: HostCheckpoint
    follow: Follow
    boot: Path
    files: Files
    clock: Clock
    rng: random.Random
    run_blocking: RunBlocking
    settings: Settings = field(default_factory=Settings)
    on_update: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.updates: deque[Update] = deque(maxlen=512)
        self._chain = ChainReader(self.store)
        self._wake = asyncio.Event()
        self._activity = "idle"
        self._target: PolicyVersion | None = None
        self._problem: Problem | None = None
        self._last_success: float | None = None
        self._excluded: set[str] = set()
        self._fetching: tuple[str, ...] = ()
        self._staged: Staged | None = None
        self._serving: Manifest | None = None
        self._boot_table: TensorTable | None = None
        self._engine_table: TensorTable | None = None
        self._instance: str | None = None
        self._label = BOOT_LABEL
        self._opened_host = False

    # ---------------------------------------------------------------------------------- for other tasks

    def wake(self) -> None:
        """Look at the store now, or once more after the pass that is running."""
        self._wake.set()

    def mismatch(self, reason: str) -> None:
        """A response carried what the engine should not have said: stop serving until it is known again."""
        if self.gate.failed is None:
            self._instance = None
            self.gate.forget(f"the engine is not in the state it should be in: {reason}")
            self.wake()

    def status(self) -> dict[str, Any]:
        """What ``/server_info`` and ``/ready`` say."""
        serving = self.gate.serving
        if self.gate.failed:
            state = "failed"
        elif serving is None:
            state = "booting" if self._target is None else "catching_up"
        else:
            state = "serving"
        now = self.clock.time()
        return {
            "state": state,
            "activity": self._activity,
            "ready": self.gate.ready,
            "why_not_ready": self.gate.why_closed,
            "run": serving.run if serving else None,
            "applied": serving.number if serving else None,
            "target": str(self._target) if self._target else None,
            "kv_mode": self.settings.kv_mode,
            "active_requests": self.gate.active,
            "last_success_age": None if self._last_success is None else now - self._last_success,
            "problem": None
            if self._problem is None
            else {**asdict(self._problem), "age": now - self._problem.since},
            "updates": [asdict(update) for update in list(self.updates)[-8:]],
        }

    def record(self, address: str, replica_id: str, lifetime: float) -> dict[str, Any]:
        """The hint that this replica leaves under ``replicas/``; it expires ``lifetime`` seconds from now."""
        serving = self.gate.serving
        return {
            "id": replica_id,
            "address": address,
            "run": serving.run if serving else None,
            "applied": serving.number if serving else None,
            "target": str(self._target) if self._target else None,
            "fetching": list(self._fetching),
            "status": self.status()["state"],
            "time": self.clock.time(),
            "expires": self.clock.time() + lifetime,
        }

    # --------------------------------------------------------------------------------------- the loop

    async def run(self) -> None:
        """Reconcile until cancelled. Raises ReplicaFailed when the engine can no longer be trusted."""
        backoff = Retry(first=self.settings.first_backoff, cap=self.settings.max_backoff)
        failures = 0
        while True:
            self._wake.clear()
            try:
                moved = await self.reconcile()
            except ReplicaFailed as failure:
                self.gate.fail(str(failure))
                raise
            except Exception as error:  # every other fault is tried again: it must not end the replica
                self._note(error)
                moved, failures = False, failures + 1
            else:
                self._problem, failures = None, 0
                self._last_success = self.clock.time()
            self._activity = "idle"
            if moved:
                continue
            if failures:
                pause = backoff.delay(min(failures, 16), self.rng)
            else:
                pause = self.settings.poll * self.rng.uniform(0.8, 1.2)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()

    async def reconcile(self) -> bool:
        """One pass; whether a version was activated. Any failure leaves what is served as it was."""
        target = await self._find_target()
        await self._know_engine(target)
        staged = self._staged
        if staged is None or staged.manifest.digest() != target.digest():
            if self._serving is not None and self._serving.digest() == target.digest():
                return False
            staged = await self._stage(target)
        if not await self._still_wanted(staged.manifest):
            return False
        await self._activate(staged)
        return True

    def _note(self, error: Exception) -> None:
        message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        now = self.clock.time()
        if self._problem is not None and self._problem.message == message:
            self._problem.last, self._problem.count = now, self._problem.count + 1
        else:
            since = self._problem.since if self._problem else now
            self._problem = Problem(message, since, now)
        if self.gate.serving is None and self.gate.failed is None:
            self.gate.close(f"this replica has not caught up: {message}")

    async def _store_call(self, call: Awaitable[T]) -> T:
        async with asyncio.timeout(self.settings.store_timeout):
            return await call

    async def _engine_call(self, call: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self.settings.engine_timeout):
                return await call
        except TimeoutError:
            raise EngineError(f"the engine did not answer in {self.settings.engine_timeout:g} s") from None

    # ------------------------------------------------------------------------------------ what to serve

    async def _read_channel(self) -> Channel:
        if self.follow.run is not None:
            return Channel(self.follow.run)
        assert self.follow.channel is not None
        began = self.clock.monotonic()
        try:
            channel = await self._store_call(self._chain.channel(self.follow.channel))
        except NotFound:
            raise Wrong(
                f"channel {self.follow.channel} is not there: nothing says which run to follow"
            ) from None
        self.gate.saw_channel(channel.run, began)
        return channel

    async def _find_target(self) -> Manifest:
        began = self.clock.monotonic()
        channel = await self._read_channel()
        head, _ = await self._store_call(self._chain.head(channel.run))
        newest = await self._store_call(self._chain.manifest(channel.run, head))
        if self.follow.run is not None:
            self.gate.saw_channel(channel.run, began)
        target = newest
        if channel.exact is not None:
            found = await self._store_call(self._chain.find(newest, lambda row: row.number == channel.exact))
            if found is None:
                raise Wrong(
                    f"the channel names version {channel.exact}, which run {channel.run} does not have"
                )
            target = found
        serving = self._serving
        if serving is not None and serving.run == target.run and channel.exact is None:
            if target.number < serving.number:
                raise Wrong(
                    f"the head of run {target.run} is at {target.number}, behind version {serving.number}, "
                    "which is served: the store was rolled back from outside; a head never goes down"
                )
            if target.number == serving.number and target.digest() != serving.digest():
                raise Wrong(
                    f"{target.version} is not the version that is served by that name: the run id was used "
                    "again; start a new run under a new id"
                )
        self._target = target.version
        return target

    async def _still_wanted(self, manifest: Manifest) -> bool:
        """Whether the channel still means this run. That newer versions exist is the next pass's work."""
        channel = await self._read_channel()
        return channel.run == manifest.run and channel.exact in (None, manifest.number)

    async def _know_engine(self, target: Manifest) -> None:
        """Be sure what the engine holds: what was activated last, or the boot checkpoint after a restart."""
        identity = await self._engine_call(self.engine.identity())
        if identity.instance == self._instance and identity.label == self._label:
            return
        if self._instance is not None or self.gate.serving is not None:
            self.gate.forget("the engine was restarted and is catching up")
        if self._boot_table is None:
            self._activity = "reading the boot checkpoint"
            self._boot_table = await self.run_blocking(lambda: Checkpoint.open(self.boot, self.files).table())
        # Under any other label nothing proves the weights: the next activation copies them all.
        self._engine_table = self._boot_table if identity.label == BOOT_LABEL else None
        self._serving = self._staged = None
        self._instance, self._label = identity.instance, identity.label

    # ------------------------------------------------------------------------------------------ staging

    async def _stage(self, target: Manifest) -> Staged:
        """Fetch, verify, apply to the host checkpoint, let the engine read what will change."""
        self._staged = None
        version0 = await self._store_call(self._chain.boot(target))
        started = self.clock.monotonic()
        await self._open_host(version0)
        plan = await self._plan(target, version0)
        self._activity, self._fetching = "fetching", tuple(source.digest() for source in plan.sources)
        try:
            directories = {m.digest(): await self._fetch(m) for m in plan.sources}
            fetched = self.clock.monotonic()
            self._activity = "staging"
            await self.run_blocking(self.host.apply, plan, lambda manifest: directories[manifest.digest()])
        except (RepresentationInvalid, DigestMismatch) as error:
            self._exclude(error, plan)
            raise
        finally:
            self._fetching = ()
        table = dict(self.host.table)
        assert self._boot_table is not None
        difference = layout_difference(self._boot_table, table)
        if difference is not None:
            raise Wrong(f"{target.version} does not fit the engine's checkpoint: {difference}")
        changed = list(table) if self._engine_table is None else changed_tensors(self._engine_table, table)
        await self._engine_call(self.engine.prepare(self.host.directory, changed))
        self._staged = Staged(
            target, table, changed, plan.bytes, fetched - started, self.clock.monotonic() - fetched
        )
        self._activity = "staged"
        return self._staged

    async def _open_host(self, version0: Manifest) -> None:
        """The host checkpoint holds something of this run, the boot version if nothing else."""
        if not self._opened_host:
            self._activity = "verifying the host checkpoint"
            await self.run_blocking(self.host.open)
            self._opened_host = True
        assert self._boot_table is not None
        holding = self.host.holding
        if (holding is None and self.host.interrupted is None) or (
            holding and holding.version.run != version0.run
        ):
            await self._seed(version0)

    async def _seed(self, version0: Manifest) -> None:
        self._activity = "copying the boot checkpoint"
        await self.run_blocking(self.host.seed, self.boot, version0)

    async def _plan(self, target: Manifest, version0: Manifest) -> Plan:
        interrupted = self.host.interrupted
        held = self.host.holding.state if self.host.holding else interrupted and interrupted.base_state
        known = {held} if held else set()
        chain = await self._store_call(self._chain.back_to(target, known))
        plan = cheapest_plan(target, chain, {*known, version0.state}, self._excluded)
        if interrupted is not None and not interrupted.fits(plan):
            await self._seed(version0)
            return await self._plan(target, version0)
        if plan.base is not None and plan.base != held:
            await self._seed(version0)
        return plan

    async def _fetch(self, manifest: Manifest) -> Path:
        """The files of one manifest, verified, in a directory of their own."""
        directory = self.host.fetch_directory(manifest.digest())
        await self.run_blocking(self.files.make_dirs, directory)
        for file in manifest.representation.files:
            await self._store_call(download(
                self.store, manifest.file_key(file.name), self.files, directory / file.name,
                file.size, file.sha256, run_blocking=self.run_blocking,
            ))  # fmt: skip
        return directory

    def _exclude(self, error: RepresentationInvalid | DigestMismatch, plan: Plan) -> None:
        if isinstance(error, RepresentationInvalid):
            self._excluded.add(error.manifest_digest)
            return
        for source in plan.sources:
            if any(error.key == source.file_key(file.name) for file in source.representation.files):
                self._excluded.add(source.digest())

    # --------------------------------------------------------------------------------------- activation

    async def _activate(self, staged: Staged) -> None:
        version, serving = staged.manifest.version, self.gate.serving
        self._activity = "activating"
        began = self.clock.monotonic()
        if serving is not None:
            await self._make_way(serving, version)
        self.gate.close(f"version {version.number} is being activated")
        drained = self.clock.monotonic()
        try:
            paused = await self._copy(staged)
        except EngineError:
            self._reopen(serving)
            raise
        self._engine_table, self._serving, self._label = staged.table, staged.manifest, str(version)
        self._staged = None
        self.gate.open(version)
        self.updates.append(Update(
            str(version), self.clock.time(), staged.bytes, len(staged.changed), staged.fetch, staged.stage,
            drained - began, paused,
        ))  # fmt: skip
        self.on_update()

    async def _make_way(self, serving: PolicyVersion, version: PolicyVersion) -> None:
        """Let go those requests that must not live through the activation, up to the drain deadline."""
        switch = serving.run != version.run
        everything = switch or self.settings.drain_all
        now = self.clock.monotonic()
        if everything:
            self.gate.close(f"this replica is moving to {version}")
            deadline = now + self.settings.switch_drain
        else:
            self.gate.leave_version()
            deadline = now + self.settings.pin_drain
        revoked = await self.gate.drain(deadline, pins_only=not everything)
        for ticket in revoked:
            with contextlib.suppress(EngineError):
                await self._engine_call(self.engine.abort(ticket.request_id))
        if revoked and not await self.gate.wait_gone(revoked, self.settings.abort_grace) and switch:
            self._reopen(serving)
            raise Wrong(
                f"{len(revoked)} requests of run {serving.run} would not end: the switch to {version} waits"
            )

    async def _copy(self, staged: Staged) -> float:
        """Pause, copy, resume; seconds paused. EngineError: nothing changed and the engine runs again."""
        label = str(staged.manifest.version)
        began = self.clock.monotonic()
        try:
            await self._engine_call(self.engine.pause(self.settings.kv_mode))
            async with asyncio.timeout(self.settings.activate_timeout):
                await self.engine.activate(label)
        except EngineUncertain as error:
            raise ReplicaFailed(f"activating {label} failed after it began: {error}") from error
        except TimeoutError as error:
            raise ReplicaFailed(
                f"activating {label} did not end in {self.settings.activate_timeout:g} s"
            ) from error
        except EngineError:
            await self._resume_or_fail()
            raise
        await self._resume_or_fail()
        return self.clock.monotonic() - began

    async def _resume_or_fail(self) -> None:
        for attempt in range(3):
            try:
                await self._engine_call(self.engine.resume())
                return
            except EngineError as error:
                if attempt == 2:
                    raise ReplicaFailed(f"the engine stays paused: {error}") from error

    def _reopen(self, serving: PolicyVersion | None) -> None:
        if serving is not None and self.gate.failed is None:
            self.gate.open(serving)


def replica_key(replica_id: str) -> str:
    """Where a replica leaves its record."""
    return f"replicas/{replica_id}.json"
