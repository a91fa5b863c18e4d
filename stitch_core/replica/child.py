"""A child process that carries out commands one at a time, so that their work is off the parent's GIL.

Both ends: JSON lines on the child's stdin and stdout. ``{"result": ...}`` or ``{"error": text, "kind":
name}`` ends a command, any other message before that is a note; after one with ``"waits": true`` the child
waits for a line. The child exits when its stdin ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable
from typing import Any

from ..digits import whole
from ..parallel import default_workers

LINE_BYTES = 1 << 30  # a table of every tensor is one line
NICENESS = 8
"""How far work beside an engine stands back behind serving: on a core that both want, it gets a seventh."""

LEAST_PRIORITY = 19
"""That Linux has."""

Json = dict[str, Any]


def niceness() -> int:
    """As nice(1) counts it: STITCH_NICENESS, by default ``NICENESS``. Raises ValueError."""
    return whole(os.environ.get("STITCH_NICENESS") or str(NICENESS), most=LEAST_PRIORITY)


def spare_workers() -> int:
    """Threads for that work: at most on half the CPUs, so that serving has the others to itself."""
    return default_workers(shares=2)


class CommandFailed(Exception):
    """What the child says went wrong, or that it ended. ``kind`` is the name of the child's exception."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class Child:
    """The parent's end. Started by the first call, and by the next one after it died. Owned by one task."""

    def __init__(
        self,
        module: str,
        arguments: tuple[str, ...],
        note: Callable[[Json], None] = lambda message: None,
        waited_for: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """``waited_for`` is awaited after a note with which the child waits."""
        self._command = (sys.executable, "-m", module, *arguments)
        self._note, self._waited_for = note, waited_for
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def call(self, **command: Any) -> Any:
        """The result of one command. Raises CommandFailed."""
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, limit=LINE_BYTES
            )
        try:
            return await self._converse(self._process, command)
        except CommandFailed:
            raise
        except BaseException:
            # Half a conversation: the next answer would not be the next question's.
            await self.close()
            raise

    async def close(self) -> None:
        """End the child; closing twice is fine."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _converse(self, process: Process, command: Json) -> Any:
        assert process.stdout is not None
        await self._send(process, command)
        while line := await process.stdout.readline():
            message = json.loads(line)
            if "error" in message:
                raise CommandFailed(message["error"], message["kind"])
            if "result" in message:
                return message["result"]
            self._note(message)
            if message.get("waits"):
                if self._waited_for is not None:
                    await self._waited_for()
                await self._send(process, {})
        self._process = None
        raise CommandFailed(f"the child process ended with status {await process.wait()}")

    async def _send(self, process: Process, message: Json) -> None:
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # a child that is gone shows at the read
            process.stdin.write(json.dumps(message).encode() + b"\n")
            await process.stdin.drain()


_received: asyncio.Queue[Json] = asyncio.Queue()
"""What the parent sent to this process, if it is a child."""


def tell(**message: Any) -> None:
    """The child's end: one line to the parent."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


async def ask(**message: Any) -> None:
    """The child's end: a note; returns when the parent has done what is due after it."""
    tell(**message, waits=True)
    await _received.get()


async def obey(answer: Callable[[Json], Awaitable[Any]]) -> None:
    """The child's end: answer commands. Never returns, since the end of stdin ends the process."""
    # A signal to the process group is the parent's to act upon.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(_received.put_nowait, json.loads(line))
        os._exit(0)

    reading = loop.run_in_executor(None, read)
    while not reading.done():
        command = await _received.get()
        try:
            result = await answer(command)
        except Exception as error:  # the parent decides what a failure means
            tell(error=str(error) or type(error).__name__, kind=type(error).__name__)
        else:
            tell(result=result)
