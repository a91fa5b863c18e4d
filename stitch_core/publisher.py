"""Publishing one run: claim it, upload, read back, write the manifest, swap the head.

The head never names bytes that are not all there: everything a version needs is durable and verified
before the swap. A Publisher is owned by one event loop and holds one claim, whose epoch and nonce live
only in its memory.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .chain import NoHead
from .claiming import PROBE, Claim, Claimant
from .claims import ClaimRefused, Fenced, HeadMoved, OutcomeUnknown, PublishError
from .floors import Bases, FloorRaiser
from .head import Head
from .manifest import (
    FormatError,
    Manifest,
    Row,
    extend_history,
    floor_number,
    payload_prefix,
    run_prefix,
)
from .metered import PublisherMetrics, process_metrics
from .payload import Boot, Payload
from .ports import (
    Clock,
    Conflict,
    Files,
    NotFound,
    RunBlocking,
    Store,
    StoreError,
    WriteRefused,
)
from .records import How
from .retry import Retry
from .uploading import check_payload, readable, representation_of, upload_payload

__all__ = [
    "PROBE", "Boot", "ClaimRefused", "Fenced", "HeadMoved", "OutcomeUnknown", "Payload", "PublishError",
    "Publisher",
]  # fmt: skip


class Publisher(Claimant):
    """Publishes versions of ``run``, one at a time.

    Claim first; after Fenced or OutcomeUnknown claim again or stop.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        *,
        files: Files,
        clock: Clock,
        rng: random.Random,
        nonce: Callable[[], str],
        run_blocking: RunBlocking,
        retry: Retry | None = None,
        swap_deadline: float = 120.0,
        producer: Mapping[str, Any] | None = None,
        alone: bool = False,
        raise_floor: bool = False,
        metrics: PublisherMetrics | None = None,
    ) -> None:
        """See ``Claimant``. ``raise_floor``: let the fulls that others uploaded beside the chain become its
        floor, so that what is below them may be collected; a trainer that resumes from below the floor must
        publish a full. ``metrics``: by default those of this process.
        """
        super().__init__(
            store, run, clock=clock, rng=rng, nonce=nonce, retry=retry, swap_deadline=swap_deadline,
            producer=producer, alone=alone,
        )  # fmt: skip
        self._files, self._run_blocking = files, run_blocking
        self._metrics = metrics or process_metrics()
        self._bases = Bases(self._chain)
        self._floors = FloorRaiser(store, self._chain, self._bases) if raise_floor else None

    async def check(self, payload: Payload, newest: Manifest) -> None:
        """Whether ``payload`` could be published after ``newest``, as far as can be known before a claim.

        Nothing is written. Raises PublishError.
        """
        number = newest.number + 1
        await self._check_base(payload, number, newest)
        try:
            manifest = self._manifest(payload, number, 1, newest, _floor(payload, newest))
            await check_payload(self._store, self._files, manifest, payload, self._run_blocking)
        except (StoreError, OSError, FormatError) as error:
            raise PublishError(f"run {self.run}: no version can be published: {error}") from error

    def reserve(self) -> int:
        """The next number. It is used up, whatever becomes of it: no number ever names two byte strings."""
        self._claimed()
        self._next += 1
        return self._next - 1

    def prefix(self, number: int) -> str:
        """The key prefix for files of a reserved ``number`` that other processes upload, create-only."""
        return run_prefix(self.run) + payload_prefix(number, self._claimed().head.epoch)

    async def publish(self, payload: Payload, number: int | None = None) -> Manifest:
        """Make ``payload`` the newest version, under ``number`` from ``reserve`` (the next one by default).

        Returns when the head names it. Raises PublishError when it does not, Fenced when another writer
        has claimed the run, OutcomeUnknown when the store does not say.
        """
        claim = self._claimed()
        number = self.reserve() if number is None else number
        if not claim.head.number < number < self._next:
            raise PublishError(
                f"version {number} of run {self.run} is not above its head, {claim.head.number}, "
                "or was not reserved"
            )
        await self._check_base(payload, number, claim.manifest)
        with self._metrics.publishing(self.run, self._clock) as done:
            manifest = await self._publish(payload, number, claim)
            done.append(manifest)
        self._bases.note(manifest)
        return manifest

    async def _publish(self, payload: Payload, number: int, claim: Claim) -> Manifest:
        try:
            manifest = await self._upload(payload, number, claim)
            await self._create(run_prefix(self.run) + manifest.key, readable(manifest))
        except NotFound as error:
            await self._check_not_fenced(claim)
            raise self._not_published(number, error) from error
        except (StoreError, OSError, FormatError) as error:
            raise self._not_published(number, error) from error
        await self._move(claim, manifest)
        return manifest

    async def _check_not_fenced(self, claim: Claim) -> None:
        """Raises Fenced if what was uploaded is gone because a collector took it from a fenced writer."""
        with contextlib.suppress(StoreError, FormatError, NoHead):
            head, _ = await self._call(lambda: self._chain.head(self.run))
            if head.writer != claim.head.writer:
                self._lost = self._fenced(head)
                raise self._lost

    async def _move(self, claim: Claim, manifest: Manifest) -> None:
        """Swap the head. However this ends, the claim holds on only if the head is what it left there."""
        head = claim.head.moved(manifest, self._clock.time())
        try:
            self._claim = replace(claim, head=head, tag=await self._swap(claim.tag, head), manifest=manifest)
        except Conflict:
            await self._fence(manifest)
        except WriteRefused as error:
            raise self._not_published(manifest.number, error) from error
        except OutcomeUnknown as unknown:
            self._lost = unknown
            raise
        except BaseException:
            self._lost = self._unknown(manifest.number, "publishing was cut off")
            raise

    async def _fence(self, manifest: Manifest) -> None:
        """The head is not what this writer left. Returns if ``manifest`` is on its chain all the same."""
        digest = manifest.digest()
        try:
            head, _ = await self._call(lambda: self._chain.head(self.run))
            newest = await self._call(lambda: self._chain.manifest(self.run, head))
            landed = await self._call(lambda: self._chain.find(newest, lambda row: row.digest == digest))
        except (StoreError, FormatError, NoHead) as error:
            self._lost = self._unknown(manifest.number, str(error))
            raise self._lost from error
        self._lost = self._fenced(head)
        if landed is None:
            raise self._lost

    def _fenced(self, head: Head) -> Fenced:
        return Fenced(
            f"another writer has claimed run {self.run} (epoch {head.epoch}, head {head.number}): "
            "this one stops publishing"
        )

    def _not_published(self, number: int, why: Exception) -> PublishError:
        return PublishError(f"version {number} of run {self.run} was not published: {why}")

    async def builds_on(self, state: str) -> bool:
        """Whether a delta on ``state`` can be published now; if not, only a full can.

        It must be reached from the head's floor by deltas of versions above that: what is below may have
        been collected. A version of a higher number may hang on it, where a trainer resumed before the floor
        rose. Raises StoreError, FormatError.
        """
        return await self._leads(self._claimed().manifest, state)

    async def _leads(self, parent: Manifest, state: str) -> bool:
        floor = parent.floor or parent.row()
        if state in (parent.state, floor.state):
            return True
        rows = await self._call(lambda: self._chain.rows(parent))
        return await self._call(lambda: self._bases.lead(self.run, rows, floor, state))

    async def _check_base(self, payload: Payload, number: int, parent: Manifest) -> None:
        if payload.kind != "delta":
            return
        try:
            fits = await self._leads(parent, payload.base or "")
        except (StoreError, FormatError) as error:
            raise self._not_published(number, error) from error
        if not fits:
            raise PublishError(
                f"the delta's base {payload.base} is no state that versions of run {self.run} above its "
                f"floor {floor_number(parent)} lead to, up to its head {parent.number}: publish a full, or "
                "encode against the head"
            )

    async def _upload(self, payload: Payload, number: int, claim: Claim) -> Manifest:
        parent = claim.manifest
        floor = _floor(payload, parent)
        if floor is not None and self._floors is not None and payload.base is not None:
            floor = await self._floors.find(parent, payload.base) or floor
        manifest = self._manifest(payload, number, claim.head.epoch, parent, floor)
        how: How = {"policy": self._retry, "rng": self._rng, "run_blocking": self._run_blocking}
        return await upload_payload(self._store, self._files, manifest, payload, how)

    def _manifest(
        self, payload: Payload, number: int, epoch: int, parent: Manifest, floor: Row | None
    ) -> Manifest:
        """That of ``payload`` after ``parent``, still without its files."""
        return Manifest(
            self.run, number, epoch, payload.state, representation_of(payload),
            extend_history(parent), boot=parent.boot or parent.row(), floor=floor, step=payload.step,
            time=self._clock.time(), producer=self._producer, metadata=dict(payload.metadata),
        )  # fmt: skip


def _floor(payload: Payload, parent: Manifest) -> Row | None:
    """The floor of what follows ``parent``, as far as no full beside the chain raises it."""
    return None if payload.kind == "full" else parent.floor or parent.row()
