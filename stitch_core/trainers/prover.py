"""Applying every delta to a proven copy before the head moves: what is published is what replicas will get.

On rank 0, from the bytes that the store has. It also finds the digests of new bytes where a dialect does not
tell them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import Sequence
from pathlib import Path

from ..chain import ChainReader
from ..checkout import stage_replanning
from ..checkpoint import Checkpoint
from ..delta.directory import DeltaDirectory
from ..delta.prove import prove_delta
from ..delta.wire import DeltaError
from ..host_checkpoint import HostCheckpoint
from ..lineage import Plan
from ..manifest import Manifest, PayloadFile
from ..ports import Files, Store, SystemClock
from ..replica.anchoring import ReplicaAnchors
from ..replica.staging import Stager
from ..retry import Retry
from ..scratch import own_directory
from ..stores.transfer import download

Changed = dict[str, tuple[str, str]]


class Prover:
    """Holds one copy of the model under ``work``, in a directory of this process. One call at a time."""

    def __init__(
        self,
        store: Store,
        boot: Path,
        work: Path,
        files: Files,
        policy: Retry,
        anchor_every: int | None = None,
    ) -> None:
        """``boot`` is the checkpoint that is version 0; every ``anchor_every`` versions the copy becomes a
        full, uploaded behind the publishes."""
        self._store, self._files, self._policy = store, files, policy
        self._held = contextlib.ExitStack()
        root = self._held.enter_context(own_directory(work, files))
        self._fetched = root / "fetched"
        self._chain = ChainReader(store)
        self._host = HostCheckpoint(root / "host", files)
        self._held.callback(self._host.close)
        self._stager = Stager(
            store, self._chain, self._host, boot, files=files, clock=SystemClock(), rng=random.Random(),
            run_blocking=asyncio.to_thread, activity=lambda _: None,
        )  # fmt: skip
        self._anchors = None if anchor_every is None else ReplicaAnchors.of(
            store, f"prover-{secrets.token_hex(4)}", anchor_every, root / "scratch", asyncio.to_thread
        )  # fmt: skip

    async def prove(
        self, head: Manifest, base: str, prefix: str, uploaded: Sequence[PayloadFile]
    ) -> tuple[Changed, str]:
        """Old and new xxh3-128 of each tensor in a delta that was uploaded under ``prefix``; its state.

        ``base`` is the state of the version, on the chain of ``head``, that it was made from. Raises
        DeltaError when it does not fit, or does not give the bytes that its checksums promise.
        """
        await self.hold(head, base)
        await asyncio.to_thread(self._files.remove_tree, self._fetched)
        await asyncio.to_thread(self._files.make_dirs, self._fetched)
        try:
            return await self._prove_fetched(prefix, uploaded)
        except DeltaError:
            return await self._prove_fetched(prefix, uploaded)  # one bad read refuses no version

    async def _prove_fetched(self, prefix: str, uploaded: Sequence[PayloadFile]) -> tuple[Changed, str]:
        for file in uploaded:
            path = self._fetched / file.name
            await download(  # hashes what lies there
                self._store, prefix + file.name, self._files, path, file.size, file.sha256,
                policy=self._policy,
            )  # fmt: skip
        return await asyncio.to_thread(self._prove, {file.name for file in uploaded})

    async def hold(self, head: Manifest, base: str) -> None:
        """Have a copy of the version on the chain of ``head`` that has the state ``base``. DeltaError."""
        if self._host.holding is not None and self._host.holding.state == base:
            return
        found = await self._chain.find(head, lambda row: row.state == base)
        if found is None:
            raise DeltaError(f"{base} is the state of no version of run {head.run}")
        await self._make_way()
        await stage_replanning(self._stager, found)

    def _prove(self, named: set[str]) -> tuple[Changed, str]:
        delta = DeltaDirectory.open(self._fetched, self._files, named)
        return prove_delta(delta, Checkpoint.open(self._host.directory, self._files), self._host.table)

    async def published(self, manifest: Manifest) -> None:
        """The head names what was proven last: the copy becomes that version."""
        await self._make_way()
        plan = Plan(manifest, manifest.representation.base, None, (manifest,))
        await asyncio.to_thread(self._host.apply, plan, lambda _: self._fetched)
        await asyncio.to_thread(self._files.remove_tree, self._fetched)

        if self._anchors is not None:
            self._anchors.staged(manifest, self._host.directory)

    async def _make_way(self) -> None:
        if self._anchors is not None:
            await self._anchors.make_way()

    async def close(self) -> None:
        """Remove the copy."""
        if self._anchors is not None:
            await self._anchors.close()
        await asyncio.to_thread(self._held.close)
