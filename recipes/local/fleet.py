"""The processes beside the trainer: a gateway, and replicas that come and go.

A supervisor as any cluster has one: a replica that dies is replaced by a fresh one, a gateway that dies comes
back on its port. Replicas find the run in the store and the gateway finds them there: nothing is wired here.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from .guard import Guard
from .settings import Settings

START_SECONDS, START_ATTEMPTS = 60.0, 3
DRAIN_SECONDS = 30.0
CLI = ("-m", "stitch_core.cli")


class FleetError(Exception):
    """A process did not start, or did not end as it should."""


@dataclass
class Child:
    """One process. It is replaced if it dies after it ``served``, but not when its end was asked for."""

    name: str
    process: asyncio.subprocess.Process
    url: str
    log: Path
    kv_mode: str | None = None
    served: bool = False
    ending: bool = False


@dataclass(frozen=True)
class Event:
    """Something happened to the fleet, ``at`` this wall time. ``label``: in two words, for the plot."""

    at: float
    text: str
    label: str = ""


@dataclass
class Fleet:
    """Starts, watches and ends the processes. ``scratch`` is for what they may lose. Close it in the end."""

    settings: Settings
    scratch: Path
    logs: Path
    events: list[Event] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    kv_modes: dict[str, str] = field(default_factory=dict)
    start_seconds: float = START_SECONDS

    def __post_init__(self) -> None:
        self.gateway: Child | None = None
        self.replicas: dict[str, Child] = {}
        self._started = 0
        self._guard = Guard(self.scratch)
        self._watchers: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------------------------ starting

    async def start_gateway(self, port: int = 0) -> str:
        """Its URL. It needs no replica to start."""
        store = self.settings.store_url
        child = await self._spawn(
            "gateway", [*CLI, "gateway", "--store", store, "--port", str(port), "--leave", "0", "--json"]
        )
        child.served = True
        self.gateway = child
        return child.url

    async def start_replica(self, kv_mode: str) -> None:
        """A new replica, once it serves the run. One that dies before it does is replaced as well."""
        for left in reversed(range(START_ATTEMPTS)):
            name, self._started = f"r{self._started}", self._started + 1
            self._note(f"{name} ({kv_mode}) is started")
            try:
                await self.start_named(name, kv_mode)
                return
            except FleetError as error:
                if not left:
                    raise
                self._note(str(error))

    async def start_named(
        self, name: str, kv_mode: str, *, program: Sequence[str] = CLI, engine: str = "embedded"
    ) -> str:
        """The URL of a replica that serves the run; ``program`` and ``engine`` may be a faulty one's."""
        self.kv_modes[name] = kv_mode
        s = self.settings
        options = [f"--engine-opt={key}={value}" for key, value in s.engine_options().items()]
        child = await self._spawn(name, [
            *program, "replica", "--store", s.store_url, "--run", s.run, "--base", os.fspath(s.boot),
            "--engine", engine, *options, "--kv-mode", kv_mode, "--id", name, "--port", "0",
            "--host-dir", os.fspath(self.scratch / name), "--poll", str(s.poll),
            "--drain", str(DRAIN_SECONDS), "--json",
        ])  # fmt: skip
        child.kv_mode = kv_mode
        self.replicas[name] = child
        await self._until_ready(child)
        return child.url

    async def _spawn(self, name: str, arguments: Sequence[str]) -> Child:
        log = self.logs / f"{name}.log"
        # The children run this very code, wherever it was found. One thread each: two cores serve them all.
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
        }
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *arguments, stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE, stderr=errors, env=environment, start_new_session=True,
            )  # fmt: skip
        self._guard.watch(process.pid)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                line = await process.stdout.readline()
            child = Child(name, process, json.loads(line)["url"], log)
        except (TimeoutError, ValueError, KeyError):
            await _end(process, signal.SIGKILL)
            self._guard.forget(process.pid)
            raise FleetError(f"{name} did not start: {_last_line(log)} ({log})") from None
        self._adopt(child)
        return child

    def _adopt(self, child: Child) -> None:
        """Watch it from now on."""
        self._guard.watch(child.process.pid)
        child.log.with_suffix(".pid").write_text(f"{child.process.pid}\n", encoding="utf-8")
        watcher = asyncio.create_task(self._watch(child))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _until_ready(self, child: Child) -> None:
        began, why = time.monotonic(), "no answer"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            while child.process.returncode is None and time.monotonic() < began + self.start_seconds:
                try:
                    async with session.get(f"{child.url}/ready") as response:
                        if response.status == 200:
                            child.served = True
                            seconds = time.monotonic() - began
                            text = f"{child.name} serves, {seconds:.1f} s after it listened"
                            self._note(text, f"{child.name} serves")
                            return
                        why = str((await response.json())["why_not_ready"])
                except (aiohttp.ClientError, TimeoutError, ValueError, KeyError):
                    pass
                await asyncio.sleep(0.1)
        raise FleetError(f"{child.name} did not become ready: {why} ({child.log})")

    # ------------------------------------------------------------------------------------------ watching

    async def _watch(self, child: Child) -> None:
        code = await child.process.wait()
        self._guard.forget(child.process.pid)
        if self.replicas.get(child.name) is child:
            del self.replicas[child.name]
        if child.ending or not child.served:
            return
        self._note(f"{child.name} died ({_ending(code)}): it is replaced")
        try:
            if child is self.gateway:
                await self.start_gateway(int(child.url.rpartition(":")[2]))
            else:
                await self.start_replica(str(child.kv_mode))
        except FleetError as error:
            self.failures.append(str(error))

    def _note(self, text: str, label: str = "") -> None:
        self.events.append(Event(time.time(), text, label))

    # -------------------------------------------------------------------------------------------- ending

    def kill(self, name: str) -> None:
        """SIGKILL, as from outside: the supervisor does not know that it was meant."""
        self._note(f"{name} is sent SIGKILL", f"{name} killed")
        self.replicas[name].process.kill()

    async def drain(self, name: str) -> None:
        """SIGTERM: the replica leaves rotation, lets its requests end, and exits. Raises FleetError."""
        child, began = self.replicas[name], time.monotonic()
        self._note(f"{name} is sent SIGTERM", f"{name} stops")
        child.ending = True
        code = await _end(child.process, signal.SIGTERM, DRAIN_SECONDS + 10)
        if code != 0:
            raise FleetError(f"{name} ended with {_ending(code)} on SIGTERM: {_last_line(child.log)}")
        self._note(f"{name} drained and left in {time.monotonic() - began:.1f} s")

    def oldest(self, kv_mode: str) -> str:
        """The replica of this mode that has served longest. Raises FleetError."""
        for child in self.replicas.values():
            if child.kv_mode == kv_mode and child.served and not child.ending:
                return child.name
        raise FleetError(f"no replica serves in mode {kv_mode}")

    async def retire(self) -> None:
        """End the gateway and every replica, in order."""
        children = [*self.replicas.values(), *([self.gateway] if self.gateway else [])]
        for child in children:
            child.ending = True
        await asyncio.gather(*(_end(child.process, signal.SIGTERM) for child in children))

    async def close(self) -> None:
        """End everything, by force where it does not go. The guard has the last word."""
        await self.retire()
        for watcher in list(self._watchers):
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await asyncio.to_thread(self._guard.close)


async def _end(process: asyncio.subprocess.Process, number: signal.Signals, patience: float = 10.0) -> int:
    """Send a signal and wait; SIGKILL after ``patience`` seconds."""
    if process.returncode is None:
        process.send_signal(number)
    try:
        async with asyncio.timeout(patience):
            return await process.wait()
    except TimeoutError:
        process.kill()
        return await process.wait()


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
