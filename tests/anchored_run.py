"""A run whose versions get fulls beside the chain, under a clock that a test moves."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

from stitch_core.delta.encoder import DeltaEncoder
from stitch_core.fulls import upload_full
from stitch_core.manifest import Manifest, PayloadFile, Representation, bytes_digest
from stitch_core.ports import Store
from stitch_core.publisher import Publisher
from stitch_core.records import Record, upload_record
from stitch_core.retry import Retry
from stitch_core.stores.memory import MemoryStore
from stitch_core.testing.checkpoints import write_checkpoint
from tests.small_run import FILES, NO_RETRY, FaultyStore, Trainer, inline

HOW: Any = {"rng": random.Random(0), "run_blocking": inline, "policy": Retry(attempts=1)}


class HandClock:
    """A ports.Clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


class Run:
    """A trainer whose publisher raises the floor. Each publish takes ``pace`` seconds."""

    def __init__(self, root: Path) -> None:
        self.root, self.trainer, self.memory = root, Trainer(root / "train"), MemoryStore()
        self.store = FaultyStore(self.memory)
        self.clock, self.pace = HandClock(), 0.0
        self._nonces = itertools.count()
        self.versions: list[Manifest] = []

    async def claim(self, **options: Any) -> None:
        self.publisher = Publisher(
            self.store, "r", files=FILES, clock=self.clock, rng=random.Random(0),
            nonce=lambda: f"n{next(self._nonces)}", run_blocking=inline, retry=NO_RETRY, swap_deadline=0.0,
            raise_floor=True,
        )  # fmt: skip
        head = await self.publisher.claim(self.trainer.version0, **options)
        self.versions = self.versions or [head]

    async def publish(self, count: int = 1) -> Manifest:
        for _ in range(count):
            self.clock.now += self.pace
            self.versions.append(await self.trainer.publish(self.publisher))
        return self.versions[-1]

    async def anchor(self, number: int) -> Record:
        return (await upload_full(self.memory, self.versions[number], self.directory(number), FILES, **HOW))[
            0
        ]

    def directory(self, number: int) -> Path:
        """A version's weights as a checkpoint, written once."""
        path = self.root / f"at{number}"
        if not path.exists():
            write_checkpoint(path, FILES, self.trainer.weights[self.versions[number].state])
        return path

    async def span(self, since: int, number: int) -> Record:
        a, b = self.versions[since], self.versions[number]
        return await upload_span(self.memory, self.root, self.trainer, a, b)


async def upload_span(store: Store, root: Path, trainer: Trainer, a: Manifest, b: Manifest) -> Record:
    """The deltas between two versions as one."""
    directory = root / f"span{a.number}-{b.number}"
    encoded = DeltaEncoder(trainer.weights[a.state]).encode(
        trainer.weights[b.state], directory, FILES, number=b.number, base_number=a.number
    )
    contents = {name: FILES.read(directory / name) for name in encoded.files}
    files = tuple(PayloadFile(n, len(data), bytes_digest(data)) for n, data in contents.items())
    how = Representation("delta", files, a.state, "xor", dict(encoded.changed))
    record = Record("r", b.number, b.state, how, a.number)
    await upload_record(store, record, directory, FILES, HOW)
    return record
