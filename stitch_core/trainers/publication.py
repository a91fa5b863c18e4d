"""Publishing from a group of processes: one claim, files uploaded where they lie, one manifest.

Rank 0 holds the claim, the table of the newest version's tensors and the publisher; the others upload. Every
call here is made by every rank, and ends alike on every rank.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..chain import ChainReader
from ..channels import move_channel
from ..checkout import base_row
from ..compacting import CompactorProcess
from ..files import PosixFiles
from ..fleet import wait_for_replicas
from ..head import Channel
from ..manifest import FormatError, Manifest, Row
from ..payload import Boot, Payload
from ..ports import Files, FileSource, NotFound, Store, SystemClock, TrainerGroup
from ..publisher import Publisher, PublishError
from ..retry import Retry
from ..state import TensorTable, state_digest
from ..stores import open_store
from ..stores.bounded import BoundedStore
from ..stores.transfer import upload
from ..threads import LoopThread
from ..versions import directory_name
from ..waking import Waker
from .base import BaseCheckout
from .boot import Proven, prove_copies
from .group import RanksFailed, together
from .hosts import naming_host
from .prover import Prover
from .receipts import Duty, Listing, Part, Receipt, assign, carry_out, judge, list_version
from .record import RunRecord
from .settings import TrainerSettings

STORE_SECONDS = 60.0
PARALLEL_UPLOADS = 8

logger = logging.getLogger("stitch")


class FleetLate(RanksFailed):
    """The version is published, and too few replicas serve it in time: the trainer was told to stop then."""


@dataclass(frozen=True)
class Own:
    """A version that Stitch's own encoder has written: what this rank's process knows of it.

    ``files`` are those that this rank has written, on rank 0 with the index; ``state`` is, on rank 0, what
    the encoders of all ranks hold now.
    """

    files: tuple[str, ...]
    state: str | None = None


@dataclass(frozen=True)
class Start:
    """What a claim found: the head's number, and the epoch that it began.

    ``base`` is the version that the next delta builds on, None for version 0.
    """

    number: int
    epoch: int
    base: Row | None = None


class GroupPublisher:
    """One trainer's publisher, in every one of its processes."""

    def __init__(
        self,
        settings: TrainerSettings,
        group: TrainerGroup,
        *,
        files: Files | None = None,
        store: Callable[[], Store] | None = None,
        producer: Mapping[str, Any] | None = None,
    ) -> None:
        """No I/O yet; collective with ``async_``. ``store`` opens the store (by default the settings' one).

        ``on_published`` is called on rank 0 with each version that the head names.
        """
        self.settings, self.group = settings, group
        self._files = files or PosixFiles()
        self._open = store or (lambda: open_store(settings.store))
        self._producer = dict(producer or {})
        self._retry = Retry(attempts=None, deadline=settings.patience)
        self._loop = LoopThread("stitch-publish")
        self._store: Store = BoundedStore(self._open(), STORE_SECONDS)
        self._publisher: Publisher | None = None
        self._prover: Prover | None = None
        self._compacting: CompactorProcess | None = None
        self._waker = Waker(())
        self._checkout = BaseCheckout(settings, group, self._store, self._files, self._loop.run)
        self._table: TensorTable = {}
        self.proven = self._boot = Proven(settings.boot, {}, {})
        self.behind: TrainerGroup | None = group.twin() if settings.async_ else None
        self.base = settings.boot
        self.start: Start | None = None
        self.number = 0
        self.on_published: Callable[[Manifest], None] = lambda _: None
        self._reserved: int | None = None
        self._asked: dict[str, Any] = {}
        self._pointed = True

    def claim(self, saved: Callable[[], RunRecord | None] = lambda: None) -> Start:
        """Prove the boot checkpoint, become the run's writer, and fence the one before.

        ``saved``, asked on rank 0, is the record of the checkpoint that the trainer goes on from. The next
        delta builds on ``base``, a checkpoint directory on every host that is what is ``proven``: the
        framework's snapshot is to be taken from there, and ``release_base`` called then. All of that is there
        before anybody is fenced. Raises RanksFailed.
        """
        self._boot = prove_copies(self.settings.boot, self._files, self.group)
        what = f"claiming run {self.settings.run}"
        looked = together(self.group, what, lambda: self._look_here(saved))[0]
        self._build_on(looked)
        claimed = together(self.group, what, lambda: self._claim_here(looked))[0]
        assert claimed is not None
        self.start, self.number, self._reserved = claimed, claimed.number, None
        if claimed.base != looked:
            self._build_on(claimed.base)
        return claimed

    def _build_on(self, row: Row | None) -> None:
        self.proven = self._boot if row is None else self._checkout.check_out(row)
        self.base, self._table = self.proven.directory, self.proven.table

    def check_snapshot(self) -> None:
        """A framework's encoder has read ``base`` by itself, on every host: it must be what was proven still.

        Stitch's own encoder compares what it reads. Raises RanksFailed.
        """
        what = f"taking the snapshot of run {self.settings.run} from {self.base}"

        @naming_host()
        def check() -> None:
            self.proven.check_unchanged(self._files)

        together(self.group, what, check)

    def release_base(self) -> None:
        """The snapshot is taken from ``base``, on every rank: it is not needed any more."""
        if self.base != self.settings.boot:
            self._checkout.release()
            self.base = self.settings.boot

    def reserve(self) -> int:
        """The number of the next version; the same one until ``publish`` uses it up, however that ends."""
        if self._reserved is not None:
            return self._reserved

        def here() -> int | None:
            return self._loop.run(self._reserve_here()) if self.group.rank == 0 else None

        number = together(self.group, f"numbering a version of run {self.settings.run}", here)[0]
        assert number is not None
        self._reserved = number
        return number

    def publish(self, directory: Path, number: int, *, step: int | None = None) -> int:
        """Make the delta in ``directory`` (on whichever hosts its files lie) version ``number``.

        Returns when the head names it, and as many replicas serve it as the settings ask for. Raises
        RanksFailed on every rank otherwise: then the framework's own base has moved and the trainer has to
        stop.
        """
        self.use(number)
        self.deliver(directory, number, self.group, step=step)
        self.wait_for_fleet(number, self.group)
        return number

    def use(self, number: int) -> None:
        """``number`` is now used up; it must be the reserved one. Raises RanksFailed."""
        reserved, self._reserved = self.reserve(), None
        if number != reserved:
            raise RanksFailed(
                f"publishing {directory_name(number)} of run {self.settings.run}: the run goes on at "
                f"{reserved}, and the framework's own counter says {number}; it is set at start by Stitch's "
                "hook in --custom-megatron-init-path"
            )

    def deliver(
        self,
        directory: Path,
        number: int,
        group: TrainerGroup,
        *,
        step: int | None = None,
        own: Own | None = None,
    ) -> None:
        """Publish a number that was used, on any one thread; ``group`` is that thread's own.

        Its files are those that each rank has written, by ``own``, or those that the index on rank 0's host
        names. Returns when the head names it. Raises RanksFailed on every rank, which says at what it failed.
        """
        what = f"publishing {directory_name(number)} of run {self.settings.run}"

        def look() -> tuple[str | None, Listing | None]:
            prefix, first = self._prefix(number), group.rank == 0
            return prefix, None if own else list_version(directory, self._files, index=first)

        seen = together(group, f"{what} (listing)", look)
        prefix, listings = seen[0][0] or "", [listing for _, listing in seen if listing]
        duty = Duty(own.files) if own else Duty()
        if listings:
            share = lambda: assign(listings, str(directory))[group.rank]  # noqa: E731
            duty = together(group, f"{what} (listing)", share)[group.rank]
        parts = together(group, f"{what} (uploading)", lambda: self._upload(directory, duty, prefix))
        state = None if own is None else own.state
        finish = lambda: self._finish(directory, number, parts, prefix, step, state)  # noqa: E731
        together(group, f"{what} (moving the head)", finish)
        self.number = number
        self._clean(directory)

    def wait_for_fleet(self, number: int, group: TrainerGroup) -> None:
        """Wait for the replicas that the settings ask for. Raises FleetLate where they say so."""
        settings = self.settings
        wanted = settings.wait_replicas
        if wanted is None:
            return

        def here() -> str | None:
            return None if group.rank else self._loop.run(wait_for_replicas(
                self._store, settings.run, number, wanted, settings.wait_replicas_timeout,
                clock=SystemClock(),
            ))  # fmt: skip

        late = together(group, f"waiting for replicas at {directory_name(number)}", here)[0]
        if late is not None and settings.wait_replicas_then == "stop":
            raise FleetLate(late)
        if late is not None and group.rank == 0:
            logger.warning("%s", late)

    def close(self) -> None:
        """Let go of the store and end the thread. Nothing may be running. Closing twice is fine."""
        if self._loop.closed:
            return
        try:
            if self._compacting is not None:
                self._compacting.close()
            if self._prover is not None:
                self._loop.run(self._prover.close())
        finally:
            self._waker.flush()
            self._loop.run(self._store.close())
            self._loop.close()

    # ---------------------------------------------------------------------------------------- rank 0 only

    def _look_here(self, saved: Callable[[], RunRecord | None]) -> Row | None:
        """What the next delta is to build on, None for version 0; and all that could be in a claim's way."""
        if self.group.rank != 0:
            return None
        settings, record = self.settings, saved()
        self._waker = Waker.given(settings.wake)
        self._publisher = Publisher(
            self._store, settings.run, files=self._files, clock=SystemClock(), rng=random.Random(),
            nonce=lambda: secrets.token_hex(16), run_blocking=asyncio.to_thread, producer=self._producer,
            retry=self._retry, swap_deadline=settings.patience, alone=settings.alone,
            raise_floor=True,
        )  # fmt: skip
        number = None if record is None else record.version
        boot = Boot(str(settings.boot), state_digest(self._boot.table))
        self._asked = {"saved": number, "override": settings.override}
        head = self._loop.run(self._publisher.look(boot, **self._asked))
        row = base_row(head, number)
        self._pointed = settings.channel is None or self._loop.run(self._points(settings.channel))
        if (prover := self._proving()) is not None:
            self._loop.run(prover.hold(head, boot.state if row is None else row.state))
        return row

    def _claim_here(self, looked: Row | None) -> Start | None:
        """``looked`` stays the base, unless the floor rose above it meanwhile."""
        if self.group.rank != 0:
            return None
        settings, publisher = self.settings, self._rank0()
        boot = Boot(str(settings.boot), state_digest(self._boot.table))
        head = self._loop.run(publisher.claim(boot, **self._asked))
        if settings.channel is not None and not self._pointed:
            move = move_channel(
                self._store, settings.channel, Channel(settings.run), rng=random.Random(),
                nonce=secrets.token_hex(8),
            )  # fmt: skip
            self._loop.run(move)
        if settings.compact and self._compacting is None:
            self._compacting = CompactorProcess(settings.store, settings.run, settings.boot, settings.work)
            self._compacting.ensure()
        fits = self._loop.run(publisher.builds_on(state_digest(self._table)))
        return Start(head.number, publisher.epoch, looked if fits else base_row(head, self._asked["saved"]))

    async def _points(self, name: str) -> bool:
        """Whether the channel is at this run, also where somebody chose an exact version of it."""
        try:
            return (await ChainReader(self._store).channel(name)).run == self.settings.run
        except (NotFound, FormatError):  # a move repairs what cannot be read
            return False

    def _rank0(self) -> Publisher:
        if self._publisher is None:
            raise PublishError(f"run {self.settings.run} has not been claimed by this process")
        return self._publisher

    async def _reserve_here(self) -> int:
        return self._rank0().reserve()

    def _prefix(self, number: int) -> str | None:
        """Where the version's files go."""
        return self._rank0().prefix(number) if self.group.rank == 0 else None

    def _finish(
        self,
        directory: Path,
        number: int,
        parts: list[Part],
        prefix: str,
        step: int | None,
        encoded: str | None,
    ) -> None:
        """``encoded``: the state that the encoders hold, where they are Stitch's own."""
        if self.group.rank != 0:
            return
        base = state_digest(self._table)
        uploaded = tuple(receipt.file for part in parts for receipt in part.receipts)
        prover, proven = self._proving(), None
        if prover is not None:
            proven, state = self._loop.run(prover.prove(self._rank0().head, base, prefix, uploaded))
        verdict = judge(parts, self._table, str(directory), proven=proven, encoded=encoded)
        if prover is not None and state != verdict.state:
            raise PublishError(f"the delta was proven to give {state}, its receipts say {verdict.state}")
        payload = Payload(
            "delta", verdict.state, directory, (), base, verdict.encoding, verdict.changed, step,
            uploaded=uploaded,
        )  # fmt: skip
        manifest = self._loop.run(self._rank0().publish(payload, number))
        self._waker.wake()
        self._table = verdict.table
        self.on_published(manifest)
        if self._compacting is not None:
            self._compacting.ensure()
        if prover is not None:
            try:
                self._loop.run(prover.published(manifest))
            except Exception as error:  # the head has moved: the next proof rebuilds its copy
                logger.warning("the proven copy did not follow to %s: %s", manifest.version, error)

    def _proving(self) -> Prover | None:
        """The prover, if the settings ask for proofs."""
        if self.settings.prove and self._prover is None:
            settings = self.settings
            self._prover = Prover(
                self._store, settings.boot, settings.work, self._files, self._retry, settings.anchor_every
            )
        return self._prover

    @property
    def head(self) -> Manifest:
        """The newest version; on rank 0."""
        return self._rank0().head

    # ----------------------------------------------------------------------------------------- every rank

    def _upload(self, directory: Path, duty: Duty, prefix: str) -> Part:
        part = carry_out(duty, directory, self._files)
        limit = asyncio.Semaphore(PARALLEL_UPLOADS)

        async def one(receipt: Receipt) -> None:
            file = receipt.file
            source = FileSource(self._files, directory / file.name, file.size)
            async with limit:
                await upload(self._store, prefix + file.name, source, file.sha256, policy=self._retry)

        async def all_of_them() -> None:
            await asyncio.gather(*(one(receipt) for receipt in part.receipts))

        self._loop.run(all_of_them())
        return part

    def _clean(self, directory: Path) -> None:
        if not self.settings.keep_files:
            self._files.remove_tree(directory)
