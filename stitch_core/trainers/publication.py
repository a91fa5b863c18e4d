"""Publishing from a group of processes: one claim, files uploaded where they lie, one manifest.

Rank 0 holds the claim, the table of the newest version's tensors and the publisher; the others upload. Every
call here is made by every rank, and ends alike on every rank.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import PosixFiles
from ..head import Channel, channel_key
from ..manifest import Manifest
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
from .boot import boot_table
from .group import RanksFailed, together
from .receipts import Listing, Receipt, assign, describe, judge, list_version
from .settings import TrainerSettings

STORE_SECONDS = 60.0
PARALLEL_UPLOADS = 8


@dataclass(frozen=True)
class Start:
    """What a claim found: the head's number, whether the run had versions before, and its epoch."""

    number: int
    epoch: int
    resumed: bool
    state: str


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
        """No I/O yet. ``store`` opens the store (by default the one of the settings)."""
        self.settings, self.group = settings, group
        self._files = files or PosixFiles()
        self._open = store or (lambda: open_store(settings.store))
        self._producer = dict(producer or {})
        self._retry = Retry(attempts=None, deadline=settings.patience)
        self._loop = LoopThread("stitch-publish")
        self._store: Store = BoundedStore(self._open(), STORE_SECONDS)
        self._publisher: Publisher | None = None
        self._boot: TensorTable = {}
        self._table: TensorTable = {}
        self.start: Start | None = None
        self.number = 0
        self._reserved: int | None = None

    def claim(self) -> Start:
        """Prove the boot checkpoint, become the run's writer, and fence the one before.

        The next delta's base is the boot checkpoint, whatever the head is: that is what the framework's
        snapshot is taken from. Raises RanksFailed.
        """
        self._boot = self._table = boot_table(self.settings.boot, self._files, self.group)
        claimed = together(self.group, f"claiming run {self.settings.run}", self._claim_here)[0]
        assert claimed is not None
        self.start, self.number = claimed, claimed.number
        return claimed

    def reserve(self) -> int:
        """The number of the next version; the same one until ``publish`` uses it up, however that ends."""
        if self._reserved is not None:
            return self._reserved

        def here() -> int | None:
            return self._rank0().reserve() if self.group.rank == 0 else None

        number = together(self.group, f"numbering a version of run {self.settings.run}", here)[0]
        assert number is not None
        self._reserved = number
        return number

    def adopt(self, table: TensorTable) -> bool:
        """Whether ``table`` is the state of the head as claimed; then the next delta builds on it."""
        if self.start is None or state_digest(table) != self.start.state:
            return False
        self._table = table
        return True

    def publish(self, directory: Path, number: int, *, step: int | None = None) -> int:
        """Make the delta in ``directory`` (on whichever hosts its files lie) version ``number``.

        Returns when the head names it. Raises RanksFailed on every rank otherwise: then the framework's own
        base has moved and the trainer has to stop.
        """
        what = f"publishing {directory_name(number)} of run {self.settings.run}"
        reserved, self._reserved = self.reserve(), None
        if number != reserved:
            raise RanksFailed(
                f"{what}: the run goes on at {reserved}, and the framework's own counter says {number}; it "
                "is set at start by Stitch's hook in --custom-megatron-init-path"
            )
        seen = together(
            self.group, what, lambda: (list_version(directory, self._files), self._prefix(number))
        )
        prefix = seen[0][1]
        owners = together(self.group, what, lambda: assign([listing for listing, _ in seen]))[self.group.rank]
        mine = [name for name, rank in owners.items() if rank == self.group.rank]
        parts = together(self.group, what, lambda: self._upload(directory, mine, prefix or ""))
        receipts = [receipt for part in parts for receipt in part]
        together(self.group, what, lambda: self._finish(directory, number, receipts, step))
        self.number = number
        self._clean(directory, seen[self.group.rank][0])
        return number

    def close(self) -> None:
        """Let go of the store. Nothing may be running."""
        self._loop.run(self._store.close())
        self._loop.close()

    # ---------------------------------------------------------------------------------------- rank 0 only

    def _claim_here(self) -> Start | None:
        if self.group.rank != 0:
            return None
        publisher = Publisher(
            self._store, self.settings.run, files=self._files, clock=SystemClock(), rng=random.Random(),
            nonce=lambda: secrets.token_hex(16), run_blocking=asyncio.to_thread, producer=self._producer,
            retry=self._retry, swap_deadline=self.settings.patience,
        )  # fmt: skip
        head = self._loop.run(publisher.claim(Boot(str(self.settings.boot), state_digest(self._boot))))
        if self.settings.channel is not None:
            self._loop.run(self._point(self.settings.channel))
        self._publisher = publisher
        return Start(head.number, publisher.epoch, head.number > 0, head.state)

    async def _point(self, name: str) -> None:
        key = channel_key(name)
        try:
            found = await self._store.load(key)
            if Channel.decode(found.data, key).run == self.settings.run:
                return
            expected = found.tag
        except NotFound:
            expected = None
        await self._store.swap(key, expected, Channel(self.settings.run).encode())

    def _rank0(self) -> Publisher:
        if self._publisher is None:
            raise PublishError(f"run {self.settings.run} has not been claimed by this process")
        return self._publisher

    def _prefix(self, number: int) -> str | None:
        """Where the version's files go."""
        return self._rank0().prefix(number) if self.group.rank == 0 else None

    def _finish(self, directory: Path, number: int, receipts: list[Receipt], step: int | None) -> None:
        if self.group.rank != 0:
            return
        verdict = judge(receipts, self._table, str(directory))
        payload = Payload(
            "delta", verdict.state, directory, (), state_digest(self._table), verdict.encoding,
            verdict.changed, step, uploaded=tuple(receipt.file for receipt in receipts),
        )  # fmt: skip
        self._loop.run(self._rank0().publish(payload, number))
        self._table = verdict.table

    @property
    def head(self) -> Manifest:
        """The newest version; on rank 0."""
        return self._rank0().head

    # ----------------------------------------------------------------------------------------- every rank

    def _upload(self, directory: Path, names: list[str], prefix: str) -> list[Receipt]:
        receipts = [describe(directory / name, self._files) for name in names]
        limit = asyncio.Semaphore(PARALLEL_UPLOADS)

        async def one(receipt: Receipt) -> None:
            file = receipt.file
            source = FileSource(self._files, directory / file.name, file.size)
            async with limit:
                await upload(self._store, prefix + file.name, source, file.sha256, policy=self._retry)

        async def all_of_them() -> None:
            await asyncio.gather(*(one(receipt) for receipt in receipts))

        self._loop.run(all_of_them())
        return receipts

    def _clean(self, directory: Path, listing: Listing) -> None:
        if listing.sizes and not self.settings.keep_files:
            self._files.remove_tree(directory)
