"""C04, C07, C31 behind the trainer: whatever call fails, the base is the head's, nothing is lost or doubled.

The real publisher, encoder and pipeline in one event loop, without a thread: every order of events is one
that the seed chose.
"""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import Future
from pathlib import Path

import pytest

from stitch_core.manifest import Manifest
from stitch_core.pipeline import OUTSTANDING, Pipeline
from stitch_core.ports import Unavailable
from stitch_core.publisher import Fenced, OutcomeUnknown, Publisher, PublishError
from stitch_core.stores.memory import MemoryStore
from tests.small_run import FILES, FaultyStore, Trainer, as_payload, chain_of, rebuild_all


class Behind:
    """A trainer that publishes behind its steps, as ``PolicyPublisher`` does with a thread."""

    def __init__(self, trainer: Trainer, publisher: Publisher) -> None:
        self.trainer, self.publisher = trainer, publisher
        self.pipeline: Pipeline[Manifest] = Pipeline(trainer.encoder, publisher.head.number)
        self.futures: dict[int, Future[Manifest]] = {}
        self.failures: list[BaseException] = []
        self._turn = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    async def publish(self) -> None:
        """One step; raises what the claim raises when it is lost."""
        while len(self.pipeline.outstanding()) >= OUTSTANDING and not self.pipeline.ended():  # noqa: ASYNC110
            await asyncio.sleep(0)
        self.pipeline.make_room(0)
        await self.settle()
        number = self.publisher.reserve()
        directory = self.trainer.root / f"behind-{self.publisher.epoch}-{number}"
        delta = self.trainer.encoder.encode(
            self.trainer.learn(), directory, FILES, number=number, base_number=self.pipeline.encoded
        )
        future: Future[Manifest] = Future()
        self.futures[number] = future
        self._tasks.append(asyncio.ensure_future(self._run(future, number, as_payload(delta, directory))))
        self.pipeline.queued(number, future)

    async def settle(self) -> None:
        while ended := self.pipeline.ended():
            if any(future.exception() for future in self.pipeline.outstanding()[:ended]):
                await asyncio.gather(*self._tasks)  # those behind a failure end without a call
            failure = self.pipeline.settle(ended)
            if failure is not None:
                self.failures.append(failure)

    async def flush(self) -> None:
        await asyncio.gather(*self._tasks)
        await self.settle()

    def published(self) -> list[int]:
        return [number for number, future in self.futures.items() if future.exception() is None]

    async def _run(self, future: Future[Manifest], number: int, payload: object) -> None:
        try:
            async with self._turn:
                with self.pipeline.turn(number):
                    manifest = await self.publisher.publish(payload, number)  # type: ignore[arg-type]
            future.set_result(manifest)
        except Exception as error:
            future.set_exception(error)


async def train(root: Path, store: MemoryStore, faulty: FaultyStore, seed: int, steps: int = 4) -> None:
    """Publish behind the steps; a lost claim is claimed again, as a restarted trainer does."""
    trainer, rng = Trainer(root), random.Random(seed)
    published: list[int] = []
    behind: Behind | None = None
    done = False
    for _ in range(steps * 4):
        try:
            if behind is None:
                publisher = trainer.publisher(faulty)
                head = await publisher.claim(trainer.version0)
                trainer.resume(head.state)
                behind = Behind(trainer, publisher)
            if behind.pipeline.encoded >= steps:
                await behind.flush()
                behind.publisher.reserve()  # raises when the claim is lost
                done = True
                break
            await behind.publish()
        except (OutcomeUnknown, Fenced, Unavailable):
            if behind is not None:
                await behind.flush()
                published += behind.published()
            behind = None
            await faulty.land()
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
    assert behind is not None
    assert done
    published += behind.published()
    chain = await rebuild_all(store, trainer, root / "host")
    numbers = [manifest.number for manifest in chain]
    assert set(published) <= set(numbers), "a version that was acknowledged is gone"
    assert len(set(numbers)) == len(numbers)
    assert trainer.encoder.state == behind.publisher.head.state == chain[-1].state
    assert trainer.encoder.outstanding == 0
    assert behind.pipeline.published == behind.pipeline.encoded == numbers[-1]


def fault_at(call: int, kind: str) -> FaultyStore:
    return FaultyStore(MemoryStore(), lambda index, name, key: kind if index == call else None)


@pytest.mark.parametrize("kind", ["before", "after", "late"])
def test_a_fault_at_each_call(tmp_path: Path, kind: str) -> None:
    calls = 1
    call = 2  # the first calls are the claim's
    while call < calls + 2:
        faulty = fault_at(call, kind)
        asyncio.run(train(tmp_path / str(call), faulty.store, faulty, seed=call))  # type: ignore[arg-type]
        calls = len(faulty.calls)
        call += 2 if kind == "before" else 3
    assert calls > 20


@pytest.mark.parametrize("seed", range(12))
def test_many_faults_in_any_order(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    store = MemoryStore()
    kinds = ["before", "after", "late"]
    faulty = FaultyStore(
        store, lambda index, *_: rng.choice(kinds) if index > 4 and rng.random() < 0.04 else None
    )
    asyncio.run(train(tmp_path, store, faulty, seed, steps=8))


def test_what_waits_behind_a_failure_makes_no_call_and_the_next_repairs(tmp_path: Path) -> None:
    async def run() -> None:
        store = MemoryStore()
        faulty = FaultyStore(store, lambda i, name, key: "before" if "v000001" in key else None)
        trainer = Trainer(tmp_path)
        publisher = trainer.publisher(faulty)
        await publisher.claim(trainer.version0)
        behind = Behind(trainer, publisher)
        await behind.publish()
        await behind.publish()
        assert behind.pipeline.encoded == 2
        assert trainer.encoder.outstanding == 2
        await behind.flush()
        assert [str(behind.futures[n].exception()).split(":")[0] for n in (1, 2)] == [
            "version 1 of run r was not published", "version 2 was not published",
        ]  # fmt: skip
        assert not any("v000002" in key for _, key in faulty.calls)
        assert trainer.encoder.state == publisher.head.state
        assert len(behind.failures) == 1
        await behind.publish()
        await behind.flush()
        assert [m.number for m in await chain_of(store, "r")] == [0, 3]

    asyncio.run(run())


def test_an_unknown_outcome_leaves_the_base_at_what_is_known(tmp_path: Path) -> None:
    async def run() -> None:
        store = MemoryStore()
        faulty = FaultyStore(store)
        trainer = Trainer(tmp_path)
        publisher = trainer.publisher(faulty)
        await publisher.claim(trainer.version0)
        behind = Behind(trainer, publisher)
        faulty.fail = lambda i, name, key: "late" if name == "swap" else None
        faulty.late_by = 1000
        await behind.publish()
        await behind.publish()
        await behind.flush()
        assert isinstance(behind.futures[1].exception(), OutcomeUnknown)
        assert isinstance(behind.futures[2].exception(), PublishError)
        with pytest.raises(OutcomeUnknown):
            await behind.publish()
        assert trainer.encoder.state == trainer.version0.state
        faulty.fail = lambda *_: None
        await faulty.land()  # it was published after all: the next claim finds it
        assert [m.number for m in await chain_of(store, "r")] == [0, 1]
        assert (await trainer.publisher(store).claim(trainer.version0)).number == 1

    asyncio.run(run())


def test_one_that_was_fenced_publishes_nothing_more(tmp_path: Path) -> None:
    async def run() -> None:
        store = MemoryStore()
        trainer = Trainer(tmp_path)
        old = trainer.publisher(store)
        await old.claim(trainer.version0)
        behind = Behind(trainer, old)
        await behind.publish()
        await behind.flush()
        await trainer.publisher(store).claim(trainer.version0)
        await behind.publish()
        await behind.publish()
        await behind.flush()
        assert [type(behind.futures[n].exception()) for n in (2, 3)] == [Fenced, PublishError]
        with pytest.raises(Fenced):
            await behind.publish()
        assert trainer.encoder.state == behind.publisher.head.state

    asyncio.run(run())
