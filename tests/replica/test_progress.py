"""What goes through a whole model says how far it is: on the right thread, now and then, not afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stitch_core import checkpoint, host_data
from stitch_core.chain import ChainReader
from stitch_core.checkpoint import Checkpoint, Progress
from stitch_core.host_checkpoint import HostCheckpoint
from stitch_core.manifest import Manifest
from stitch_core.ports import SystemClock
from stitch_core.replica.admission import Gate
from stitch_core.replica.progress import reported
from stitch_core.replica.reconciler import Follow, Reconciler
from stitch_core.replica.staging import Stager
from stitch_core.stores.memory import MemoryStore
from stitch_core.testing.checkpoints import random_tensors, write_checkpoint
from tests.replica.following import BytesEngine
from tests.small_run import FILES, Trainer


class Ticking(SystemClock):
    """Each look at it takes ``step`` seconds."""

    def __init__(self, step: float) -> None:
        self.step, self.now = step, 0.0

    def monotonic(self) -> float:
        self.now += self.step
        return self.now


class World:
    """A run of two versions, and a replica that stages with threads; a second passes with each look."""

    def __init__(self, tmp_path: Path) -> None:
        self.trainer, self.store = Trainer(tmp_path / "train"), MemoryStore()
        self.root = tmp_path / "host"
        self.activities: list[str] = []
        self.said: list[tuple[str, str]] = []
        self.threads: set[int] = set()
        self.clock = Ticking(0.0)  # the reconciler's
        self.start()

    def start(self) -> None:
        """A new process of the replica."""
        self.activities.clear()
        self.said.clear()
        self.host = HostCheckpoint(self.root, FILES, workers=3)
        gate = Gate(SystemClock(), hold=0.05)
        self.reconciler = Reconciler(
            self.store, BytesEngine(self.trainer.boot), gate, None, Follow("r"), self.trainer.boot, FILES,
            self.clock, random.Random(0), asyncio.to_thread, make_stager=self._stager, say=self._say,
        )  # fmt: skip

    def _stager(self, activity: Any) -> Stager:
        def told(text: str) -> None:
            self.threads.add(threading.get_ident())
            self.activities.append(text)
            activity(text)

        return Stager(
            self.store, ChainReader(self.store), self.host, self.trainer.boot, files=FILES,
            clock=Ticking(1.0), rng=random.Random(0), run_blocking=asyncio.to_thread, activity=told,
        )  # fmt: skip

    def _say(self, text: str) -> None:
        self.said.append((text, self.reconciler.status()["activity"]))

    async def publish(self) -> Manifest:
        publisher = self.trainer.publisher(self.store)
        await publisher.claim(self.trainer.version0)
        return await self.trainer.publish(publisher)

    def close(self) -> None:
        self.host.close()


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of a few bytes are large."""
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 8)
    monkeypatch.setattr(host_data, "COPY_BYTES", 64)


@pytest.mark.parametrize("workers", [1, 4])
def test_hashing_tells_the_thread_that_asked_whichever_threads_hash(
    tmp_path: Path, small_steps: None, workers: int
) -> None:
    tensors = random_tensors(np.random.default_rng(0))
    write_checkpoint(tmp_path / "model", FILES, tensors)
    opened = Checkpoint.open(tmp_path / "model", FILES)
    told: list[tuple[str, int, int]] = []
    threads: set[int] = set()

    def progress(what: str, done: int, total: int) -> None:
        threads.add(threading.get_ident())
        told.append((what, done, total))

    table = opened.table(workers, progress)
    assert table == opened.table()
    total = sum(len(tensor.data) for tensor in tensors.values())
    assert threads == {threading.get_ident()}
    assert len(told) > 2
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1] == ("hashed", total, total)
    assert {(what, of) for what, _, of in told} == {("hashed", total)}


async def test_a_joiner_and_a_restarted_replica_say_how_far_they_are(
    tmp_path: Path, small_steps: None
) -> None:
    """Minutes of hashing a large model looked like a replica that hangs."""
    world = World(tmp_path)
    await world.publish()
    assert await world.reconciler.reconcile()
    seen = {text.partition(": ")[0] for text in world.activities if ": " in text}
    assert {"reading the boot checkpoint", "copying the boot checkpoint"} <= seen
    copying = [text.split() for text in world.activities if text.startswith("copying the boot checkpoint: ")]
    steps = {words[4] for words in copying}
    assert {"copied", "hashed"} <= steps
    assert any(text.endswith(" of 0.00 GiB") for text in world.activities)
    world.close()
    world.start()
    assert await world.reconciler.reconcile()
    assert any(text.startswith("verifying the host checkpoint: hashed ") for text in world.activities)
    assert world.threads == {threading.get_ident()}
    world.close()


async def test_status_has_the_last_and_the_log_one_in_ten_seconds(tmp_path: Path, small_steps: None) -> None:
    world = World(tmp_path)
    await world.publish()
    assert await world.reconciler.reconcile()
    reports = [text for text in world.activities if ": " in text]
    assert world.said == [(reports[0], reports[0])]
    world.close()
    world.clock.step = 4.0
    world.start()
    assert await world.reconciler.reconcile()
    reports = [text for text in world.activities if ": " in text]
    assert world.said[0] == (reports[0], reports[0])
    assert 1 < len(world.said) <= 1 + len(reports) // 2
    assert all(text == status for text, status in world.said)
    world.close()


async def test_at_most_one_report_a_second_and_none_of_what_is_complete() -> None:
    clock, said = Ticking(0.3), list[str]()
    with reported(said.append, "hashing", clock) as progress:
        for done in range(1, 41):
            progress("hashed", done << 28, 40 << 28)
        await asyncio.sleep(0)
    first, second = (f"hashing: hashed {done}.00 GiB of 10.00 GiB" for done in (1, 2))
    assert said[:3] == ["hashing", first, second]
    assert len(said) == 1 + 9


async def test_what_goes_on_after_it_was_given_up_says_nothing_any_more() -> None:
    """A thread cannot be cancelled: it would speak over what the replica does then."""
    clock, said = Ticking(2.0), list[str]()
    with reported(said.append, "hashing", clock) as progress:
        progress("hashed", 1, 3)
    progress("hashed", 2, 3)
    await asyncio.sleep(0)
    assert said == ["hashing"]


def test_a_loop_that_has_ended_is_told_nothing() -> None:
    with contextlib.ExitStack() as open_still:
        said: list[str] = []

        async def begin() -> Progress:
            return open_still.enter_context(reported(said.append, "hashing", Ticking(2.0)))

        progress = asyncio.run(begin())
        progress("hashed", 1, 3)
        assert said == ["hashing"]
