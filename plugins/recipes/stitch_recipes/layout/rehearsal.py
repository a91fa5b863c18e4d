"""A recipe rehearsed on a scaled-down checkpoint: published, joined and verified on the real paths."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stitch_core import checkpoint as core
from stitch_core.anchors import Anchors
from stitch_core.chain import ChainReader
from stitch_core.compactor import Compactor
from stitch_core.delta.sparse_layout import width_of
from stitch_core.files import PosixFiles
from stitch_core.host_checkpoint import HostCheckpoint, HostCheckpointError, RepresentationInvalid
from stitch_core.lineage import NoPlan
from stitch_core.manifest import Manifest
from stitch_core.planner import Planner
from stitch_core.policy_publisher import PolicyPublisher, Published
from stitch_core.ports import Store, StoreError, SystemClock
from stitch_core.publisher import PublishError
from stitch_core.replica.staging import NoRoom, Stager, WrongBase
from stitch_core.safetensors import Tensor
from stitch_core.stores import open_store

from ..schema import Checkpoint, Recipe, Versions
from .geometry import Geometry
from .scaled import scaled, scaled_checkpoint
from .synthesis import Stored, Synthetic, Training, stored, write_checkpoint
from .synthetic import densities

DELTAS = 4
"""As many as a compactor merges into its first span."""

FAILURES = (
    PublishError,
    StoreError,
    HostCheckpointError,
    RepresentationInvalid,
    NoPlan,
    WrongBase,
    NoRoom,
    ValueError,
)
"""Of publishing and staging, and of a layout or a delta that cannot be: the recipe's fault or Stitch's."""

SHARD_BYTES = 4 << 20
RUN = "rehearsal"


class RehearsalFailed(Exception):
    """What came out is not what went in; the message names recipe, version and tensor."""


@dataclass(frozen=True)
class Join:
    """One host brought to the head: from what, by how many pieces of how many bytes, in seconds."""

    start: str
    pieces: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Report:
    """What a rehearsal found. Bytes are of the scaled checkpoint; ``changed``: elements, as a fraction.

    ``publish`` are seconds to encode and publish all deltas, ``seconds`` those of everything.
    """

    recipe: str
    checkpoint: str
    encoding: str
    tensors: int
    bytes: int
    deltas: tuple[int, ...]
    changed: float
    publish: float
    seconds: float
    joins: tuple[Join, ...]
    span_bytes: int | None
    anchored: bool

    @property
    def ratio(self) -> float:
        """Bytes of a delta, on average, over those of the checkpoint."""
        return sum(self.deltas) / len(self.deltas) / self.bytes


def rehearse(
    recipe: Recipe, directory: Path, *, change: Training | Synthetic | None = None, seed: int = 0
) -> Report:
    """Rehearse a recipe in an empty or new ``directory``, which keeps what it made.

    The served checkpoint, scaled down, becomes version 0 of a run; deltas of the recipe's encoding are
    published by the trainer's publisher; hosts join through the planner. ``change`` defaults to training at
    the recipe's learning rate. Everything blocks: call it in a thread where an event loop runs. Raises
    RehearsalFailed, and OSError where the disk is full or the directory is used.
    """
    geometry = recipe.model.geometry
    checkpoint = recipe.checkpoints[recipe.serve]
    if change is None:
        change = Training(learning_rate(recipe))
    return rehearse_checkpoint(
        recipe.name,
        geometry,
        checkpoint,
        recipe.versions,
        directory,
        change=change,
        seed=seed,
        of=recipe.serve,
    )


def synthetic(recipe: Recipe) -> Synthetic:
    """The public table's densities for a recipe."""
    given = {str(key): value for key, value in recipe.delta_density.items()}
    return Synthetic(densities(recipe.served.quantization, given))


def rehearse_checkpoint(
    name: str,
    geometry: Geometry,
    checkpoint: Checkpoint,
    versions: Versions,
    directory: Path,
    *,
    change: Training | Synthetic,
    seed: int = 0,
    of: str = "",
) -> Report:
    """See ``rehearse``; ``geometry`` and ``checkpoint`` are those of full size."""
    try:
        return _rehearse(name, geometry, checkpoint, versions, directory, change, seed, of)
    except FAILURES as error:
        raise RehearsalFailed(f"{name}: {error}") from error


def _rehearse(
    name: str,
    geometry: Geometry,
    checkpoint: Checkpoint,
    versions: Versions,
    directory: Path,
    change: Training | Synthetic,
    seed: int,
    of: str,
) -> Report:
    began = time.monotonic()
    files = PosixFiles()
    small, how = scaled(geometry), scaled_checkpoint(checkpoint, geometry)
    content = list(stored(small, how, seed=seed, steps=DELTAS, change=change))
    boot = directory / "base"
    write_checkpoint(boot, files, small, how, ((one.tensor, one.at(0)) for one in content), SHARD_BYTES)
    url = f"file:{directory / 'store'}"
    publishing = time.monotonic()
    published = _publish(url, boot, directory / "work", versions.encoding, content)
    joining = time.monotonic()
    hosts = _Hosts(name, url, boot, directory, versions, content, published)
    joins, span, anchored = asyncio.run(hosts.join())
    return Report(
        recipe=name,
        checkpoint=of,
        encoding=versions.encoding,
        tensors=len(content),
        bytes=sum(one.at(0).size for one in content),
        deltas=tuple(one.manifest.representation.bytes for one in published),
        changed=sum(one.delta.changed_fraction for one in published) / len(published),
        publish=joining - publishing,
        seconds=time.monotonic() - began,
        joins=tuple(joins),
        span_bytes=span,
        anchored=anchored,
    )


def learning_rate(recipe: Recipe) -> float:
    """The recipe's, or the default where it trains nothing."""
    rate = recipe.trainer.flags.get("lr") if recipe.trainer else None
    return rate if isinstance(rate, float) else Training().rate


def _publish(url: str, boot: Path, work: Path, encoding: str, content: Sequence[Stored]) -> list[Published]:
    with PolicyPublisher.start(url, RUN, boot, work, encoding=encoding) as publisher:
        outstanding = [
            publisher.publish(
                {
                    one.tensor.name: Tensor(one.tensor.dtype, one.tensor.shape, one.at(step).data)
                    for one in content
                },
                step=step,
            )
            for step in range(1, DELTAS + 1)
        ]
    return [future.result() for future in outstanding]


class _Hosts:
    """Joins a run in every way that the recipe's versions offer."""

    def __init__(
        self,
        name: str,
        url: str,
        boot: Path,
        directory: Path,
        versions: Versions,
        content: Sequence[Stored],
        published: Sequence[Published],
    ) -> None:
        self._name, self._boot, self._directory, self._versions = name, boot, directory, versions
        self._url, self._content, self._published = url, content, published
        self._files, self._clock, self._rng = PosixFiles(), SystemClock(), random.Random(0)

    async def join(self) -> tuple[list[Join], int | None, bool]:
        """The joins, the bytes of the span, and whether there is an anchor."""
        store = open_store(self._url)
        try:
            middle, head = self._published[DELTAS // 2 - 1].manifest, self._published[-1].manifest
            anchored = self._versions.anchor_every is not None
            joins = [await self._join(store, "base", head, self._boot, middle if anchored else None)]
            if anchored:
                joins.append(await self._join(store, "anchor", head, None))
            span = None
            if self._versions.compact:
                span = await self._compact(store)
                joins.append(await self._join(store, "base and span", head, self._boot))
            return joins, span, anchored
        finally:
            await store.close()

    async def _join(
        self, store: Store, start: str, head: Manifest, boot: Path | None, anchor: Manifest | None = None
    ) -> Join:
        """One host to the head, every byte compared. ``anchor``: a full is uploaded there on the way."""
        chain = ChainReader(store)
        host = HostCheckpoint(self._directory / f"host-{start.replace(' ', '-')}", self._files)
        stager = Stager(
            store, chain, host, boot, files=self._files, clock=self._clock, rng=self._rng,
            run_blocking=asyncio.to_thread, activity=lambda _: None,
        )  # fmt: skip
        boot_state = (await chain.boot(head)).state
        plan = await Planner(store, chain).plan(head, {boot_state} if boot is not None else ())
        seconds = 0.0
        try:
            for target in filter(None, (anchor, head)):
                began = self._clock.monotonic()
                await stager.stage(target)
                seconds += self._clock.monotonic() - began
                self._verify(host, target)
                if target is anchor:
                    await self._anchor(store, anchor, host.directory)
        finally:
            host.close()
        return Join(start, len(plan.sources), plan.bytes, seconds)

    async def _anchor(self, store: Store, manifest: Manifest, directory: Path) -> None:
        anchors = Anchors(
            store, RUN, every=1, clock=self._clock, rng=self._rng, run_blocking=asyncio.to_thread
        )
        done = await anchors.anchor(manifest, directory, self._files)
        if done.record is None or not done.new:
            raise RehearsalFailed(f"{self._name}: no full of {manifest.version} was uploaded")

    async def _compact(self, store: Store) -> int:
        """Bytes of the span over all deltas."""
        compactor = Compactor(
            store, RUN, self._directory / "work" / "compact", RUN, files=self._files, clock=self._clock,
            rng=self._rng, run_blocking=asyncio.to_thread,
            widths={one.tensor.name: width_of(one.tensor.dtype) for one in self._content},
        )  # fmt: skip
        done = await compactor.compact()
        if [(made.record.since, made.record.number) for made in done.made] != [(0, DELTAS)]:
            raise RehearsalFailed(f"{self._name}: no span over all deltas was made: {done}")
        return done.made[0].bytes

    def _verify(self, host: HostCheckpoint, target: Manifest) -> None:
        """Not the digests alone: every byte, against what the trainer had."""
        if host.holding is None or host.holding.state != target.state:
            raise RehearsalFailed(f"{self._name}: the host holds {host.holding}, not {target.version}")
        copy = core.Checkpoint.open(host.directory, self._files)
        if copy.tensors.keys() != {one.tensor.name for one in self._content}:
            raise RehearsalFailed(f"{self._name}: {target.version} has other tensors than version 0")
        for one in self._content:
            if not np.array_equal(np.frombuffer(copy.read(one.tensor.name), np.uint8), one.at(target.number)):
                raise RehearsalFailed(f"{self._name}: {one.tensor.name} of {target.version} differs")
