"""From a target manifest to verified bytes on this host: plan, fetch, apply. Serving goes on meanwhile.

Owned by the reconciler's task.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..chain import ChainReader
from ..checkpoint import CheckpointError
from ..doubts import Doubts
from ..host_checkpoint import HostCheckpoint, HostCheckpointError, RepresentationInvalid
from ..lineage import NoPlan, Plan, Source
from ..manifest import Manifest
from ..planner import Planner
from ..ports import Clock, Files, NotFound, RunBlocking, Store
from ..state import TensorTable, state_digest
from ..stores.transfer import DigestMismatch
from .anchoring import ReplicaAnchors
from .boot import BootCheckpoint
from .fetching import Fetcher, Wanted
from .progress import reported
from .room import gib


class WrongBase(Exception):
    """The checkpoint that the engine booted from is not version 0 of the run: no delta can be applied."""


class NoRoom(Exception):
    """A version does not fit on this host; nothing was fetched for it."""


@dataclass(frozen=True)
class Staged:
    """What staging one version took: bytes fetched, seconds to fetch, seconds to apply and verify.

    ``directory`` is the checkpoint and ``table`` its tensors, until the next version is staged.
    """

    bytes: int
    fetch: float
    apply: float
    directory: Path
    table: TensorTable = field(repr=False)


class Staging(Protocol):
    """Stager, wherever it runs. ``fetching``: digests of the manifests whose files are being fetched."""

    @property
    def fetching(self) -> tuple[str, ...]: ...
    async def boot(self) -> BootCheckpoint: ...
    async def stage(self, target: Manifest, announce: Announce) -> Staged: ...


Announce = Callable[[], Awaitable[None]]
"""Tells others what ``fetching`` says; returns when they know, or cannot be told, and never raises."""


async def tell_nobody() -> None:
    """An Announce for what no collector runs beside, or what can do without anything that it fetches."""


class Stager:
    """Brings the host checkpoint to a version.

    ``boot`` is the checkpoint directory the engine boots from; without one only fulls lead anywhere.
    """

    def __init__(
        self,
        store: Store,
        chain: ChainReader,
        host: HostCheckpoint,
        boot: Path | None,
        *,
        files: Files,
        clock: Clock,
        rng: random.Random,
        run_blocking: RunBlocking,
        activity: Callable[[str], None],
        fetcher: Fetcher | None = None,
        anchors: ReplicaAnchors | None = None,
        room: Callable[[Path], int] | None = None,
    ) -> None:
        """``activity`` is told what is going on, in a word or two; where that goes through a whole model also
        how far it is, once a second: ``WHAT: hashed 1.00 GiB of 2.00 GiB``. ``fetcher``: for threads or a
        cache; ``anchors`` uploads fulls of what was staged; ``room``: bytes that can be written below a
        directory (default: what the file system says).
        """
        self.host = host
        self.fetching: tuple[str, ...] = ()
        self._store, self._chain, self._boot, self._files = store, chain, boot, files
        self._clock, self._rng, self._run_blocking, self._activity = clock, rng, run_blocking, activity
        self._fetcher = fetcher or Fetcher(store, files, run_blocking, rng)
        self._anchors = anchors
        self._room = room or files.free_bytes
        self._planner = Planner(store, chain)
        self.excluded: set[str] = set()
        """Digests of sources whose files are what their records say, and that do not lead where they say."""
        self.doubts = Doubts(clock, rng)
        self._missing: set[str] = set()
        self._start_over = False
        self._read: BootCheckpoint | None = None

    async def boot(self) -> BootCheckpoint:
        """The boot checkpoint, read once. Raises CheckpointError, OSError."""
        if self._read is None:
            if self._boot is None:
                raise CheckpointError("no base checkpoint was given")
            with reported(self._activity, "reading the boot checkpoint", self._clock) as progress:
                self._read = await self._run_blocking(
                    BootCheckpoint.read, self._boot, self._files, self.host.workers, progress
                )
        return self._read

    async def stage(self, target: Manifest, announce: Announce = tell_nobody) -> Staged:
        """Afterwards the host checkpoint holds ``target``, verified; on any failure what it held, or nothing.

        ``announce`` is awaited when ``fetching`` says what will be fetched, before the first byte is.
        A source whose bytes were not those of its record is used again when no other plan is left, after a
        delay; one that is not there (a collector may have taken it meanwhile) not in the next plan, if there
        is another. A source that is wrong by its own record is not used again by this process. Raises
        WrongBase, and what stands in the way otherwise.
        """
        version0 = await self._chain.boot(target)
        if self._boot is not None:
            await self._check_base(version0)
        await self._open(version0)
        plan = await self._plan(target, version0)
        await self._run_blocking(self._check_room, plan)
        self.fetching = tuple(source.digest() for source in plan.sources)
        try:
            self._activity("fetching")
            if self.fetching:
                await announce()
            began = self._clock.monotonic()
            directories = await self._fetch(plan.sources)
            fetched = self._clock.monotonic()
            if self._anchors is not None:
                await self._anchors.make_way()
            await self._with_host("staging", self.host.apply, plan, lambda s: directories[s.digest()])
            await self._run_blocking(self._files.remove_tree, self.host.root / "fetch")
            self._missing.clear()
            self.doubts.settle(self.fetching)
        except RepresentationInvalid as error:
            # The first time a read may have been bad; before the second the files are hashed anew.
            if self.doubts.add(error.manifest_digest, error) > 1:
                self.excluded.add(error.manifest_digest)
                self.doubts.settle([error.manifest_digest])
            raise
        except HostCheckpointError:
            self._start_over = True
            raise
        finally:
            self.fetching = ()
        applied = self._clock.monotonic() - fetched
        if self._anchors is not None:
            self._anchors.staged(
                target, self.host.directory, frozenset(self.excluded | self.doubts.damaged())
            )
        return Staged(plan.bytes, fetched - began, applied, self.host.directory, dict(self.host.table))

    async def _check_base(self, version0: Manifest) -> None:
        state = state_digest((await self.boot()).table)
        if state != version0.state:
            self._read = None  # one bad read is no other checkpoint
            state = state_digest((await self.boot()).table)
        if state != version0.state:
            raise WrongBase(
                f"the base checkpoint {self._boot} is not version 0 of run {version0.run}: its state is "
                f"{state}, version 0 ({version0.representation.source}) has {version0.state}"
            )

    def _check_room(self, plan: Plan) -> None:
        need, free = self.host.room_needed(plan), self._room(self.host.root)
        if need > free:
            raise NoRoom(
                f"staging {plan.target.version} takes up to {gib(need)} ({need} bytes) at {self.host.root}, "
                f"{gib(free)} ({free} bytes) are free"
            )

    async def _open(self, version0: Manifest) -> None:
        """Make the host checkpoint hold something to start from, the boot version if nothing else."""
        if self.host.holding is None:
            await self._with_host("verifying the host checkpoint", self.host.open)
        # What an apply could not go on from, the next one cannot either.
        if self._start_over or (self.host.holding is None and self.host.interrupted is None):
            if self._boot is not None:
                await self._seed(version0)
            self._start_over = False

    async def _seed(self, version0: Manifest) -> None:
        assert self._boot is not None
        await self._with_host("copying the boot checkpoint", self.host.seed, self._boot, version0)

    async def _with_host(self, what: str, call: Callable[..., Any], *arguments: Any) -> None:
        with reported(self._activity, what, self._clock) as self.host.progress:
            await self._run_blocking(call, *arguments)

    async def _plan(self, target: Manifest, version0: Manifest) -> Plan:
        interrupted = self.host.interrupted
        held = {interrupted.base_state} if interrupted else self._held()
        if self._boot is None:
            return await self._cheapest(target, self._held())
        plan = await self._cheapest(target, held | {version0.state})
        if interrupted is not None and not interrupted.fits(plan):
            await self._seed(version0)
            return await self._plan(target, version0)
        if plan.base is not None and plan.base not in held:
            await self._seed(version0)
        return plan

    async def _cheapest(self, target: Manifest, starts: set[str]) -> Plan:
        """Without sources that were not there, or not as recorded, unless there is no other way."""

        async def without(avoided: set[str]) -> Plan:
            return await self._planner.plan(target, starts, self.excluded | self._missing | avoided)

        try:
            return await self.doubts.around(without)
        except NoPlan:
            if not self._missing:
                raise
        self._missing.clear()
        return await self.doubts.around(without)

    def _held(self) -> set[str]:
        return {self.host.holding.state} if self.host.holding else set()

    async def _fetch(self, sources: Sequence[Source]) -> dict[str, Path]:
        """The files of each source, verified, in a directory of its own; by the source's digest."""
        directories: dict[str, Path] = {}
        wanted: dict[Wanted, str] = {}
        for source in sources:
            digest = source.digest()
            directory = directories[digest] = self.host.root / "fetch" / digest.removeprefix("sha256:")[:24]
            await self._run_blocking(self._files.make_dirs, directory)
            for file in source.representation.files:
                path = directory / file.name
                wanted[Wanted(source.file_key(file.name), path, file.size, file.sha256)] = digest

        def failed(file: Wanted, error: Exception) -> None:
            if isinstance(error, DigestMismatch):
                self.doubts.add(wanted[file], error)
            elif isinstance(error, NotFound):
                self._missing.add(wanted[file])

        await self._fetcher.fetch(list(wanted), failed)
        return directories
