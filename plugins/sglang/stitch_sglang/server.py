"""The replica inside SGLang's own HTTP server: gate and middleware before its app, reconciler beside it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
from pathlib import Path
from typing import Any, Protocol

from stitch_core import logs
from stitch_core.files import PosixFiles
from stitch_core.ports import Engine, FileMarks, SystemClock
from stitch_core.replica.admission import Gate
from stitch_core.replica.asgi import App, Message, Receive, Scope, Send, clean_path, send_json
from stitch_core.replica.probe import Probe
from stitch_core.replica.service import ReplicaFailed
from stitch_core.scratch import temporary_directory
from stitch_core.versions import check_run_id

from .openai import ChoiceVersions
from .profiled import Profiled
from .settings import Settings

logger = logging.getLogger(__name__)

WARM_UP_SECONDS = 600.0
"""SGLang's own, where SGLANG_WARMUP_TIMEOUT does not say."""

# Called by SGLang itself once it is warm; it has to do with no weights.
UNGATED = ("/freeze_gc",)
STATUS = "/stitch/status"


class Mode(Protocol):
    """Follower or receiver: what stands in front of SGLang's app, and what goes on beside it."""

    gate: Gate
    warm: asyncio.Event
    """Set once forward passes have run."""
    profiled: Profiled

    def wrap(self, app: App) -> App:
        """The app as clients meet it."""
        ...

    def stitch_status(self) -> dict[str, Any]:
        """What ``/stitch/status`` says: the weights, where they wait, and what the last update took."""
        ...

    async def live(self, stop: asyncio.Event) -> None:
        """Go on until ``stop`` is set and requests have ended. Raises ReplicaFailed."""
        ...

    async def close(self) -> None: ...


class Life:
    """One replica from SGLang's startup to its end. ``mode`` acts once the server listens."""

    def __init__(self, mode: Mode, manager: Any) -> None:
        self.mode, self.manager = mode, manager
        self.listening = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Called on the server's loop when SGLang's own startup is complete."""
        self.loop = asyncio.get_running_loop()
        self.manager.auto_create_handle_loop()
        stop = asyncio.Event()
        # In place of SGLang's handler, which does not leave rotation; ours ends by doing what it does.
        self.loop.add_signal_handler(signal.SIGTERM, stop.set)
        self._task = asyncio.create_task(self._live(stop))
        self.listening.set()

    async def end(self) -> None:
        """SGLang's server shuts down."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.mode.close()

    async def _live(self, stop: asyncio.Event) -> None:
        try:
            await self.mode.live(stop)
        except ReplicaFailed as failure:
            logger.critical("stitch: this replica must be replaced: %s", failure)
        except Exception as error:
            logger.critical("stitch: this replica cannot go on: %s", error or repr(error))
        else:
            self.manager.gracefully_exit = True
            return
        await self.mode.close()
        _end_all_processes()

    def warm_up(self, server_args: Any) -> bool:
        """SGLang's warm-up, in its thread, below the gate, which is not open yet. Whether it succeeded."""
        from sglang.srt.environ import envs
        from sglang.srt.managers.io_struct import GenerateReqInput
        from sglang.srt.managers.tokenizer_manager import ServerStatus

        async def generate() -> None:
            request = GenerateReqInput(
                input_ids=[10, 11, 12], sampling_params={"temperature": 0, "max_new_tokens": 8}
            )
            async for _ in self.manager.generate_request(request, None):
                pass

        self.listening.wait()
        assert self.loop is not None
        given = envs.SGLANG_WARMUP_TIMEOUT.get()
        seconds = given if given > 0 else WARM_UP_SECONDS
        try:
            asyncio.run_coroutine_threadsafe(generate(), self.loop).result(seconds)
        except Exception:
            logger.exception("stitch: the warm-up failed")
            _end_all_processes()
            return False
        self.manager.server_status = ServerStatus.Up
        self.loop.call_soon_threadsafe(self.mode.warm.set)
        return True


def _end_all_processes() -> None:
    """End SGLang at once, this process too: nothing that it holds is worth a dump or a drain."""
    from sglang.srt.utils.common import kill_process_tree

    kill_process_tree(os.getpid())


class Front:
    """The ASGI middleware that SGLang's app gets: between its authorization and everything else."""

    def __init__(self, app: App, life: Life) -> None:
        self._app, self._life = app, life
        self._wrapped = life.mode.wrap(ChoiceVersions(app))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["method"], clean_path(scope["path"])) == ("GET", STATUS):
            await asyncio.to_thread(self._life.mode.profiled.look)
            await send_json(send, 200, self._life.mode.stitch_status())
            return
        if scope["type"] != "lifespan":
            app = self._app if scope.get("path") in UNGATED else self._wrapped
            await app(scope, receive, send)
            return

        async def started(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                self._life.start()
            await send(message)

        async def ending() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self._life.end()
            return message

        await self._app(scope, ending, started)


def install(
    app: Any, settings: Settings, manager: Any, server_args: Any, boot_marks: FileMarks | None = None
) -> Life:
    """Put the replica in front of SGLang's FastAPI ``app``, which has not started.

    ``boot_marks``: of ``boot_directory``, from before SGLang began to load it.
    """
    from sglang.srt.utils.auth import AuthLevel, auth_level

    from .follower import Follower
    from .receiver import Receiver

    kind = Follower if settings.store else Receiver
    mode: Mode = kind(settings, manager, server_args, boot_marks)
    logs.set_context(lambda: _about(mode.gate))
    if server_args.skip_server_warmup:
        mode.warm.set()
    life = Life(mode, manager)
    app.add_middleware(Front, life=life)

    # Answered by the front; here only so that SGLang's --admin-api-key guards them.
    async def answered_by_stitch() -> None:
        raise RuntimeError("the front did not answer")

    for path in ("/wake", "/pull_weights", "/activate_weights"):
        app.post(path)(auth_level(AuthLevel.ADMIN_OPTIONAL)(answered_by_stitch))
    return life


def _about(gate: Gate) -> dict[str, Any]:
    """What log lines say besides."""
    serving = gate.serving
    return {"run": serving.run, "version": serving.number} if serving else {}


def kept_probe(settings: Settings, engine: Engine, directory: Path) -> Probe | None:
    """The probe that remembers beside the host checkpoint, unless it is turned off."""
    if not settings.probe:
        return None
    return Probe.kept_in(
        directory, engine, SystemClock(), PosixFiles(), asyncio.to_thread,
        lambda text: logger.warning("stitch: %s", text),
    )  # fmt: skip


def replica_id(settings: Settings) -> str:
    """The replica's name."""
    return check_run_id(settings.id or f"{socket.gethostname()[:60]}-{secrets.token_hex(3)}")


def boot_directory(server_args: Any) -> Path:
    """``--model-path`` as it was given: where a link in it points may change while SGLang starts."""
    return Path.cwd() / server_args.model_path


def reachable_url(server_args: Any) -> str:
    """Where others find a server that was told no address: on all interfaces, by this machine's name."""
    url: str = server_args.url()
    if server_args.host in ("0.0.0.0", "::"):
        scheme = url.partition(":")[0]
        return f"{scheme}://{socket.gethostname()}:{server_args.port}"
    return url


class Scratch:
    """The host checkpoint's directory: the one given, which is kept, or a temporary one.

    A temporary one is in RAM if there is room for what is built from ``boot``, and removed in the end; what a
    killed server left is removed by the next one that starts here.
    """

    def __init__(self, given: Path | None, boot: Path) -> None:
        self._temporary = contextlib.ExitStack()
        if given is None:
            path = self._temporary.enter_context(temporary_directory(PosixFiles(), boot)) / "host"
            logger.info("stitch: the host checkpoint is in %s and ends with this server", path)
        self.path = given or path

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._temporary.close()
