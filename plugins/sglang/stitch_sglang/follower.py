"""Follower: the core's reconciler drives the engine, and stages in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

from stitch_core.files import PosixFiles
from stitch_core.manifest import Manifest
from stitch_core.ports import FileMarks, SystemClock
from stitch_core.replica.activation import ActivationSettings
from stitch_core.replica.admission import Gate
from stitch_core.replica.asgi import App
from stitch_core.replica.boot import BootCheckpoint
from stitch_core.replica.metering import Metered, ReplicaMetrics
from stitch_core.replica.middleware import StitchMiddleware
from stitch_core.replica.reconciler import Reconciler
from stitch_core.replica.service import Announcer, ReplicaFailed, live
from stitch_core.replica.stage_process import StagerProcess
from stitch_core.replica.staging import Announce, Staged, Staging
from stitch_core.state import state_digest
from stitch_core.stores import open_store
from stitch_core.stores.bounded import BoundedStore

from .engine import DestinationRefused, SGLangEngine
from .profiled import Profiled
from .server import Scratch, boot_directory, kept_probe, reachable_url, replica_id
from .settings import Settings

logger = logging.getLogger(__name__)

STORE_SECONDS = 60.0


class Follower:
    """``manager`` is SGLang's TokenizerManager, ``server_args`` what its server was started with.

    ``boot_marks``: see SGLangEngine.
    """

    def __init__(
        self, settings: Settings, manager: Any, server_args: Any, boot_marks: FileMarks | None = None
    ) -> None:
        assert settings.store is not None
        self._settings = settings
        self._id = replica_id(settings)
        self._address = settings.address or reachable_url(server_args)
        self._boot = boot_directory(server_args)
        self._scratch = Scratch(settings.host_dir, self._boot)
        self._clock = SystemClock()
        self._store = BoundedStore(open_store(settings.store), STORE_SECONDS)
        self._stager: StagerProcess | None = None
        self.gate = Gate(self._clock)
        self._engine = SGLangEngine(
            manager, settings.destination, boot_marks,
            update_timeout=settings.update_timeout, stage_timeout=settings.stage_timeout,
        )  # fmt: skip
        self.warm = self._engine.warm
        self.profiled = Profiled(settings, server_args, self._boot)
        self._reconciler = Reconciler(
            self._store, self._engine, self.gate, None, settings.follow(), self._boot, PosixFiles(),
            self._clock, random.Random(), asyncio.to_thread,
            ActivationSettings(
                settings.kv_mode, settings.drain_all, settings.pin_drain, settings.switch_drain
            ),
            poll=settings.poll, make_stager=self._make_stager,
            say=lambda text: logger.warning("stitch: %s", text),
            probe=kept_probe(settings, self._engine, self._scratch.path),
        )  # fmt: skip
        self.gate.on_refused = self._reconciler.wake
        self._announcer = Announcer(self._store, self._reconciler, self._id, self._address)

    def wrap(self, app: App) -> App:
        metrics = ReplicaMetrics(self.gate, self._clock, self._reconciler.status)
        metrics.follow(self._reconciler)
        return Metered(self._middleware(app), metrics, self._clock)

    def _middleware(self, app: App) -> App:
        return StitchMiddleware(
            app, self.gate, status=self._status,
            wake=self._reconciler.wake, mismatch=self._reconciler.mismatch, abort=self._engine.abort,
            kv_across="mixed" if self._settings.kv_mode == "in_place" else "uniform", replica=self._id,
            stall=self._settings.stall,
        )  # fmt: skip

    def _status(self) -> dict[str, Any]:
        said = self.profiled.said()
        return {"id": self._id, "mode": "follower", **self._reconciler.status(), "profile": said}

    def stitch_status(self) -> dict[str, Any]:
        now = self._reconciler.status()
        about = {"id": self._id, "mode": "follower", "activity": now["activity"], "probe": now["probe"]}
        return {**about, **self._engine.status(), "profile": self.profiled.status()}

    async def live(self, stop: asyncio.Event) -> None:
        async def serve(end: asyncio.Event) -> None:  # the server is SGLang's
            choosing = asyncio.ensure_future(self._engine.choose(self._boot))
            ending = asyncio.ensure_future(end.wait())
            try:
                await asyncio.wait({choosing, ending}, return_when=asyncio.FIRST_COMPLETED)
                if choosing.done():
                    choosing.result()
                    await ending
            except DestinationRefused as error:
                self.gate.fail(str(error))
                raise ReplicaFailed(str(error)) from error
            finally:
                choosing.cancel()
                ending.cancel()

        await live(
            self._reconciler, self._announcer, stop, serve,
            gate=self.gate, clock=self._clock, drain=self._settings.drain,
        )  # fmt: skip

    async def close(self) -> None:
        if self._stager is not None:
            await self._stager.close()
        await self._store.close()
        self._scratch.close()

    def _make_stager(self, activity: Callable[[str], None]) -> Staging:
        assert self._settings.store is not None
        self._stager = StagerProcess(
            self._settings.store, self._boot, self._scratch.path, activity=activity,
            cache=self._settings.cache, cache_bytes=self._settings.cache_bytes,
            anchor_every=self._settings.anchor_every,
        )  # fmt: skip
        return Announced(self._stager, self._engine, self.profiled)


class Announced:
    """A stager that tells the engine which state it staged.

    Asked for the same version again, which the engine could not prepare, it proves the copy by hashing it.
    """

    def __init__(self, stager: StagerProcess, engine: SGLangEngine, profiled: Profiled) -> None:
        self._stager, self._engine, self._profiled = stager, engine, profiled
        self._last: Manifest | None = None

    @property
    def fetching(self) -> tuple[str, ...]:
        return self._stager.fetching

    async def boot(self) -> BootCheckpoint:
        boot = await self._stager.boot()
        await asyncio.to_thread(lambda: self._profiled.boots(state_digest(boot.table)))
        return boot

    async def stage(self, target: Manifest, announce: Announce) -> Staged:
        if self._last == target:
            await self._stager.close()  # the next child opens the copy anew
        self._last = None
        staged = await self._stager.stage(target, announce)
        self._last = target
        self._engine.expect(staged.directory, target.state)
        return staged
