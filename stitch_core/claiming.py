"""Claiming one run: becoming its writer, which fences the one before, once it is known to be possible.

A claim's epoch and nonce live only in the memory of the process that made it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from .chain import ChainReader, NoHead
from .claims import ClaimRefused, HeadMoved, OutcomeUnknown, PublishError, Resume
from .head import Head, head_key
from .manifest import Manifest, Representation, payload_prefix, run_prefix
from .payload import Boot
from .ports import (
    AlreadyExists,
    Blob,
    Clock,
    Conflict,
    NotFound,
    Store,
    StoreError,
    Unavailable,
    WriteRefused,
)
from .retry import Retry, retrying
from .swapping import swap_until_known
from .uploading import readable
from .versions import check_run_id

T = TypeVar("T")

CLAIM_ATTEMPTS = 16

PROBE = "claim-"
"""How the name of an object begins that a claim creates to see whether it can, and removes again."""


@dataclass(frozen=True)
class Claim:
    """The head as this writer left it, the tag to swap it with, and the manifest that it names."""

    head: Head
    tag: str
    manifest: Manifest


class Claimant:
    """One writer of ``run``, owned by one event loop. It holds one claim at a time."""

    def __init__(
        self,
        store: Store,
        run: str,
        *,
        clock: Clock,
        rng: random.Random,
        nonce: Callable[[], str],
        retry: Retry | None = None,
        swap_deadline: float = 120.0,
        producer: Mapping[str, Any] | None = None,
        alone: bool = False,
    ) -> None:
        """``nonce`` returns fresh unguessable text; ``swap_deadline``: seconds to learn what a swap did.

        ``alone``: the caller vouches that nobody else writes this run, which a store without conditional
        writes (see Capabilities) needs.
        """
        self.run = check_run_id(run)
        self._store, self._clock, self._rng, self._nonce = store, clock, rng, nonce
        self._retry = retry or Retry()
        self._swap_deadline = swap_deadline
        self._producer = dict(producer or {})
        self._alone = alone
        self._chain = ChainReader(store)
        self._claim: Claim | None = None
        self._lost: PublishError | None = None
        self._next = 0

    @property
    def head(self) -> Manifest:
        """The newest version, as this claim left it."""
        return self._last_claim().manifest

    @property
    def epoch(self) -> int:
        return self._last_claim().head.epoch

    async def look(
        self, boot: Boot, *, resume: str | None = None, saved: int | None = None, override: bool = False
    ) -> Manifest:
        """The newest version that ``claim`` would find; of a run that is not begun its version 0.

        Nothing is written. Raises what ``claim`` raises, where it would be refused.
        """
        asked = Resume(resume, saved, override)
        self._check_conditional()
        try:
            head, _ = await self._call(lambda: self._chain.head(self.run))
        except NoHead:
            asked.check_new(self.run, boot.state)
            await self._check_unbegun()
            return self._version0(boot, 1)
        return (await self._claimable(boot, asked, head))[1]

    async def claim(
        self,
        boot: Boot,
        *,
        resume: str | None = None,
        saved: int | None = None,
        override: bool = False,
        at: Manifest | None = None,
    ) -> Manifest:
        """Become the run's writer and fence the one before; the newest version, which may be version 0.

        ``saved`` is the version that was the newest when the checkpoint that the trainer goes on from was
        saved; ``resume`` is the state that its next delta builds on (see ``builds_on``). Raises ClaimRefused,
        and then nobody is fenced, when the run's version 0 has another state than ``boot``, when no version
        has the state ``resume``, when others keep claiming; and, without ``override``, when a rollback gave
        up ``saved`` or every version of that state, when ``saved`` is above the head, and when ``resume`` is
        not the head's state and no ``saved`` says that this is meant; when the store takes no new objects;
        and HeadMoved when the newest version is not ``at``, where that is given. OutcomeUnknown when the
        store does not say what became of the swap.
        """
        asked = Resume(resume, saved, override)

        async def take() -> Claim | None:
            try:
                found = await self._call(lambda: self._chain.head(self.run))
            except NoHead:
                return await self._first_claim(boot, asked, at)
            head, manifest = await self._claimable(boot, asked, found[0])
            return await self._take_over(found[1], head, manifest, at)

        return await self._until_claimed(take)

    async def take_back(self, to: int, *, at: Manifest | None = None) -> Manifest:
        """Claim the run for a rollback: from now on every version above ``to`` counts as given up.

        Raises ClaimRefused when ``to`` is not below the head or the store takes no new objects, HeadMoved as
        ``claim`` does, NoHead, OutcomeUnknown.
        """

        async def take() -> Claim | None:
            head, tag = await self._call(lambda: self._chain.head(self.run))
            if to >= head.number:
                raise ClaimRefused(f"run {self.run} is at version {head.number}: {to} is not before it")
            manifest = await self._call(lambda: self._chain.manifest(self.run, head))
            return await self._take_over(tag, head.taken_back(to), manifest, at)

        return await self._until_claimed(take)

    async def release(self) -> tuple[Head, Manifest]:
        """Fence the run's writer and be none oneself; the head that it had, and the newest version.

        Nobody knows the nonce that the head has afterwards. Raises NoHead, ClaimRefused, OutcomeUnknown.
        """
        before: list[Head] = []

        async def take() -> Claim | None:
            head, tag = await self._call(lambda: self._chain.head(self.run))
            manifest = await self._call(lambda: self._chain.manifest(self.run, head))
            before[:] = [head]
            return await self._take(tag, head.claimed(self._nonce(), self._clock.time()), manifest)

        manifest = await self._until_claimed(take)
        self._claim = None
        return before[0], manifest

    def _check_conditional(self) -> None:
        if not (self._alone or self._store.capabilities.conditional_writes):
            raise ClaimRefused(
                f"run {self.run}: the store cannot compare and swap, so two trainers that claim at once may "
                "both publish; claim it only where nothing else writes the run, and say so (alone=True)"
            )

    async def _until_claimed(self, take: Callable[[], Awaitable[Claim | None]]) -> Manifest:
        self._claim, self._lost = None, None
        self._check_conditional()
        for _ in range(CLAIM_ATTEMPTS):
            claim = await take()
            if claim is not None:
                self._claim, self._next = claim, claim.head.number + 1
                return claim.manifest
        raise ClaimRefused(f"run {self.run}: other writers kept claiming it; is a second trainer running?")

    def _version0(self, boot: Boot, epoch: int) -> Manifest:
        return Manifest(
            self.run, 0, epoch, boot.state, Representation("boot", source=boot.source),
            time=self._clock.time(), producer=self._producer,
        )  # fmt: skip

    async def _first_claim(self, boot: Boot, asked: Resume, at: Manifest | None) -> Claim | None:
        asked.check_new(self.run, boot.state)
        await self._check_unbegun()
        for epoch in range(1, CLAIM_ATTEMPTS):
            manifest = self._version0(boot, epoch)
            self._check_at(manifest, at)
            try:
                await self._create(run_prefix(self.run) + manifest.key, readable(manifest))
            except AlreadyExists:
                # A claim that died before its head: the same weights are the same version 0.
                left = await self._load(run_prefix(self.run) + manifest.key)
                manifest = Manifest.decode(left.data, manifest.key)
                if manifest.state != boot.state:
                    continue
            head = Head(0, epoch, manifest.key, manifest.digest(), self._nonce(), self._clock.time())
            return await self._take(None, head, manifest)
        raise ClaimRefused(
            f"run {self.run} has {CLAIM_ATTEMPTS - 1} abandoned starts from other checkpoints; use a new id"
        )

    async def _check_unbegun(self) -> None:
        """No head, and versions above 0: begun anew, their numbers would mean other weights. ClaimRefused."""
        try:
            listed = await self._call(lambda: self._store.list(run_prefix(self.run) + "manifests/"))
        except NotFound:
            return  # no store yet: this claim begins it
        begun = [entry.key for entry in listed if not _boot_key(entry.key)]
        if begun and not await self._call(self._has_head):  # which another claim may have made meanwhile
            raise ClaimRefused(
                f"run {self.run} has no head, and has versions up to {begun[-1]}: its head was removed from "
                "outside; restore it, or use a new run id"
            )

    async def _has_head(self) -> bool:
        try:
            await self._chain.head(self.run)
        except NoHead:
            return False
        return True

    async def _claimable(self, boot: Boot, asked: Resume, head: Head) -> tuple[Head, Manifest]:
        """The head to claim, and the newest version. ClaimRefused."""
        manifest = await self._call(lambda: self._chain.manifest(self.run, head))
        version0 = await self._call(lambda: self._chain.boot(manifest))
        if version0.state != boot.state:
            raise ClaimRefused(
                f"the base checkpoint {boot.source} is not version 0 of run {self.run}: its state is "
                f"{boot.state}, version 0 ({version0.representation.source}) has {version0.state}; use that "
                "one or a new run id"
            )
        asked.check_saved(self.run, head)
        await asked.check_base(
            head, manifest, lambda wanted: self._call(lambda: self._chain.find(manifest, wanted))
        )
        if asked.saved is not None and asked.override:
            head = head.going_on_from(asked.saved)
        return head, manifest

    async def _take_over(self, tag: str, head: Head, manifest: Manifest, at: Manifest | None) -> Claim | None:
        """Claim a run that is begun, unless its writer would be fenced for nothing. ClaimRefused."""
        self._check_at(manifest, at)
        await self._check_writable(head)
        return await self._take(tag, head.claimed(self._nonce(), self._clock.time()), manifest)

    def _check_at(self, manifest: Manifest, at: Manifest | None) -> None:
        if at is not None and (manifest.number, manifest.state) != (at.number, at.state):
            raise HeadMoved(
                f"run {self.run} is at version {manifest.number} now and was at {at.number} when this was "
                "made ready: its trainer is publishing. No writer was fenced"
            )

    async def _check_writable(self, head: Head) -> None:
        """A new object is created and removed again: one that can only be replaced would swap the head.

        It lies below the next epoch, where a collector finds what a process that died leaves.
        """
        nonce = self._nonce()
        key = run_prefix(self.run) + payload_prefix(0, head.epoch + 1) + PROBE + nonce
        try:
            await self._create(key, nonce.encode())
        except Unavailable:
            raise
        except StoreError as error:
            raise ClaimRefused(
                f"run {self.run} cannot be claimed: its store takes no new objects ({error}). No writer was "
                "fenced"
            ) from error
        with contextlib.suppress(StoreError):  # who may not delete may still publish
            await self._store.delete(key)

    async def _take(self, expected: str | None, head: Head, manifest: Manifest) -> Claim | None:
        try:
            return Claim(head, await self._swap(expected, head), manifest)
        except Conflict:
            return None
        except WriteRefused as error:
            raise ClaimRefused(f"run {self.run} cannot be claimed: {error}") from error

    # ------------------------------------------------------------------------------------------- store

    def _unknown(self, number: int, why: str) -> OutcomeUnknown:
        return OutcomeUnknown(
            f"run {self.run}: nothing says whether its head moved to {number} ({why}); claim the run again "
            "to find out"
        )

    def _claimed(self) -> Claim:
        if self._lost is not None:
            raise self._lost
        return self._last_claim()

    def _last_claim(self) -> Claim:
        if self._claim is None:
            raise PublishError(f"run {self.run} has not been claimed by this publisher")
        return self._claim

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        return await retrying(call, self._retry, self._rng)

    async def _load(self, key: str) -> Blob:
        return await self._call(lambda: self._store.load(key))

    async def _create(self, key: str, data: bytes) -> None:
        """Create-only, repeated until known; AlreadyExists only for other bytes than ``data``."""
        try:
            await self._call(lambda: self._store.create(key, data))
        except AlreadyExists:
            if (await self._load(key)).data != data:
                raise

    async def _swap(self, expected: str | None, head: Head) -> str:
        """See ``swap_until_known``."""
        return await swap_until_known(
            self._store, head_key(self.run), expected, head.encode(), clock=self._clock, rng=self._rng,
            retry=self._retry, seconds=self._swap_deadline,
            unknown=lambda why: self._unknown(head.number, why),
        )  # fmt: skip


def _boot_key(key: str) -> bool:
    return key.rpartition("/")[2].startswith("000000.")
