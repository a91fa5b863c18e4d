"""The engine's side of a replica: what it holds, and the short pause in which it takes the next version.

Owned by the reconciler's task, which is the only caller of the engine's prepare, pause, activate and
resume.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..checkpoint import first_change
from ..manifest import Manifest
from ..ports import Clock, Engine, EngineBounds, EngineError, EngineIdentity, EngineRefused, KVMode
from ..state import TensorTable, changed_tensors, layout_difference, state_digest
from ..versions import PolicyVersion
from .admission import Gate, Ticket
from .boot import BootCheckpoint
from .probe import Confirm, Probe, WeightsDiffer

T = TypeVar("T")
BOOT_LABEL = "default"


class ReplicaFailed(Exception):
    """The engine's weights can no longer be known; the replica must be replaced."""


class CannotFollow(Exception):
    """What the store says cannot be followed now; said in status, tried again, serving goes on."""


@dataclass(frozen=True)
class ActivationSettings:
    """All times in seconds.

    ``pin_drain`` and ``switch_drain``: how long requests that must not live through an activation, or a
    run switch, may still run. ``drain_all`` lets every request finish before every activation.
    ``engine_timeout`` and ``activate_timeout`` (preparing too) bound an engine that has no ``bounds``.
    """

    kv_mode: KVMode = "in_place"
    drain_all: bool = False
    pin_drain: float = 60.0
    switch_drain: float = 600.0
    abort_grace: float = 10.0
    engine_timeout: float = 60.0
    activate_timeout: float = 600.0


@dataclass(frozen=True)
class Prepared:
    """A version that the engine can activate now: ``table`` it will hold, ``changed`` will be copied."""

    manifest: Manifest
    table: TensorTable
    changed: Collection[str]


class Activator:
    """Knows the engine's tensors by its own records, never by a delta's list of names.

    Where a state comes back ``probe`` compares its weights with what they were: then the gate stays closed
    after ``activate``, and nothing is answered, until ``settle`` has opened it.
    """

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        clock: Clock,
        settings: ActivationSettings,
        say: Callable[[str], None] = lambda _: None,
        probe: Probe | None = None,
    ) -> None:
        self._engine, self._gate, self._clock, self._settings = engine, gate, clock, settings
        call, long = settings.engine_timeout, settings.activate_timeout
        self._bounds: EngineBounds = getattr(engine, "bounds", EngineBounds(call, long, long))
        self._say = say
        self._probe = probe
        self._learning: asyncio.Task[None] | None = None
        self._unproven: Manifest | None = None
        self._moves = 0
        self.serving: Manifest | None = None
        self._boot_table: TensorTable | None = None
        self._table: TensorTable | None = None
        self._instance: str | None = None
        self._label = BOOT_LABEL
        self._unseen = True  # the engine has not been looked at yet
        self._revoked: list[Ticket] = []

    async def know(self, read_boot: Callable[[], Awaitable[BootCheckpoint]]) -> bool:
        """Be sure what the engine holds; True if it has to catch up, having restarted or never begun.

        ``read_boot`` reads the checkpoint that the engine boots from. Raises EngineError; ReplicaFailed if
        the probe shows other weights than the boot checkpoint's.
        """
        identity = await self._bounded(self._engine.identity(), self._bounds.call)
        if identity.instance == self._instance and identity.label == self._label:
            return False
        if self._instance is not None or self._gate.serving is not None:
            self._gate.forget("the engine was restarted and is catching up")
        boot = await read_boot()
        self._boot_table = boot.table
        # Without a proof of the weights the next activation copies them all.
        loaded = self._loaded(identity, boot)
        self._table = boot.table if loaded else None
        self.serving = self._unproven = None
        self._moves += 1
        if self._probe is not None:
            self._probe.renew()
            # One that was there before may have been left in a pause: it is asked after its first activation.
            if loaded:
                await self._prove(state_digest(boot.table), identity.instance, identity.label, boot=True)
        self._unseen = False
        self._instance, self._label = identity.instance, identity.label
        return True

    def _loaded(self, identity: EngineIdentity, boot: BootCheckpoint) -> bool:
        """Whether the engine is proven to hold what was read as the boot checkpoint."""
        if not self._unseen or identity.boot_marks is None or identity.label != BOOT_LABEL:
            return False
        changed = first_change(identity.boot_marks, boot.marks)
        if changed is not None:
            self._say(
                f"the boot checkpoint was changed while the engine started ({changed or 'its directory'}): "
                "all weights are copied before any version is served"
            )
        return changed is None

    def doubt(self, reason: str) -> None:
        """The engine said what it should not have: serve nothing until ``know`` has settled it."""
        if self._gate.failed is None:
            self._instance, self._unseen, self._unproven = None, False, None
            self._gate.forget(f"the engine is not in the state it should be in: {reason}")

    async def prepare(self, manifest: Manifest, table: TensorTable, checkpoint: Path) -> Prepared:
        """Let the engine read what it does not hold yet. Raises CannotFollow, EngineError."""
        assert self._boot_table is not None
        difference = layout_difference(self._boot_table, table)
        if difference is not None:
            raise CannotFollow(f"{manifest.version} does not fit the engine's checkpoint: {difference}")
        changed = list(table) if self._table is None else changed_tensors(self._table, table)
        instance = self._instance
        await self._bounded(self._engine.prepare(checkpoint, changed), self._bounds.prepare)
        identity = await self._bounded(self._engine.identity(), self._bounds.call)
        if identity.instance != instance:
            self.doubt(f"it was restarted while it prepared {manifest.version}")
        self._check_doubt(instance)
        return Prepared(manifest, table, changed)

    async def activate(self, prepared: Prepared) -> tuple[float, float]:
        """Make way, pause, copy, resume; the seconds that draining took, and the pause.

        After any other failure than ReplicaFailed, which says that the weights are uncertain, nothing has
        changed and the old version is served again. A version whose state was here before is served once
        ``settle`` has returned.
        """
        await self.settle()
        version, serving, instance = prepared.manifest.version, self._gate.serving, self._instance
        began = self._clock.monotonic()
        try:
            if serving is not None:
                await self._make_way(serving, version)
            self._check_doubt(instance)
            returns = self._probe is not None and self._probe.must_ask(prepared.manifest.state)
            self._gate.close(f"version {version.number} is being activated", hold_answers=returns)
            drained = self._clock.monotonic()
            self._moves += 1
            await self._copy(str(version), instance)
            self._check_doubt(instance)
        except ReplicaFailed:
            raise
        except Exception:
            if serving is not None and self._gate.serving == serving:
                self._gate.open(serving)
            raise
        self._table, self.serving, self._label = prepared.table, prepared.manifest, str(version)
        if returns:
            self._unproven = prepared.manifest
            self._gate.close(
                f"the weights of version {version.number} are compared with what they were", hold_answers=True
            )
        else:
            self._serve(prepared.manifest)
        return drained - began, self._clock.monotonic() - drained

    async def settle(self) -> bool:
        """Serve what was activated and waits for the comparison of its weights; whether anything did.

        Raises ReplicaFailed if they are not what they were. After EngineError (no answer, or the engine is
        another one) it still waits, and may be called again. Between versions it saves what was learned.
        """
        manifest, instance = self._unproven, self._instance
        if self._probe is not None:
            await self._probe.save()
        if manifest is None or instance is None or self._probe is None:
            return False
        await self._prove(manifest.state, instance, self._label)
        self._check_doubt(instance)
        self._serve(manifest)
        return True

    def close(self) -> None:
        """Leave off learning."""
        if self._learning is not None:
            self._learning.cancel()

    def _serve(self, manifest: Manifest) -> None:
        self._unproven = None
        self._gate.open(manifest.version)
        if (
            self._probe is not None
            and self._instance is not None
            and not self._probe.must_ask(manifest.state)
        ):
            learn = self._probe.learn(manifest.state, self._unless_moved(self._instance, self._label))
            self._learning = asyncio.create_task(learn)

    async def _prove(self, state: str, instance: str, label: str, *, boot: bool = False) -> None:
        assert self._probe is not None
        try:
            await self._probe.prove(state, self._unless_moved(instance, label), boot=boot)
        except WeightsDiffer as error:
            raise ReplicaFailed(str(error)) from error

    def _unless_moved(self, instance: str, label: str) -> Confirm:
        """Raises EngineError once anything was copied, or the engine is another one."""
        moves = self._moves

        async def confirm() -> None:
            identity = await self._bounded(self._engine.identity(), self._bounds.call)
            if (identity.instance, identity.label, self._moves) != (instance, label, moves):
                raise EngineError("the engine was restarted, or took to another version, meanwhile")

        return confirm

    def _check_doubt(self, instance: str | None) -> None:
        """What was prepared fits the weights that this instance of the engine had then, and no others."""
        if instance is None or self._instance != instance:
            raise EngineError("the engine was doubted or restarted meanwhile: it is looked at again")

    async def _make_way(self, serving: PolicyVersion, version: PolicyVersion) -> None:
        """Let go those requests that must not live through the activation, up to the drain deadline."""
        # A response says that its versions go up, and a request may have demanded a minimum.
        switch = serving.run != version.run or version < serving
        everything = switch or self._settings.drain_all
        deadline = self._clock.monotonic()
        if everything:
            self._gate.close(f"this replica is moving to {version}")
            deadline += self._settings.switch_drain
        else:
            self._gate.leave_version()
            deadline += self._settings.pin_drain
        revoked = await self._gate.drain(deadline, pins_only=not everything)
        self._revoked += revoked
        await asyncio.gather(*(self._abort(ticket) for ticket in revoked))
        if self._revoked and await self._gate.wait_gone(self._revoked, self._settings.abort_grace):
            self._revoked.clear()
        if self._revoked and switch:
            raise CannotFollow(
                f"{len(self._revoked)} requests of run {serving.run} do not end: no switch to {version}"
            )

    async def _abort(self, ticket: Ticket) -> None:
        with contextlib.suppress(EngineError):
            await self._bounded(self._engine.abort(ticket.request_id), self._bounds.call)

    async def _copy(self, label: str, instance: str | None) -> None:
        try:
            await self._bounded(self._engine.pause(self._settings.kv_mode), self._bounds.call)
            await self._activate(label)
        except ReplicaFailed:
            raise
        except Exception:
            await self._resume()
            raise
        await self._insist(lambda: self._confirm(label, instance))
        await self._resume()

    async def _confirm(self, label: str, instance: str | None) -> None:
        """An engine that was started again meanwhile holds other weights than those that were prepared."""
        identity = await self._bounded(self._engine.identity(), self._bounds.call)
        if (identity.instance, identity.label) != (instance, label):
            raise ReplicaFailed(
                f"the engine is not the one that {label} was prepared for, or says {identity.label}"
            )

    async def _activate(self, label: str) -> None:
        """Raises EngineRefused, when nothing was copied; what else goes wrong leaves weights unknown."""
        seconds = self._bounds.activate
        try:
            async with asyncio.timeout(seconds):
                await self._engine.activate(label)
        except EngineRefused:
            raise
        except TimeoutError as error:
            raise ReplicaFailed(f"activating {label} did not end in {seconds:g} s") from error
        except Exception as error:
            raise ReplicaFailed(f"activating {label} failed after it began: {error}") from error

    async def _resume(self) -> None:
        await self._insist(lambda: self._bounded(self._engine.resume(), self._bounds.call))

    async def _insist(self, call: Callable[[], Awaitable[None]]) -> None:
        """What must be done before the pause can end."""
        for attempt in range(3):
            try:
                await call()
                return
            except ReplicaFailed:
                raise
            except Exception as error:
                if attempt == 2:
                    raise ReplicaFailed(f"the engine stays paused: {error}") from error

    async def _bounded(self, call: Awaitable[T], seconds: float | None) -> T:
        try:
            async with asyncio.timeout(seconds):
                return await call
        except TimeoutError:
            within = "" if seconds is None else f" in {seconds:g} s"
            raise EngineError(f"the engine did not answer{within}") from None
