"""``stitch anchor``: upload fulls of a run's versions beside its chain, without the trainer."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ..anchors import Anchored, Anchors
from ..chain import ChainReader, NoHead
from ..checkout import stage_replanning
from ..files import PosixFiles
from ..fulls import Damage, find_full, read_files
from ..host_checkpoint import HostCheckpoint
from ..manifest import Manifest
from ..metered import CompactorMetrics
from ..ports import NotFound, Store, StoreError, SystemClock
from ..records import How
from ..replica.staging import Stager
from ..retry import Retry
from ..scratch import own_directory, temporary_directory
from ..stores.transfer import DigestMismatch
from ..threads import Threads
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
    positive,
    room,
    say,
    size_text,
    stop_on_signals,
    version_number,
)
from .target import Target, resolve


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "anchor", run, "upload a full of a version beside the chain",
        "Upload a version as a full checkpoint, so that joiners and replicas that lag start from it instead\n"
        "of from every delta before it, and so that the publisher may raise the run's floor to it. Nothing\n"
        "is uploaded twice: a full that is there, or that another process is uploading, is left to it.\n\n"
        "  stitch anchor --store file:/data/stitch --run my-run --base /models/base --every 32 --follow\n\n"
        "With --base the version is built from the boot checkpoint and the store, in scratch space. With\n"
        "--from-checkpoint DIR is taken as it is, and must be the version to the bit.\n\n"
        "  stitch anchor --store file:/data/stitch --run my-run --base /models/base --version 9 --replace\n\n"
        "--replace is for a full that replicas cannot use: it is read back, and where its bytes are not\n"
        "what they should be, that is said, another is put beside it, and the record of the damaged one is\n"
        "removed. Its files stay until they are collected.",
    )  # fmt: skip
    add_store(parser)
    add_run(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--base", type=absolute_path, metavar="DIR", help="the checkpoint that is version 0 of the run"
    )
    source.add_argument(
        "--from-checkpoint", type=absolute_path, metavar="DIR", help="a checkpoint directory of the version"
    )
    parser.add_argument(
        "--version", type=version_number, metavar="N", help="the version (default: the newest)"
    )
    parser.add_argument(
        "--every", type=positive, metavar="K", help="only if the newest full is K versions old or older"
    )
    parser.add_argument(
        "--replace", action="store_true",
        help="read back the full that is there, and put another beside it if it is damaged",
    )  # fmt: skip
    parser.add_argument(
        "--follow", action="store_true", help="go on, until SIGTERM; needs --every and --base"
    )
    parser.add_argument(
        "--poll", type=interval, default=10.0, metavar="S", help="seconds between looks at the head (10)"
    )
    add_metrics(parser)
    parser.add_argument(
        "--work", type=absolute_path, metavar="DIR",
        help="scratch space (default: tmpfs where the model fits twice, else the system's)",
    )  # fmt: skip


async def run(options: argparse.Namespace) -> int:
    if options.follow and (options.every is None or options.base is None):
        raise UsageError("--follow needs --every K and --base DIR")
    if options.version is not None and options.every is not None:
        raise UsageError("--version names one version, --every takes the newest: use one of them")
    if options.replace and options.every is not None:
        raise UsageError("--replace is for one version: name it with --version N, without --every")
    with exported(options.metrics) as exporter:
        return await _run(options, CompactorMetrics(exporter))


async def _run(options: argparse.Namespace, metrics: CompactorMetrics) -> int:
    async with opened_store(options.store) as store, _job(options, store, metrics) as job:
        if options.follow:
            await job.follow(options.run_id, stop_on_signals(), options.poll)
            return 0
        reader = ChainReader(store)
        manifest, _ = await resolve(reader, Target(options.run_id, options.version))
        return 0 if await job.one(manifest) else 1


class _Job:
    def __init__(
        self,
        options: argparse.Namespace,
        store: Store,
        work: Path,
        threads: Threads,
        metrics: CompactorMetrics,
    ) -> None:
        self._options, self._store, self._threads, self._metrics = options, store, threads, metrics
        self._anchors = Anchors(
            store, job_name(), every=options.every or 1, clock=SystemClock(), rng=random.Random(),
            run_blocking=threads,
        )  # fmt: skip
        self._chain = ChainReader(store)
        self.host = HostCheckpoint(work / "host", PosixFiles())
        self._stager = Stager(
            store, self._chain, self.host, options.base, files=PosixFiles(), clock=SystemClock(),
            rng=random.Random(), run_blocking=threads, activity=say,
        )  # fmt: skip

    async def one(self, manifest: Manifest) -> bool:
        """Anchor a version if it is due; whether a full of it (or a newer one) is there."""
        damage = Damage(lambda problem: say(f"a full of {manifest.version} is damaged: {problem}"))
        if self._options.replace and await self._sound(manifest, damage):
            return True
        if manifest.representation.kind == "full" and not damage.problems:
            self._emit(manifest, "is a full already")
            return True
        if self._options.every is not None and not await self._anchors.due(manifest, self._known(damage)):
            self._emit(manifest, f"is less than {self._options.every} versions after the newest full")
            return True
        began = time.monotonic()
        directory = self._options.from_checkpoint
        if directory is None:
            directory = (await stage_replanning(self._stager, manifest)).directory
        done = await self._anchors.anchor(manifest, directory, PosixFiles(), damage=self._known(damage))
        if self._options.replace and done.record is not None:
            for key in damage.keys.values():  # whoever starts from it would be turned away
                await self._store.delete(key)
        self._emit(manifest, _what(done), done, damage)
        if done.new and done.record is not None:
            size, took = done.record.representation.bytes, time.monotonic() - began
            self._metrics.anchored(manifest.run, manifest.number, size, took)
        self._metrics.passed(manifest.run, "anchored" if done.new else "left", time.time())
        return done.record is not None

    async def _sound(self, manifest: Manifest, damage: Damage) -> bool:
        """Read back what full there is of a version, and say so if it is as it should be."""
        how: How = {"policy": Retry(), "rng": random.Random(), "run_blocking": self._threads}
        if manifest.representation.kind == "full":
            try:
                await read_files(self._store, manifest, how)
            except (NotFound, DigestMismatch) as error:
                damage.add(manifest.digest(), str(error))
            else:
                self._emit(manifest, "is a full already, read back and sound")
                return True
        record = await find_full(
            self._store, manifest, manifest.run, how=how, damage=damage, read_back=True
        )  # fmt: skip
        if record is not None:
            self._emit(manifest, "has a full beside the chain, read back and sound", Anchored(record), damage)
        return record is not None

    def _known(self, damage: Damage) -> Damage:
        """And what staging found out."""
        for digest in self._stager.excluded | self._stager.doubts.damaged():
            damage.problems.setdefault(digest, "its bytes are not what was announced")
        return damage

    async def follow(self, run_id: str, stop: asyncio.Event, poll: float) -> None:
        """Errors are told once and tried again, with backoff."""
        backoff, failures, said = Retry(first=1.0, cap=60.0), 0, ""
        while not stop.is_set():
            pause = poll
            try:
                head, _ = await self._chain.head(run_id)
                manifest = await self._chain.manifest(run_id, head)
                if manifest.representation.kind == "delta" and await self._anchors.due(manifest):
                    await self._until(stop, self.one(manifest))
                else:
                    self._metrics.passed(run_id, "idle", time.time())
                failures, said = 0, ""
            except (StoreError, NoHead, ValueError, OSError) as error:
                failures += 1
                self._metrics.passed(run_id, "failed", time.time())
                pause = max(poll, backoff.delay(failures, random.Random()))
                if str(error) != said:
                    said = str(error)
                    say(said)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await stop.wait()

    async def _until(self, stop: asyncio.Event, work: Any) -> None:
        task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
        await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return
        task.result()

    def _emit(
        self, manifest: Manifest, what: str, done: Anchored | None = None, damage: Damage | None = None
    ) -> None:
        record = done.record if done else None
        result = {
            "version": str(manifest.version), "state": manifest.state, "new": bool(done and done.new),
            "record": record.key if record else None, "digest": record.digest() if record else None,
            "bytes": record.representation.bytes if record else None, "what": what,
            "damaged": list(damage.keys.values()) if damage else [],
        }  # fmt: skip
        emit(result, self._options.json, lambda: f"{manifest.version} {what}")


def _what(done: Anchored) -> str:
    if done.record is None:
        return "is left alone: another process is uploading a full of this run, or was a minute ago"
    size = size_text(done.record.representation.bytes)
    return f"is a full beside the chain now, {size}" if done.new else f"has a full beside the chain, {size}"


@contextlib.asynccontextmanager
async def _job(options: argparse.Namespace, store: Store, metrics: CompactorMetrics) -> AsyncIterator[_Job]:
    threads = Threads(2, "stitch-anchor")
    with contextlib.ExitStack() as stack:
        stack.callback(threads.close)
        if options.work is not None:
            work = stack.enter_context(own_directory(options.work, PosixFiles()))
        else:
            work = stack.enter_context(temporary_directory(PosixFiles(), options.base))
        stack.enter_context(room(work))
        job = _Job(options, store, work, threads, metrics)
        try:
            yield job
        finally:
            await threads(job.host.close)
