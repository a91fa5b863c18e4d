"""``stitch compact``: merge the deltas of a run into spans, so that joining does not grow with the run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from ..chain import NoHead
from ..checkpoint import Checkpoint
from ..compactor import GRACE, Compactor, Made, Pass
from ..delta.sparse_layout import width_of
from ..files import PosixFiles
from ..metered import SpanMetrics
from ..ports import Store, StoreError, SystemClock
from ..retry import Retry
from ..scratch import own_directory, temporary_directory
from ..threads import Threads
from ..versions import check_run_id
from .common import (
    Commands,
    UsageError,
    absolute_path,
    add_command,
    add_metrics,
    add_run,
    add_store,
    emit,
    exported,
    interval,
    job_name,
    opened_store,
    room,
    say,
    size_text,
    stop_on_signals,
)
from .gc import duration

NICE = 10


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "compact", run, "merge deltas into spans, so that joining stays cheap",
        "Merge the deltas of a run beside its chain: one aggregate from version 0 every 16 versions, and\n"
        "blocks of 4 and 16 after it, so that a replica that joins at any version fetches at most seven\n"
        "pieces, and one that lags few. It needs no weights and no GPU, may run anywhere, be killed at any\n"
        "time and run twice: nobody depends on it, and what is there is not made again.\n\n"
        "  stitch compact --store file:/data/stitch --run my-run --follow\n\n"
        "With --base the spans of a run of XOR deltas are half as large. With --follow replaced aggregates\n"
        "are deleted, all but the last two.",
    )  # fmt: skip
    add_store(parser)
    add_run(parser)
    parser.add_argument(
        "--base", type=absolute_path, metavar="DIR",
        help="the checkpoint that is version 0 of the run; only its tensors' types are read",
    )  # fmt: skip
    parser.add_argument("--follow", action="store_true", help="go on, until SIGTERM")
    parser.add_argument(
        "--until-eof", action="store_true", help="go on until stdin ends too: for a parent that may die"
    )
    parser.add_argument(
        "--poll", type=interval, default=10.0, metavar="S", help="seconds between looks at the head (10)"
    )
    parser.add_argument(
        "--grace", type=duration, default=GRACE, metavar="TIME",
        help="how long a replaced aggregate stays: 90s, 30m, 24h (1h)",
    )  # fmt: skip
    add_metrics(parser)
    parser.add_argument(
        "--work", type=absolute_path, metavar="DIR", help="scratch space (default: the system's)"
    )


async def run(options: argparse.Namespace) -> int:
    check_run_id(options.run_id)
    widths = None if options.base is None else _widths(options.base)
    threads, files = Threads(2, "stitch-compact"), PosixFiles()
    with contextlib.ExitStack() as stack:
        stack.callback(threads.close)
        metrics = SpanMetrics(stack.enter_context(exported(options.metrics)))
        if options.work is not None:
            work = stack.enter_context(own_directory(options.work, files))
        else:
            work = stack.enter_context(temporary_directory(files))
        async with opened_store(options.store) as store:
            stack.enter_context(room(work))
            job = _Job(options, store, work, threads, widths, metrics)
            if options.follow or options.until_eof:
                stop = stop_on_signals()
                with contextlib.suppress(OSError):
                    os.nice(NICE)  # it has time, whatever else this host does
                if options.until_eof:
                    asyncio.get_running_loop().add_reader(sys.stdin, _at_end, stop)
                await job.follow(stop)
                return 0
            try:
                return await job.once()
            except NoHead as error:
                raise UsageError(str(error)) from None


def _at_end(stop: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin)
        stop.set()


def _widths(base: Path) -> dict[str, int]:
    tensors = Checkpoint.open(base, PosixFiles()).tensors
    return {name: width_of(ref.dtype) for name, ref in tensors.items()}


class _Job:
    def __init__(
        self,
        options: argparse.Namespace,
        store: Store,
        work: Path,
        threads: Threads,
        widths: dict[str, int] | None,
        metrics: SpanMetrics,
    ) -> None:
        self._options, self._metrics = options, metrics
        self._compactor = Compactor(
            store, options.run_id, work, job_name(), files=PosixFiles(), clock=SystemClock(),
            rng=random.Random(), run_blocking=threads, grace=options.grace, widths=widths, say=say,
        )  # fmt: skip

    async def once(self) -> int:
        """1 if a span is missing in the end: another process is at it, or it cannot be made."""
        done = await self._compactor.compact()
        self._metrics.passed(self._options.run_id, done, time.time())
        self._emit(done)
        return 1 if done.busy or done.problems else 0

    async def follow(self, stop: asyncio.Event) -> None:
        """A line for each pass that did something. Errors are told once and tried again, with backoff."""
        backoff, failures, said = Retry(first=1.0, cap=60.0), 0, ""
        while not stop.is_set():
            pause = self._options.poll
            try:
                task = asyncio.ensure_future(self._compactor.compact(stop.is_set))
                done = await _or_stopped(task, stop)
                if done is not None:
                    self._metrics.passed(self._options.run_id, done, time.time())
                if done is not None and (done.made or done.deleted):
                    self._emit(done)
                failures, said = 0, ""
            except (StoreError, NoHead, ValueError, OSError) as error:
                failures += 1
                self._metrics.passed(self._options.run_id, None, time.time())
                pause = max(pause, backoff.delay(failures, random.Random()))
                if str(error) != said:
                    said = str(error)
                    say(said)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await stop.wait()

    def _emit(self, done: Pass) -> None:
        emit(as_json(self._options.run_id, done), self._options.json, lambda: _text(done))


async def _or_stopped(task: asyncio.Future[Pass], stop: asyncio.Event) -> Pass | None:
    stopping = asyncio.ensure_future(stop.wait())
    either: list[asyncio.Future[Any]] = [task, stopping]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


def as_json(run_id: str, done: Pass) -> dict[str, Any]:
    """A pass for scripts; bytes and seconds of each span that was made."""
    return {
        "run": run_id, "head": done.head, "root": done.root, "aggregate": done.aggregate,
        "spans": done.spans, "left": [list(r) for r in done.left], "busy": done.busy,
        "made": [_made(made) for made in done.made], "deleted": list(done.deleted),
        "problems": {f"{a}-{b}": why for (a, b), why in done.problems.items()},
    }  # fmt: skip


def _made(made: Made) -> dict[str, Any]:
    record = made.record
    return {
        "since": record.since, "number": record.number, "key": record.key, "digest": record.digest(),
        "encoding": record.representation.encoding, "pieces": made.pieces, "read": made.read,
        "bytes": made.bytes, "seconds": round(made.seconds, 3),
    }  # fmt: skip


def _text(done: Pass) -> str:
    made = ", ".join(f"{one.record.since}-{one.record.number} ({size_text(one.bytes)})" for one in done.made)
    lines = [
        f"head {done.head}, aggregate {done.root}-{done.aggregate}, {done.spans} spans; "
        f"made {made or 'nothing'}; deleted {len(done.deleted)}"
    ]
    if done.busy:
        lines.append(f"another process is merging; {len(done.left)} spans are left to it")
    lines += [f"no span {a}-{b}: {why}" for (a, b), why in done.problems.items()]
    return "\n".join(lines)
