"""Receiver: no store; a stock trainer drives this replica by the routes that it knows, all behind the gate.

/pull_weights stages while serving. /update_weights_from_disk, or /activate_weights, activates it:
make way, pause, copy and go on are one call. The trainer's own pauses and flushes around it are therefore
answered and not needed; a pause in SGLang's default mode still aborts what runs, as its callers expect.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stitch_core.manifest import Manifest
from stitch_core.ports import EngineError, FileMarks, SystemClock
from stitch_core.replica.activation import ActivationSettings, Activator, CannotFollow, Prepared
from stitch_core.replica.admission import Gate
from stitch_core.replica.asgi import App
from stitch_core.replica.boot import BootCheckpoint
from stitch_core.replica.child import Child, CommandFailed
from stitch_core.replica.metering import Metered, ReplicaMetrics
from stitch_core.replica.middleware import StitchMiddleware
from stitch_core.replica.problem import Problem, noted
from stitch_core.replica.progress import now_and_then
from stitch_core.replica.service import ReplicaFailed
from stitch_core.replica.stage_worker import marks_from_json, table_from_json
from stitch_core.state import TensorTable

from .engine import DestinationRefused, SGLangEngine
from .profiled import Profiled
from .pull import inside
from .receiver_routes import ReceiverRoutes
from .server import Scratch, boot_directory, kept_probe, replica_id
from .settings import Destination, Settings

logger = logging.getLogger(__name__)

BOOT_RETRY_SECONDS = 5.0


class NotDone(Exception):
    """The trainer's request was not carried out; what is served has not changed."""


@dataclass(frozen=True)
class Pulled:
    """A version on the host, and the trainer's name for it: its number in ``local`` (None: the boot copy).

    ``boot_marks``: of the boot checkpoint's files, after it was read for this.
    """

    manifest: Manifest
    table: TensorTable
    directory: Path
    local: Path | None
    boot_marks: FileMarks


class Receiver:
    """``manager`` is SGLang's TokenizerManager, ``server_args`` what its server was started with.

    ``boot_marks``: see SGLangEngine.
    """

    def __init__(
        self, settings: Settings, manager: Any, server_args: Any, boot_marks: FileMarks | None = None
    ) -> None:
        assert settings.receive is not None
        self._settings = settings
        self._manager = manager
        self._id = replica_id(settings)
        self._clock = SystemClock()
        self.gate = Gate(self._clock)
        self._boot_dir = boot_directory(server_args)
        self._scratch = Scratch(settings.host_dir, self._boot_dir)
        self._engine = SGLangEngine(
            manager, settings.destination, boot_marks,
            update_timeout=settings.update_timeout, stage_timeout=settings.stage_timeout,
        )  # fmt: skip
        self.warm = self._engine.warm
        self.profiled = Profiled(settings, server_args, self._boot_dir)
        self._probe = kept_probe(settings, self._engine, self._scratch.path)
        self._activator = Activator(
            self._engine, self.gate, self._clock,
            ActivationSettings(
                settings.kv_mode, settings.drain_all, settings.pin_drain, switch_drain=settings.pin_drain
            ),
            lambda text: logger.warning("stitch: %s", text),
            self._probe,
        )  # fmt: skip
        roots = [argument for root in settings.roots for argument in ("--root", str(root))]
        self._child = Child("stitch_sglang.pull_worker", (
            "--name", settings.receive, "--boot", str(self._boot_dir),
            "--host-dir", str(self._scratch.path), *roots,
        ), self._told)  # fmt: skip
        self._activity = "idle"
        self._say_progress = now_and_then(lambda text: logger.info("stitch: %s", text), self._clock)
        self._busy = asyncio.Lock()
        self._booted = asyncio.Event()
        self._failure: asyncio.Queue[ReplicaFailed] = asyncio.Queue()
        self._boot_state: str | None = None  # that was served, and that 0 means from then on
        self._pulled: Pulled | None = None
        self._prepared: Prepared | None = None
        self._pulling: int | None = None
        self._preparing: asyncio.Future[Prepared] | None = None
        self._newest = 0  # of the pulls that wait
        self._problem: Problem | None = None

    def wrap(self, app: App) -> App:
        middleware = StitchMiddleware(
            app, self.gate, status=self.status, wake=lambda: None, mismatch=self._mismatch,
            abort=self._engine.abort,
            kv_across="mixed" if self._settings.kv_mode == "in_place" else "uniform", replica=self._id,
            stall=self._settings.stall,
        )  # fmt: skip
        metrics = ReplicaMetrics(self.gate, self._clock, self.status)
        return Metered(ReceiverRoutes(middleware, self), metrics, self._clock)

    def status(self) -> dict[str, Any]:
        """What ``/ready`` and ``/server_info`` say."""
        serving, pulled, problem = self.gate.serving, self._pulled, self._problem
        state = "failed" if self.gate.failed else "serving" if serving else "booting"
        return {
            "id": self._id,
            "mode": "receiver",
            "state": state,
            "activity": self._activity,
            "ready": self.gate.ready,
            "why_not_ready": self.gate.why_closed,
            "run": serving.run if serving else None,
            "applied": serving.number if serving else None,
            "pulled": str(pulled.manifest.version) if pulled else None,
            "host": str(self._scratch.path),
            "kv_mode": self._settings.kv_mode,
            "active_requests": self.gate.active,
            "probe": self._probe and self._probe.status(),
            "problem": problem and problem.shown(self._clock),
            "profile": self.profiled.said(),
        }

    def stitch_status(self) -> dict[str, Any]:
        probe = self._probe and self._probe.status()
        about = {"id": self._id, "mode": "receiver", "activity": self._activity, "probe": probe}
        return {**about, **self._engine.status(), "profile": self.profiled.status()}

    # -------------------------------------------------------------------------------------------- life

    async def live(self, stop: asyncio.Event) -> None:
        choosing = asyncio.create_task(self._choose())
        boot = asyncio.create_task(self._boot())
        stopping = asyncio.create_task(stop.wait())
        failing = asyncio.create_task(self._failure.get())
        try:
            await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
            self.gate.stop()
            if failing.done():
                raise failing.result()
            await self.gate.empty(self._clock.monotonic() + self._settings.drain)
        finally:
            self._activator.close()
            for task in (choosing, boot, stopping, failing):
                task.cancel()

    async def close(self) -> None:
        await self._child.close()
        if self._probe is not None:
            await self._probe.save()
        self._scratch.close()

    async def _choose(self) -> None:
        try:
            await self._engine.choose(self._boot_dir)
        except DestinationRefused as error:
            self._fail(ReplicaFailed(str(error)))

    async def _boot(self) -> None:
        """Prove the boot checkpoint and serve it as version 0."""
        while self.gate.serving is None and self.gate.failed is None:
            try:
                async with self._busy:
                    pulled = await self._carry_out(None, do="boot")
                    await asyncio.to_thread(self.profiled.boots, pulled.manifest.state)
                    boot = BootCheckpoint(pulled.table, pulled.boot_marks)
                    await self._activator.know(functools.partial(_value, boot))
                    self._pulled = pulled
                    if self._activator.serving != pulled.manifest:
                        await self._activate(await self._prepare(pulled))
                    await self._settle()
                    self._boot_state = pulled.manifest.state
            except ReplicaFailed as failure:
                self._fail(failure)
            except (NotDone, EngineError) as error:
                self._note(error)
                self.gate.close(f"the boot checkpoint is not proven: {error}")
                await asyncio.sleep(BOOT_RETRY_SECONDS)
        self._booted.set()

    def _mismatch(self, reason: str) -> None:
        self._fail(ReplicaFailed(f"the engine said what cannot be true: {reason}"))

    def _fail(self, failure: ReplicaFailed) -> None:
        self.gate.fail(str(failure))
        self._failure.put_nowait(failure)

    # ------------------------------------------------------------------------------------ the trainer's

    async def pull(self, local: Path, source: Path, target: int, destination: Destination = "auto") -> str:
        """Stage version ``target`` of ``source``, to be activated by the name ``local``. Raises NotDone.

        It takes the place of an older one's pull that is under way.
        """
        for path in (local, source):
            if not await asyncio.to_thread(inside, path, self._settings.roots):
                raise self._note(NotDone(f"{path} lies outside the roots that this replica was given"))
        await self._booted.wait()
        self._supersede(target)
        async with self._busy:
            if self._newest > target:
                raise self._note(NotDone(f"version {target} was superseded by {self._newest}"))
            self._pulling, self._newest = target, 0
            # From here on the host may hold something else, or nothing, whatever becomes of this.
            self._pulled = self._prepared = None
            try:
                pulled = await self._carry_out(local, do="pull", source=str(source), target=target)
                if self._newest:
                    raise NotDone(f"version {target} was superseded by {self._newest}")
                self._prepared = await self._prepare(pulled, destination)
            except NotDone as error:
                raise self._note(error) from None
            finally:
                self._pulling = None
            self._pulled, self._problem = pulled, None
            version = pulled.manifest.version
            self.gate.saw_channel(version.run, self._clock.monotonic())
            return f"{version} is staged"

    async def update(self, path: Path | None, number: str | None) -> str:
        """Activate what was pulled, to ``path`` if that is given. Raises NotDone."""
        await self._only_one()
        async with self._busy:
            pulled = self._pulled
            if pulled is None or (path is not None and pulled.local != path):
                where = "nothing was pulled" if path is None else f"{path} holds nothing that was pulled"
                raise self._note(NotDone(f"{where}: call /pull_weights first"))
            if number is not None and number != str(pulled.manifest.number):
                raise self._note(
                    NotDone(f"version {pulled.manifest.number} was pulled, the update says {number}")
                )
            if self._activator.serving != pulled.manifest:
                prepared = self._prepared or await self._prepare(pulled)
                self._prepared = None
                await self._activate(prepared)
            await self._settle()
            self._problem = None
            return f"{pulled.manifest.version} is served"

    async def abort_all(self) -> None:
        """End every request, with the tokens that it has."""
        self._manager.abort_request(abort_all=True)

    def serving_number(self) -> int | None:
        """The number that is served."""
        return self.gate.serving.number if self.gate.serving else None

    # ------------------------------------------------------------------------------------------ inside

    async def _only_one(self) -> None:
        await self._booted.wait()
        if self._busy.locked():
            raise NotDone("a pull or an update is running: one at a time")

    def _supersede(self, target: int) -> None:
        """Make what runs make room for a pull of ``target``, or raise NotDone."""
        if not self._busy.locked():
            return
        if self._pulling is None or target <= max(self._pulling, self._newest):
            raise NotDone("a pull or an update is running: one at a time")
        self._newest = target
        if self._preparing is not None:
            self._preparing.cancel()

    async def _prepare(self, pulled: Pulled, destination: Destination = "auto") -> Prepared:
        """Let the engine stage it, if it does. Raises NotDone."""
        self._engine.expect(pulled.directory, pulled.manifest.state, destination)
        preparing = self._preparing = asyncio.ensure_future(
            self._activator.prepare(pulled.manifest, pulled.table, pulled.directory)
        )
        try:
            await asyncio.wait({preparing})
        finally:
            self._preparing = None
            preparing.cancel()
        if preparing.cancelled():
            raise NotDone(f"version {pulled.manifest.number} was superseded by {self._newest}")
        try:
            return preparing.result()
        except (EngineError, CannotFollow) as error:
            await self._distrust()
            raise self._note(NotDone(str(error))) from error

    async def _activate(self, prepared: Prepared) -> None:
        try:
            await self._activator.activate(prepared)
        except ReplicaFailed as failure:
            self._fail(failure)
            raise NotDone(str(failure)) from failure
        except (EngineError, CannotFollow) as error:
            await self._distrust()
            raise self._note(NotDone(str(error))) from error

    async def _settle(self) -> None:
        """Serve what waits for the comparison of its weights. NotDone without an answer: ask again."""
        try:
            await self._activator.settle()
        except ReplicaFailed as failure:
            self._fail(failure)
            raise NotDone(str(failure)) from failure
        except EngineError as error:
            raise self._note(NotDone(str(error))) from error

    async def _distrust(self) -> None:
        """What the engine could not load is not to be trusted: the next pull starts from the boot copy."""
        self._pulled = None
        await self._child.close()

    async def _carry_out(self, local: Path | None, **command: Any) -> Pulled:
        try:
            result = await self._child.call(**command, boot_state=self._boot_state)
        except CommandFailed as error:
            raise NotDone(str(error)) from None
        finally:
            self._activity = "idle"
        manifest = Manifest.decode(result["manifest"].encode(), result["key"])
        table, marks = table_from_json(result["table"]), marks_from_json(result["boot_marks"])
        return Pulled(manifest, table, Path(result["directory"]), local, marks)

    def _told(self, message: dict[str, Any]) -> None:
        """What the child is about."""
        self._activity = message["activity"]
        self._say_progress(self._activity)

    def _note(self, error: Exception) -> Exception:
        """Keep for status what stands in the way, and since when."""
        self._problem = noted(self._problem, str(error), self._clock)
        return error


async def _value(boot: BootCheckpoint) -> BootCheckpoint:
    return boot
