"""Activation from images in memory beside the stock disk update, on one real SGLang server on the CPU.

Needs the environment of `make venv-sglang`. The server is a receiver; each version is a delta in which every
tensor changes, so that every activation copies the whole model, whichever way. Rounds are interleaved: staged
into images under traffic, loaded from files in memory under traffic, staged into images with nothing else to
do. Another server then stages under traffic without giving way to it, and a stock one loads a copy of the
model from a disk.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), *(str(path) for path in (ROOT / "plugins").iterdir())]

from benchmarks.harness import Row, at_least, at_most, run, say  # noqa: E402
from recipes.local.sglang_server import CPU_ARGUMENTS, environment  # noqa: E402
from stitch_core.cli.profile_server import HttpServer, Started, free_port  # noqa: E402
from stitch_core.delta.encoder import DeltaEncoder  # noqa: E402
from stitch_core.files import PosixFiles  # noqa: E402
from stitch_core.ports import SystemClock  # noqa: E402
from stitch_core.profile import Output, equals_reference, outputs, prompts_of  # noqa: E402
from stitch_core.safetensors import Tensor  # noqa: E402
from stitch_core.testing.models import nudge, qwen2_config, qwen2_tensors, write_qwen2  # noqa: E402
from stitch_core.traffic import Traffic  # noqa: E402
from stitch_core.versions import directory_name  # noqa: E402

CLOCK = SystemClock()
ARGUMENTS = (
    *CPU_ARGUMENTS, "--disable-overlap-schedule", "--max-total-tokens", "8192", "--max-running-requests", "8",
    "--chunked-prefill-size", "256",
)  # fmt: skip
TOKENS = 16
STREAMS = 2
PATIENCE = 600.0
SLACK_MS = 30.0
LARGE = 500_000_000
"""Bytes from which on a pause says something of the model."""


class Files(PosixFiles):
    """Without fsync: nobody cuts the power here, and the disk is not what is measured."""

    def sync(self, path: Path) -> None:
        pass


@dataclass
class Round:
    """One update. Seconds, tokens a second.

    ``pause`` is the whole call, with the wait for the step that runs; ``held`` the part of it in which the
    scheduler makes no step.
    """

    destination: str
    busy: bool
    stage: float = 0.0
    pause: float = 0.0
    held: float = 0.0
    copy: float = 0.0
    copied: int = 0
    step: float = 0.0
    idle_rate: float = 0.0
    stage_rate: float = 0.0
    memcpy: float = 0.0

    def text(self) -> str:
        return (
            f"{self.destination:5}{'traffic' if self.busy else 'no traffic':11} stage {self.stage:6.2f} s, "
            f"pause {self.pause:.3f} s, of it without steps {self.held:.3f}, copy {self.copy:.3f} s of "
            f"{self.copied / 1e6:.0f} MB (memcpy {self.memcpy:.3f}), "
            f"step {self.step * 1e3:.0f} ms, tokens/s {self.idle_rate:.1f} idle {self.stage_rate:.1f} staging"
        )


@dataclass
class Versions:
    """The boot checkpoint, and deltas that a stock trainer would have written; the last one is boot again."""

    root: Path
    nbytes: int
    count: int
    seed: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    source: Path = field(init=False)
    boot: Path = field(init=False)

    def __post_init__(self) -> None:
        self.config = qwen2_config(self.nbytes)
        self.boot, self.source = self.root / "boot", self.root / "source"
        self.tensors = qwen2_tensors(self.config, self.seed)
        write_qwen2(self.boot, Files(), self.config, self.tensors)

    def write(self) -> None:
        encoder = DeltaEncoder(self.tensors)
        for number in range(1, self.count + 1):
            # Each step is undone two versions later, so that an even count ends where it began.
            self.tensors = nudge(self.tensors, start=(number - 1) % 2)
            self._encode(encoder, number)
        self.tensors = {}

    def _encode(self, encoder: DeltaEncoder, number: int) -> None:
        directory = self.source / directory_name(number)
        encoder.encode(self.tensors, directory, Files(), number=number, base_number=number - 1)
        encoder.commit()


def sglang_python() -> Path | None:
    """The interpreter of SGLang's environment, if it was built."""
    command = [sys.executable, str(ROOT / "scripts" / "venv.py"), "path", "sglang"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    python = Path(done.stdout.strip()) / "bin" / "python"
    return python if python.exists() else None


@contextlib.asynccontextmanager
async def sglang(python: Path, model: Path, scratch: Path, **settings: str) -> AsyncIterator[HttpServer]:
    """A server, ready; ``settings`` are STITCH_* variables in lower case, without them it is a stock one."""
    port = free_port()
    command = [
        str(python), "-W", "ignore", "-m", "sglang.launch_server", "--model-path", str(model),
        "--port", str(port), *ARGUMENTS,
    ]  # fmt: skip
    variables = {f"STITCH_{name.upper()}": value for name, value in settings.items()}
    began = time.monotonic()
    started = Started(command, port, scratch / f"sglang-{port}.log", environment(scratch, variables))
    try:
        async with HttpServer.opened(started.url) as server:
            await started.until_healthy(server, "/ready" if settings else "/health")
            say(f"a server started in {time.monotonic() - began:.0f} s")
            yield server
    finally:
        await asyncio.to_thread(started.stop)


class Bench:
    """A receiver and what is asked of it. ``idle``: seconds of traffic before each update under traffic."""

    def __init__(self, server: HttpServer, versions: Versions, idle: float) -> None:
        self.server, self.versions, self.idle = server, versions, idle
        self.local = versions.root / "local"
        self.compared, self.load = prompts_of(3, STREAMS, seed=1)
        self.number = 0

    async def until_tested(self) -> None:
        """Until the self-test has allowed images."""
        deadline = time.monotonic() + PATIENCE
        while (said := await self._status())["destination"]["uses"] is None:
            if time.monotonic() > deadline:
                raise SystemExit("activation.py: the self-test does not end")
            await asyncio.sleep(0.2)
        if said["destination"]["uses"] != "cpu":
            raise SystemExit(f"activation.py: {said['destination']['why']}")
        say(f"self-test: {said['self_test']['seconds']:.1f} s")

    async def outputs(self) -> list[Output]:
        return await outputs(self.server, self.compared, TOKENS)

    async def update(self, destination: str, *, busy: bool) -> Round:
        """The next version, by ``destination``."""
        self.number += 1
        result = Round(destination, busy)
        # Long enough to outlast the update: what is measured is decoding.
        traffic = Traffic(self.server, self.load if busy else [], 1500, CLOCK)
        traffic.start()
        try:
            await traffic.flows(PATIENCE)
            began = CLOCK.monotonic()
            await asyncio.sleep(self.idle if busy else 0)
            pull = CLOCK.monotonic()
            await self._post("/pull_weights", {
                "local_checkpoint_dir": str(self.local), "source_dir": str(self.versions.source),
                "target_version": self.number, "destination": destination,
            })  # fmt: skip
            pulled = CLOCK.monotonic()
            await asyncio.sleep(self.idle / 2 if busy else 0)
            activate = CLOCK.monotonic()
            await self._post("/activate_weights", {"target_version": self.number})
            result.pause, result.stage = CLOCK.monotonic() - activate, pulled - pull
        finally:
            await traffic.stop(0)
        if busy:
            result.step = traffic.step(began, pull) or 0.0
            # Before and after, so that what else the machine does counts less.
            idle = (traffic.rate(began, pull) or 0.0) * (pull - began)
            idle += (traffic.rate(pulled, activate) or 0.0) * (activate - pulled)
            result.idle_rate = idle / (pull - began + activate - pulled)
            result.stage_rate = traffic.rate(pull, pulled) or 0.0
        last = (await self._status())["last_update"]
        if last["destination"] != destination:
            raise SystemExit(f"activation.py: version {self.number} went by {last['destination']}")
        result.held, result.copy, result.copied = last["pause"], last["copy"], last["bytes"]
        if destination == "cpu":
            result.memcpy = memcpy_seconds(result.copied)
        say(result.text())
        return result

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        status, answer = await self.server.ask("POST", path, body)
        if status != 200:
            raise SystemExit(f"activation.py: {path}: {status} {answer}")

    async def _status(self) -> dict[str, Any]:
        status, answer = await self.server.ask("GET", "/stitch/status")
        if status != 200:
            raise SystemExit(f"activation.py: /stitch/status: {status} {answer}")
        said: dict[str, Any] = answer
        return said


_BUFFERS: dict[int, tuple[Any, Any]] = {}


def memcpy_seconds(nbytes: int) -> float:
    """One thread's copy between buffers that are there already, the median of three.

    Into memory of ordinary pages, as the engine's weights lie in; numpy would ask for huge ones.
    """
    if nbytes not in _BUFFERS:
        _BUFFERS.clear()
        target = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        target.madvise(mmap.MADV_NOHUGEPAGE)
        _BUFFERS[nbytes] = np.ones(nbytes, np.uint8), np.frombuffer(target, np.uint8)
        np.copyto(_BUFFERS[nbytes][1], 0)
    source, into = (array.ctypes.data for array in _BUFFERS[nbytes])
    times = []
    for _ in range(3):
        began = time.perf_counter()
        ctypes.memmove(into, source, nbytes)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


async def measure(options: argparse.Namespace, python: Path, root: Path) -> list[Row]:
    rounds_wanted = 1 if options.quick else options.rounds
    nbytes = options.bytes or (100_000_000 if options.quick else 1_000_000_000)
    plan = [("cpu", False)] + [("cpu", True), ("disk", True), ("cpu", False)] * rounds_wanted
    # An even count, so that the last version has the weights of the boot checkpoint.
    plan += [("cpu", False)] * (len(plan) % 4 and 4 - len(plan) % 4)
    versions = await asyncio.to_thread(Versions, root, nbytes, len(plan))
    writing = asyncio.ensure_future(asyncio.to_thread(versions.write))
    settings = {
        "receive": "bench", "roots": str(root), "host_dir": str(root / "host"), "destination": "cpu",
    }  # fmt: skip
    idle = 2.0 if options.quick else 10.0
    found = Found(nbytes)
    async with sglang(python, versions.boot, root, **settings) as server:
        bench = Bench(server, versions, idle)
        await bench.until_tested()
        await writing
        fresh = await bench.outputs()
        for destination, busy in plan:
            found.rounds.append(await bench.update(destination, busy=busy))
            if bench.number == 1 and equals_reference(await bench.outputs(), fresh).ok:
                raise SystemExit("activation.py: another version gave the same output")
        found.equal = equals_reference(await bench.outputs(), fresh).ok
    if not options.quick:
        shutil.rmtree(root / "host")
        async with sglang(python, versions.boot, root, niceness="0", **settings) as server:
            equals = Bench(server, versions, idle)
            await equals.until_tested()
            for _ in range(1 + options.rounds):
                found.unthrottled.append(await equals.update("cpu", busy=True))
        found.compared = "another server that booted from that version"
        async with sglang(python, versions.boot, root) as server:
            found.equal &= equals_reference(await outputs(server, bench.compared, TOKENS), fresh).ok
            found.cold = await cold_updates(server, versions.boot, options.disk, options.rounds)
    return list(found.rows())


async def cold_updates(server: HttpServer, model: Path, disk: Path | None, count: int) -> list[float]:
    """Seconds of stock disk updates from a copy of ``model`` on a disk, none of it in memory; no traffic."""
    seconds = []
    with tempfile.TemporaryDirectory(prefix="stitch-activation-", dir=disk) as name:
        copy = Path(name) / "model"
        await asyncio.to_thread(shutil.copytree, model, copy)
        for number in range(count + 1):
            await asyncio.to_thread(forget_pages, copy)
            began = CLOCK.monotonic()
            status, answer = await server.ask(
                "POST", "/update_weights_from_disk", {"model_path": str(copy), "flush_cache": False}
            )
            if status != 200:
                raise SystemExit(f"activation.py: /update_weights_from_disk: {status} {answer}")
            if number:  # the first has warmed up what is not the disk
                seconds.append(CLOCK.monotonic() - began)
                say(f"stock disk update of files that are not in memory: {seconds[-1]:.3f} s")
    return seconds


def forget_pages(directory: Path) -> None:
    """Let the kernel's cache drop what it has of the files; a tmpfs keeps it."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@dataclass
class Found:
    """What was measured of a model of ``nbytes``; the first round of a server has warmed everything up.

    ``unthrottled``: rounds in which staging has the server's own priority. ``cold``: seconds of stock updates
    from the disk. ``compared`` is the server whose output is to be the same.
    """

    nbytes: int
    rounds: list[Round] = field(default_factory=list)
    unthrottled: list[Round] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    equal: bool = False
    compared: str = "the same server right after its start"

    def of(self, destination: str, *, busy: bool) -> list[Round]:
        return [one for one in self.rounds[1:] if (one.destination, one.busy) == (destination, busy)]

    def rows(self) -> Iterator[Row]:
        """The targets."""
        cpu, alone = self.of("cpu", busy=True), self.of("cpu", busy=False)
        yield from self._pauses(cpu, alone)
        copied = [one for one in (*cpu, *alone) if one.memcpy]
        yield at_most(
            "A2", "copy inside the pause / memcpy of the same bytes by one thread",
            median(one.copy / one.memcpy for one in copied), 1.3,
        )  # fmt: skip
        step = 1e3 * median(one.step for one in cpu)
        yield at_most(
            "A3", f"rest of the pause, median, ms (limit: a decoding step of {step:.0f} ms and {SLACK_MS:g})",
            1e3 * median(one.pause - one.copy for one in cpu), step + SLACK_MS, "the copy",
        )  # fmt: skip
        yield from self._staging(cpu, alone)
        what = f"tokens and log-probabilities bit-equal to {self.compared}"
        yield at_least("A5", what, float(self.equal), 1.0)

    def _pauses(self, cpu: list[Round], alone: list[Round]) -> Iterator[Row]:
        size = f"bf16 Qwen2 of {self.nbytes / 1e9:g} GB, {len(cpu)} rounds"
        if self.cold:
            yield at_most(
                "A1a", f"pause, cpu / stock disk update that reads its files from the disk ({size})",
                median(one.pause for one in alone) / statistics.median(self.cold), 0.2, "staging; traffic",
            )  # fmt: skip
        pause = median(one.held for one in cpu) / median(one.held for one in self.of("disk", busy=True))
        what = f"pause, cpu / stock disk update of files that lie in memory ({size})"
        excludes = "staging; the wait for a step, which A3 has"
        if self.nbytes >= LARGE:
            yield at_most("A1b", what, pause, 0.2, excludes)
        else:
            small = "no target below half a GB, where what every pause costs is as long as the copy"
            yield Row("A1b", what, pause, excludes=f"{excludes}; {small}")

    def _staging(self, cpu: list[Round], alone: list[Round]) -> Iterator[Row]:
        yield at_least(
            "A4a", "generation throughput, staging / idle",
            median(one.stage_rate / one.idle_rate for one in cpu), 0.8,
        )  # fmt: skip
        stage = median(one.stage for one in cpu)
        if self.unthrottled:
            fast = self.unthrottled[1:]
            rate = median(one.stage_rate / one.idle_rate for one in fast)
            yield at_most(
                "A4b", f"staging time / that at the server's priority (throughput then {rate:.2f} of idle)",
                stage / median(one.stage for one in fast), 3.0,
            )  # fmt: skip
        what = "staging time, under traffic / with nothing else to do"
        yield Row("A4c", what, stage / median(one.stage for one in alone))


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def main(options: argparse.Namespace) -> list[Row]:
    python = sglang_python()
    if python is None:
        say("activation.py: nothing is measured without SGLang's environment: make venv-sglang")
        return []
    parent = options.work or (Path("/dev/shm") if shutil.disk_usage("/dev/shm").free > 8 << 30 else None)
    with tempfile.TemporaryDirectory(prefix="stitch-activation-", dir=parent) as name:
        return asyncio.run(measure(options, python, Path(name)))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="of each kind (3)")
    parser.add_argument("--bytes", type=int, help="of the model (1e9; quick: 1e8)")
    parser.add_argument(
        "--disk", type=Path, help="where stock updates read a copy of the model (the system's)"
    )
    parser.add_argument("--work", type=Path, help="scratch: six times the model (/dev/shm if it has 8 GiB)")


if __name__ == "__main__":
    run(__doc__ or "", main, add_options)
