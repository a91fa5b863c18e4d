"""A trainer of several ranks in one process: a thread each, a group over them, a small policy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from stitch_core.checkpoint import Checkpoint
from stitch_core.delta.directory import write_index, write_shards
from stitch_core.delta.encoder import DeltaEncoder
from stitch_core.safetensors import Tensor
from stitch_core.stores.local import LocalStore
from stitch_core.testing.checkpoints import ODD, random_tensors, step, write_checkpoint
from stitch_core.trainers.own_delta import OwnDelta
from stitch_core.trainers.publication import GroupPublisher
from stitch_core.trainers.settings import TrainerSettings
from stitch_core.versions import directory_name
from tests.small_run import FILES

T = TypeVar("T")
SECONDS = 60.0


class Lost(Exception):
    """What a rank raises that dies."""


class ThreadGroup:
    """``TrainerGroup`` over threads. A rank that is gone breaks every gather, as in the real ones."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(values)
        self._values, self._barrier = values, barrier
        self._twins: list[threading.Barrier] = []

    def gather(self, value: T) -> list[T]:
        self._values[self.rank] = value
        self._barrier.wait()
        result = list(self._values)
        self._barrier.wait()
        return result

    def twin(self) -> ThreadGroup:
        """Rank 0 makes what they share."""
        made = None
        if self.rank == 0:
            made = [None] * self.size, threading.Barrier(self.size, timeout=SECONDS)
        values, barrier = next(found for found in self.gather(made) if found)
        self._twins.append(barrier)
        return ThreadGroup(self.rank, values, barrier)

    def die(self) -> None:
        for barrier in (self._barrier, *self._twins):
            barrier.abort()
        raise Lost


def on_ranks(size: int, call: Callable[[ThreadGroup], T]) -> list[T | Exception]:
    """What ``call`` returned, or raised, on each rank."""
    values: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=SECONDS)

    def one(rank: int) -> T | Exception:
        try:
            return call(ThreadGroup(rank, values, barrier))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def same(results: list[Any]) -> Any:
    """The result that all ranks have."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    assert all(result == results[0] for result in results), results
    return results[0]


class World:
    """A boot checkpoint, a store on disk, and every weights ever made."""

    def __init__(self, root: Path, seed: int = 0) -> None:
        self.root, self.boot = root, root / "boot"
        self.rng = np.random.default_rng(seed)
        self.tensors: dict[str, Tensor] = random_tensors(self.rng, ODD)
        write_checkpoint(self.boot, FILES, self.tensors, shards=2)
        self.history = [self.tensors]

    def settings(self, **changes: Any) -> TrainerSettings:
        known: dict[str, Any] = {"run": "r", "store": f"file:{self.root}/store", "boot": self.boot}
        return TrainerSettings(**(known | {"work": self.root / "work"} | changes))

    def store(self) -> LocalStore:
        return LocalStore(self.root / "store")

    def publisher(self, group: Any, **changes: Any) -> GroupPublisher:
        return GroupPublisher(self.settings(**changes), group, files=FILES, store=self.store)

    def left(self) -> list[str]:
        """What of versions lies where our own encoder works, but for empty directories."""
        paths = (self.root / "work" / "updates").rglob("*")
        return [str(path) for path in paths if path.is_file() or "weight_v" in path.name]

    def learn(self, density: float = 0.3) -> dict[str, Tensor]:
        self.tensors = step(self.rng, self.tensors, density)
        self.history.append(self.tensors)
        return self.tensors

    def share(self, tensors: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
        """A rank's part; the first tensor belongs to all, as tied embeddings do."""
        names = sorted(tensors)
        return {name: tensors[name] for i, name in enumerate(names) if i == 0 or i % size == rank}


class Stock:
    """Writes deltas as the frameworks do: ranks write shards, rank 0 the index, the base moves at once."""

    def __init__(self, world: World, root: Path) -> None:
        self.world, self.root, self.number = world, root, 0
        self._encoder = DeltaEncoder(world.history[0])

    def snapshot(self, directory: Path) -> None:
        """The base becomes what a checkpoint directory holds, as at a framework's first call."""
        self._encoder = DeltaEncoder.from_checkpoint(Checkpoint.open(directory, FILES))

    def write(self, tensors: dict[str, Tensor], size: int = 2, **index: Any) -> Path:
        self.number += 1
        directory = self.root / directory_name(self.number)
        FILES.make_dirs(directory)
        weight_map: dict[str, str] = {}

        def writer(payloads: Any) -> list[str]:
            for rank in range(size):
                part = self.world.share(dict(payloads), rank, size)
                weight_map.update(write_shards(directory, FILES, part, stem=f"model-{rank}"))
            return []

        self._encoder.write(tensors, writer)
        self._encoder.commit()
        write_index(directory, FILES, weight_map, number=self.number, base_number=self.number - 1, **index)
        return directory


def own(world: World, group: Any, **settings: Any) -> OwnDelta:
    publisher = world.publisher(group, **settings)
    publisher.claim()
    return OwnDelta(publisher, FILES)
