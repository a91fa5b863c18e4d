"""Simulated jobs around a run: collectors, compactors, an anchor job, readers without an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from ..anchors import Anchors
from ..chain import ChainReader, NoHead
from ..checkpoint import Checkpoint
from ..compactor import Compactor
from ..delta.sparse_layout import width_of
from ..host_checkpoint import HostCheckpoint, HostCheckpointError, RepresentationInvalid
from ..lineage import NoPlan
from ..manifest import read_payload_key, run_prefix
from ..ports import Store, StoreError
from ..records import place_of
from ..replica.anchoring import ReplicaAnchors
from ..replica.reconciler import Reconciler
from ..replica.service import Announcer, replica_key
from ..replica.staging import Announce, Stager, tell_nobody
from ..retention import Collector
from ..retry import Retry
from ..spans import Shape
from ..versions import PolicyVersion
from .process import SimulatedProcess
from .sim_keeper import hint
from .sim_world import BOOT, DISK, LAYOUT, World

SHORT = Retry(attempts=5, first=0.5, cap=10.0, deadline=90.0)
RECORD_LIFE = 15.0

FAILURES = (
    StoreError, NoHead, NoPlan, HostCheckpointError, RepresentationInvalid, OSError, ValueError,
)  # fmt: skip


class SimulatedJob:
    """A machine with one process, which a supervisor starts again when it dies."""

    def __init__(self, world: World, name: str, run: str) -> None:
        self.world, self.name, self.run = world, name, run
        self.machine = world.machine(name)
        self.process: SimulatedProcess | None = None
        self.errors: list[str] = []
        self._starts = 0

    async def supervise(self) -> None:
        while True:
            self._starts += 1
            process = self.process = SimulatedProcess(self.world.loop, f"{self.name}#{self._starts}")
            self.machine.files(process)
            life = process.spawn(self._live(process))
            ended = asyncio.ensure_future(process.ended.wait())
            await asyncio.wait([life, ended], return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            if life.done() and not process.dead:
                life.result()
            await asyncio.sleep(self.world.timing.restart * self.world.random.random())

    async def _live(self, process: SimulatedProcess) -> None:
        """Until the process dies."""
        raise NotImplementedError

    def _note(self, process: SimulatedProcess, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        self.errors.append(text)
        self.world.trace.add(f"{process.name}: {text}")


class SimulatedCollector(SimulatedJob):
    """Collects again and again; ``grace`` in seconds, ``every`` the mean pause.

    ``ahead``: seconds by which its wall clock is fast.
    """

    def __init__(
        self, world: World, name: str, run: str, *, grace: float, every: float = 40.0, ahead: float = 0.0
    ) -> None:
        super().__init__(world, name, run)
        self.grace, self.every, self.ahead = grace, every, ahead

    async def _live(self, process: SimulatedProcess) -> None:
        world = self.world
        collector = Collector(
            world.store(process), self.run, clock=world.clock(-self.ahead), rng=world.random,
            grace=self.grace, policy=SHORT,
        )  # fmt: skip
        while True:
            await asyncio.sleep(self.every * world.random.uniform(0.2, 1.8))
            try:
                sweep = await collector.collect()
                world.trace.add(
                    f"{process.name}: floor {sweep.floor}, {sweep.deleted} of {len(sweep.doomed)}"
                )
            except FAILURES as error:
                self._note(process, error)


SMALL = Shape(2, 4, 8)
"""Of few versions, so that short runs have aggregates to replace."""


class SimulatedCompactor(SimulatedJob):
    """Compacts again and again; ``grace`` in seconds for replaced aggregates.

    ``transcodes``: it knows the tensors' widths, so its spans are sparse, whatever the deltas are.
    """

    def __init__(
        self,
        world: World,
        name: str,
        run: str,
        *,
        grace: float,
        every: float = 10.0,
        transcodes: bool = False,
    ) -> None:
        super().__init__(world, name, run)
        self.grace, self.every = grace, every
        self.widths = {name: width_of(dtype) for name, (dtype, _) in LAYOUT.items()} if transcodes else None

    async def _live(self, process: SimulatedProcess) -> None:
        world, files = self.world, self.machine.files(process)
        work = DISK / "compact"
        files.remove_tree(work)
        files.make_dirs(work)
        compactor = Compactor(
            world.store(process), self.run, work, process.name, files=files, clock=world.clock(),
            rng=world.random, run_blocking=world.loop.run_blocking, grace=self.grace, policy=SHORT,
            shape=SMALL, widths=self.widths, say=lambda text: world.trace.add(f"{process.name}: {text}"),
        )  # fmt: skip
        while True:
            await asyncio.sleep(self.every * world.random.uniform(0.2, 1.8))
            try:
                done = await compactor.compact()
                if done.made or done.problems:
                    world.trace.add(f"{process.name}: {done.spans} spans, {dict(done.problems)}")
            except FAILURES as error:
                self._note(process, error)


class SlowStore:
    """A store whose reads take ``seconds`` longer: a joiner behind a thin line. ``asked`` is told of each."""

    def __init__(self, store: Store, seconds: float, asked: Callable[[str], None]) -> None:
        self._store, self._seconds, self._asked = store, seconds, asked

    async def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self._asked(key)
        await asyncio.sleep(self._seconds)
        return await self._store.read(key, start, length)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _Staging(SimulatedJob):
    """A job that stages versions on its machine; each of its reads takes ``slow`` seconds longer."""

    root = DISK / "host"
    slow = 0.0

    def _stager(self, process: SimulatedProcess, anchors: ReplicaAnchors | None = None) -> Stager:
        world, files = self.world, self.machine.files(process)
        store = cast(Store, SlowStore(world.store(process), self.slow, self._asks_for))
        host = HostCheckpoint(self.root, files, nonce=world.nonce, batch_bytes=20, part_bytes=16, workers=1)
        return Stager(
            store, ChainReader(store), host, BOOT, files=files, clock=world.clock(), rng=world.random,
            run_blocking=world.loop.run_blocking, activity=lambda _: None, anchors=anchors,
        )  # fmt: skip

    def _asks_for(self, key: str) -> None:
        """It is about to read an object."""

    def _anchors(self, process: SimulatedProcess, every: int) -> Anchors:
        world = self.world
        return Anchors(
            world.store(process), process.name, every=every, clock=world.clock(), rng=world.random,
            run_blocking=world.loop.run_blocking, policy=SHORT,
        )  # fmt: skip


class SimulatedAnchorJob(_Staging):
    """Uploads a full when the newest is ``every`` versions old."""

    every = 3

    async def _live(self, process: SimulatedProcess) -> None:
        world = self.world
        chain, stager, anchors = ChainReader(world.store(process)), None, self._anchors(process, self.every)
        while True:
            await asyncio.sleep(world.timing.poll * world.random.uniform(0.5, 2))
            try:
                head, _ = await chain.head(self.run)
                manifest = await chain.manifest(self.run, head)
                if manifest.representation.kind != "delta" or not await anchors.due(manifest):
                    continue
                stager = stager or self._stager(process)
                staged = await stager.stage(manifest)
                done = await anchors.anchor(manifest, staged.directory, self.machine.files(process))
                world.trace.add(f"{process.name}: a full of {manifest.version}: {done.new}")
            except FAILURES as error:
                self._note(process, error)


class SimulatedReader(_Staging):
    """Follows the head: a replica without an engine. ``applied`` is the version that it holds, proven.

    ``lag`` is what it sleeps before every look; ``anchor_every`` makes it upload fulls from its checkpoint.
    ``behind``: seconds by which the clock is late that it dates its record by.
    """

    def __init__(
        self, world: World, name: str, run: str, *, lag: float = 0.0, anchor_every: int | None = None
    ) -> None:
        super().__init__(world, name, run)
        self.lag, self.anchor_every, self.behind = lag, anchor_every, 0.0
        self.applied: int | None = None

    async def _live(self, process: SimulatedProcess) -> None:
        world = self.world
        self.applied = None
        chain = ChainReader(world.store(process))
        anchors = None
        if self.anchor_every is not None:
            anchors = ReplicaAnchors(
                self._anchors(process, self.anchor_every), files=self.machine.files(process),
                run_blocking=world.loop.run_blocking,
                say=lambda text: world.trace.add(f"{self.name}: {text}"),
            )  # fmt: skip
        stager = self._stager(process, anchors)
        said = _Said(self, stager)
        announcer = Announcer(
            world.store(process), cast(Reconciler, said), self.name, "", lifetime=RECORD_LIFE
        )
        process.spawn(announcer.run())
        failures = 0
        while True:
            try:
                head, _ = await chain.head(self.run)
                manifest = await chain.manifest(self.run, head)
                if manifest.number != self.applied:
                    staged = await stager.stage(manifest, said.on_fetch)
                    self._prove(process, staged.directory, manifest.state)
                    self.applied = manifest.number
                    world.trace.add(f"{process.name}: holds {manifest.version}")
                failures = 0
            except FAILURES as error:
                failures += 1
                self._note(process, error)
            pause = SHORT.delay(failures, world.random) if failures else world.timing.poll
            await asyncio.sleep(self.lag + pause * world.random.uniform(0.8, 1.2))

    def _prove(self, process: SimulatedProcess, directory: Path, state: str) -> None:
        if Checkpoint.open(directory, self.machine.files(process)).state() != state:
            self.world.judge.broken("truth: what a reader holds is the version", f"{self.name}: {state}")

    def _asks_for(self, key: str) -> None:
        """What it fetches is in its record by then, where nothing is wrong with the store."""
        world, plan = self.world, self.world.faults.plan
        faults = (plan.store_lost, plan.store_unknown, plan.store_late, plan.store_twice, plan.slow)
        if any(faults) or plan.outages or plan.lacks or plan.stall_every:
            return
        relative, digest = key.removeprefix(run_prefix(self.run)), None
        payload, place = read_payload_key(relative), place_of(relative)
        if payload is not None:
            manifest = world.judge.versions.get(PolicyVersion(self.run, payload[0]))
            digest = manifest.digest() if manifest is not None and manifest.epoch == payload[1] else None
        elif place is not None and place[3] is not None:
            digest = f"sha256:{place[2]}"
        record = world.bucket.objects.get(replica_key(self.name))  # which a collector may have taken
        if digest is not None and record is not None and digest not in json.loads(record)["fetching"]:
            world.judge.broken("retention: what is fetched is in the record", f"{self.name}: {key}")


class _Said:
    """What an Announcer asks of a reconciler: the record of a reader, by a clock of its own."""

    def __init__(self, reader: SimulatedReader, stager: Stager) -> None:
        self.rng, self._stager = reader.world.random, stager
        self._clock = reader.world.clock(reader.behind)
        self.on_update: Callable[[], None] = lambda: None
        self.on_fetch: Announce = tell_nobody

    def record(self, replica_id: str, address: str, lifetime: float) -> dict[str, Any]:
        return hint(replica_id, self._stager.fetching, self._clock.time(), lifetime)
