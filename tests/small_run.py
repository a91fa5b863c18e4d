"""A tiny trainer with the real encoder and publisher, a store that misbehaves, a distrustful reader."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from stitch_core.chain import ChainReader
from stitch_core.checkpoint import Checkpoint
from stitch_core.delta.encoder import DeltaEncoder, EncodedDelta
from stitch_core.files import PosixFiles
from stitch_core.host_checkpoint import HostCheckpoint
from stitch_core.manifest import Manifest
from stitch_core.ports import Blob, Buffer, Capabilities, Entry, FileSource, Store, SystemClock, Unavailable
from stitch_core.publisher import Boot, Payload, Publisher
from stitch_core.replica.staging import Stager
from stitch_core.retry import Retry
from stitch_core.safetensors import Tensor
from stitch_core.state import state_digest
from stitch_core.testing.checkpoints import random_tensors, step, table_of, write_checkpoint

T = TypeVar("T")
Tensors = dict[str, Tensor]

LAYOUT: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "a": ("BF16", (6, 4)),
    "b": ("F32", (5,)),
    "scale": ("F32", ()),
}


FILES = PosixFiles()
NO_RETRY = Retry(attempts=1)
QUICK_RETRY = Retry(attempts=4, first=0.001, cap=0.002)


async def inline(function: Callable[..., T], /, *args: Any) -> T:
    """A ``RunBlocking`` without threads: one order of events."""
    return function(*args)


def tick(directory: Path) -> None:
    """Return once the file system's clock, which moves in steps, has moved on."""
    probe, began = directory / "tick", None
    while True:
        probe.write_bytes(b"")
        now = probe.stat().st_mtime_ns
        probe.unlink()
        began = began or now
        if now != began:
            return


class Trainer:
    """Weights, and the proven base that deltas are encoded against, as a trainer's plugin keeps them.

    ``weights`` remembers every weights ever made, by state.
    """

    def __init__(self, root: Path, *, run: str = "r", seed: int = 0) -> None:
        self.run = run
        self.root = root
        self.boot = root / "boot"
        self._rng = np.random.default_rng(seed)
        self.tensors: Tensors = random_tensors(self._rng, LAYOUT)
        if not self.boot.exists():
            write_checkpoint(self.boot, FILES, self.tensors)
        self.state = state_digest(table_of(self.tensors))
        self.weights: dict[str, Tensors] = {self.state: self.tensors}
        self.encoder = DeltaEncoder(self.tensors)
        self._counter = itertools.count()

    @property
    def version0(self) -> Boot:
        return Boot("boot", self.state)

    def publisher(
        self, store: Store, *, retry: Retry = NO_RETRY, deadline: float = 0.0, alone: bool = False
    ) -> Publisher:
        """A new process of this trainer; by default it tries everything once."""
        return Publisher(
            store, self.run, files=FILES, clock=SystemClock(), rng=random.Random(0),
            nonce=lambda: f"nonce-{next(self._counter)}-{id(self):x}", run_blocking=inline, retry=retry,
            swap_deadline=deadline, alone=alone,
        )  # fmt: skip

    def learn(self, *names: str) -> Tensors:
        """One more step; only ``names`` change, if given."""
        chosen = {name: self.tensors[name] for name in names or self.tensors}
        self.tensors = {**self.tensors, **step(self._rng, chosen, 0.3)}
        self.weights[state_digest(table_of(self.tensors))] = self.tensors
        return self.tensors

    def resume(self, state: str) -> None:
        """Go on from a version's weights, as from a checkpoint that was saved with it."""
        self.tensors = self.weights[state]
        self.encoder = DeltaEncoder(self.tensors)

    def delta(self, number: int, *, base_number: int = 0) -> Payload:
        """The next version as a delta against the encoder's base."""
        directory = self.root / f"{self.run}-delta-{next(self._counter)}"
        encoded = self.encoder.encode(self.learn(), directory, FILES, number=number, base_number=base_number)
        return as_payload(encoded, directory)

    def full(self) -> Payload:
        """The next version as a full checkpoint."""
        directory = self.root / f"{self.run}-full-{next(self._counter)}"
        write_checkpoint(directory, FILES, self.learn(), 2)
        self.encoder = DeltaEncoder(self.tensors)
        names = tuple(FILES.list(directory))
        return Payload("full", state_digest(table_of(self.tensors)), directory, names)

    async def publish(self, publisher: Publisher) -> Manifest:
        """One more step, published; on failure the base is where it was."""
        number = publisher.reserve()
        payload = self.delta(number)
        try:
            manifest = await publisher.publish(payload, number)
        except BaseException:
            self.encoder.undo()
            raise
        self.encoder.commit()
        return manifest


def as_payload(encoded: EncodedDelta, directory: Path) -> Payload:
    return Payload(
        "delta", encoded.state, directory, encoded.files, encoded.base, encoded.encoding, encoded.changed
    )


async def published(trainer: Trainer, store: Store, count: int, full_at: int = 0) -> list[Manifest]:
    """Versions 0 to ``count``, deltas but for one."""
    publisher = trainer.publisher(store)
    chain = [await publisher.claim(trainer.version0)]
    for number in range(1, count + 1):
        if number == full_at:
            chain.append(await publisher.publish(trainer.full()))
        else:
            chain.append(await trainer.publish(publisher))
    return chain


async def chain_of(store: Store, run: str) -> list[Manifest]:
    """Every version on the head's chain, oldest first."""
    reader = ChainReader(store)
    head, _ = await reader.head(run)
    newest = await reader.manifest(run, head)
    return list(reversed(await reader.back_to(newest, above_floor=False)))


async def rebuild_all(store: Store, trainer: Trainer, root: Path) -> list[Manifest]:
    """Every version of the run, rebuilt from the store alone and compared with what the trainer had."""
    chain = await chain_of(store, trainer.run)
    host = HostCheckpoint(root, FILES)
    stager = Stager(
        store, ChainReader(store), host, trainer.boot, files=FILES, clock=SystemClock(), rng=random.Random(0),
        run_blocking=inline, activity=lambda _: None,
    )  # fmt: skip
    try:
        for manifest in chain:
            await stager.stage(manifest)
            checkpoint = Checkpoint.open(host.directory, FILES)
            expected = trainer.weights[manifest.state]
            for name, tensor in expected.items():
                assert checkpoint.read(name) == bytes(tensor.data), f"{manifest.version}: {name}"
    finally:
        host.close()
    return chain


class FaultyStore:
    """Delegates to ``store`` and counts the calls. ``fail(index, name, key)`` says what goes wrong with one:

    "before": it does not arrive; "after": it is carried out, the answer is lost; "late": a write is carried
    out after ``late_by`` more calls, or by ``land``. An exception is raised as it is.
    """

    def __init__(
        self,
        store: Store,
        fail: Callable[[int, str, str], str | Exception | None] = lambda *_: None,
        late_by: int = 3,
    ) -> None:
        self.store, self.fail, self.late_by = store, fail, late_by
        self.calls: list[tuple[str, str]] = []
        self._late: list[tuple[int, Callable[[], Awaitable[Any]]]] = []

    @property
    def capabilities(self) -> Capabilities:
        return self.store.capabilities

    async def land(self) -> None:
        """What is under way arrives now."""
        late, self._late = self._late, []
        for _, call in late:
            await _quietly(call)

    async def _do(self, name: str, key: str, call: Callable[[], Awaitable[T]]) -> T:
        index = len(self.calls)
        self.calls.append((name, key))
        due = [late for late in self._late if late[0] <= index]
        self._late = [late for late in self._late if late[0] > index]
        for _, late in due:
            await _quietly(late)
        fault = self.fail(index, name, key)
        await asyncio.sleep(0)
        if fault is None:
            return await call()
        if isinstance(fault, Exception):
            raise fault
        if fault == "after":
            await call()
        elif fault == "late" and name in ("create", "swap"):
            self._late.append((index + self.late_by, call))
        raise Unavailable(f"call {index}, {name} {key}: no answer")

    async def load(self, key: str) -> Blob:
        return await self._do("load", key, lambda: self.store.load(key))

    async def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return await self._do("read", key, lambda: self.store.read(key, start, length))

    async def size(self, key: str) -> int:
        return await self._do("size", key, lambda: self.store.size(key))

    async def create(self, key: str, source: Buffer | FileSource) -> None:
        await self._do("create", key, lambda: self.store.create(key, source))

    async def swap(self, key: str, expected: str | None, data: bytes) -> str:
        return await self._do("swap", key, lambda: self.store.swap(key, expected, data))

    async def replace(self, key: str, data: bytes) -> None:
        await self._do("replace", key, lambda: self.store.replace(key, data))

    async def list(self, prefix: str) -> list[Entry]:
        return await self._do("list", prefix, lambda: self.store.list(prefix))

    async def delete(self, key: str) -> None:
        await self._do("delete", key, lambda: self.store.delete(key))

    async def close(self) -> None:
        await self.store.close()


async def _quietly(call: Callable[[], Awaitable[Any]]) -> None:
    try:
        await call()
    except Exception as error:
        # What lands late may find that somebody else was faster.
        assert type(error).__name__ in ("Conflict", "AlreadyExists"), error  # noqa: PT017
