"""The synchronous publisher: one running, one waiting, and a base that is always the head's."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from stitch_core import policy_publisher
from stitch_core.checkout import checkout
from stitch_core.checkpoint import Checkpoint, CheckpointError
from stitch_core.delta import DeltaError
from stitch_core.dialects import INDEX_NAME
from stitch_core.files import PosixFiles
from stitch_core.manifest import Manifest
from stitch_core.policy_publisher import PolicyPublisher, Published
from stitch_core.ports import Store, StoreError
from stitch_core.publisher import ClaimRefused, Fenced, OutcomeUnknown, PublishError
from stitch_core.state import state_digest
from stitch_core.stores.memory import MemoryStore
from stitch_core.testing.checkpoints import table_of
from tests.small_run import FaultyStore, Trainer, rebuild_all


class Gated(FaultyStore):
    """Holds every call whose key contains ``hold`` until ``go`` is set."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.hold: str | None = None
        self.go = threading.Event()
        self.held = threading.Event()
        self.closed = False

    async def _do(self, name: str, key: str, call: Callable) -> object:  # type: ignore[override, type-arg]
        if self.hold is not None and self.hold in key:
            self.held.set()
            while not self.go.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        return await super()._do(name, key, call)

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


@pytest.fixture
def store() -> Gated:
    return Gated(MemoryStore())


@contextmanager
def started(trainer: Trainer, store: Gated) -> Iterator[PolicyPublisher]:
    publisher = PolicyPublisher(
        lambda: store, trainer.run, trainer.boot, trainer.root / "work", producer={"name": "test"}
    )
    try:
        yield publisher
    finally:
        store.go.set()
        with suppress(PublishError):
            publisher.close(timeout=60)


def refuse(part: str) -> Callable[[int, str, str], Exception | None]:
    """Create-only writes under keys with ``part`` fail for good."""
    return lambda index, name, key: StoreError("disk full") if name == "create" and part in key else None


def numbers(store: Gated, trainer: Trainer) -> list[int]:
    """Versions on the chain, each rebuilt from the store and compared."""
    chain = asyncio.run(rebuild_all(store.store, trainer, trainer.root / "host"))
    return [manifest.number for manifest in chain]


def test_publishes_in_order_while_the_trainer_goes_on(trainer: Trainer, store: Gated) -> None:
    with started(trainer, store) as publisher:
        futures = [publisher.publish(trainer.learn(), step=10 * i) for i in range(5)]
        publisher.flush(60)
        assert [future.result().number for future in futures] == [1, 2, 3, 4, 5]
        assert publisher.head == 5
        last = futures[-1].result()
        assert isinstance(last, Published)
        assert (last.manifest.step, dict(last.manifest.producer)) == (40, {"name": "test"})
        assert 0 < last.delta.changed_fraction <= 1
    assert numbers(store, trainer) == [0, 1, 2, 3, 4, 5]
    assert store.closed
    assert list((trainer.root / "work").iterdir()) == []


def test_a_queue_of_one_then_backpressure(trainer: Trainer, store: Gated) -> None:
    with started(trainer, store) as publisher:
        store.hold = "weight_v000001"
        first, second = publisher.publish(trainer.learn()), publisher.publish(trainer.learn())
        assert store.held.wait(60)
        assert not first.done()
        with pytest.raises(TimeoutError, match=r"a publish is not done after 0.05 s"):
            publisher.publish(trainer.learn(), timeout=0.05)
        assert publisher.head == 0
        assert not any("v000002" in key for _, key in store.calls), "the one that waits uploads nothing"
        with pytest.raises(TimeoutError, match=r"2 publishes are not done after 0.05 s"):
            publisher.flush(0.05)
        threading.Timer(0.05, store.go.set).start()
        third = publisher.publish(trainer.learn(), timeout=60)
        publisher.flush(60)
        assert [f.result().number for f in (first, second, third)] == [1, 2, 3]
    assert numbers(store, trainer) == [0, 1, 2, 3]


def test_the_index_says_which_version_a_delta_is_built_on(trainer: Trainer, store: Gated) -> None:
    """Stock receivers compare it; a version that waits is built on the one before it, not on the head."""

    def base_in(index: str) -> str:
        data = json.loads(store.store.state.objects[f"runs/r/e0001/{index}/{INDEX_NAME}"])  # type: ignore[attr-defined]
        return str(data["metadata"]["base_version"])

    with started(trainer, store) as publisher:
        for _ in range(3):
            publisher.publish(trainer.learn())
        publisher.flush(60)
        store.fail = refuse("v000004")
        failed = publisher.publish(trainer.learn())
        assert isinstance(failed.exception(10), PublishError)
        store.fail = lambda *_: None
        publisher.publish(trainer.learn())
        publisher.flush(60)
    bases = [base_in(f"weight_v{n:06d}") for n in (1, 2, 3, 5)]
    assert bases == ["000000", "000001", "000002", "000003"]


def test_c04_a_failed_publish_fails_what_waits_behind_it(trainer: Trainer, store: Gated) -> None:
    with started(trainer, store) as publisher:
        publisher.publish(trainer.learn())
        publisher.flush(60)
        store.hold, store.fail = "weight_v000002", refuse("v000002")
        first, second = publisher.publish(trainer.learn()), publisher.publish(trainer.learn())
        store.go.set()
        with pytest.raises(PublishError, match="version 2 of run r was not published: disk full"):
            first.result(60)
        with pytest.raises(PublishError, match="version 3 was not published: the publish before it failed"):
            second.result(60)
        assert publisher.publish(trainer.learn()).result(60).number == 4
        assert publisher.publish(trainer.learn()).result(60).number == 5
    assert numbers(store, trainer) == [0, 1, 4, 5]
    assert list((trainer.root / "work").iterdir()) == []


def test_c04_any_publish_may_fail_in_any_order(trainer: Trainer, store: Gated) -> None:
    """Encoded behind a failure or after it was seen: what follows is built on the head."""
    with started(trainer, store) as publisher:
        store.fail = lambda index, name, key: (
            StoreError("disk full") if name == "create" and f"v{index % 7:06d}" in key else None
        )
        futures: list[Future[Published]] = []
        for i in range(24):
            futures.append(publisher.publish(trainer.learn(), timeout=60))
            if i % 5 == 0:
                futures[-1].exception(10)
        store.fail = lambda *_: None
        futures[-1].exception(10)
        futures.append(publisher.publish(trainer.learn()))
        good = [f.result(60).number for f in futures if f.exception(10) is None]
    assert good[-1] == 25
    assert numbers(store, trainer) == [0, *good]


def test_flush_and_close_say_what_failed(trainer: Trainer, store: Gated) -> None:
    with started(trainer, store) as publisher:
        store.fail = refuse("v00000")
        publisher.publish(trainer.learn())
        with pytest.raises(PublishError, match="version 1"):
            publisher.flush(60)
        publisher.flush(60)
        publisher.publish(trainer.learn())
        with pytest.raises(PublishError, match="version 2"):
            publisher.close(60)
        publisher.close(60)
        with pytest.raises(PublishError, match="this publisher is closed"):
            publisher.publish(trainer.learn())
    assert store.closed
    assert not any(thread.name == "stitch-publish" for thread in threading.enumerate())


def test_close_cuts_off_what_does_not_end(trainer: Trainer, store: Gated) -> None:
    with started(trainer, store) as publisher:
        store.hold = "weight_v000001"
        futures = [publisher.publish(trainer.learn()) for _ in range(2)]
        assert store.held.wait(60)
        with pytest.raises(TimeoutError, match="2 publishes are not done"):
            publisher.close(timeout=0.05)
        for future in futures:
            with pytest.raises(PublishError, match="the publisher was closed before the end"):
                future.result(0)
    assert numbers(store, trainer) == [0]
    assert list((trainer.root / "work").iterdir()) == []


def test_a_future_cannot_be_cancelled(trainer: Trainer, store: Gated) -> None:
    with started(trainer, store) as publisher:
        store.hold = "weight_v000001"
        future = publisher.publish(trainer.learn())
        assert not future.cancel()
        store.go.set()
        assert future.result(60).number == 1


def test_a_layout_that_differs_changes_nothing(trainer: Trainer, store: Gated) -> None:
    with started(trainer, store) as publisher:
        with pytest.raises(DeltaError, match="tensor b is missing"):
            publisher.publish({name: t for name, t in trainer.tensors.items() if name != "b"})
        with pytest.raises(DeltaError, match="tensor b has dtype BF16"):
            publisher.publish({**trainer.tensors, "b": trainer.tensors["b"]._replace(dtype="BF16")})
        assert publisher.publish(trainer.learn()).result(60).number == 3
    assert numbers(store, trainer) == [0, 3]


def test_c01_nothing_changed_is_a_version_without_payload(trainer: Trainer, store: Gated) -> None:
    with started(trainer, store) as publisher:
        published = publisher.publish(trainer.tensors).result(60)
        assert published.manifest.state == trainer.state
        assert [f.name for f in published.manifest.representation.files] == [INDEX_NAME]
        assert publisher.publish(trainer.learn("scale")).result(60).delta.changed.keys() == {"scale"}
    assert numbers(store, trainer) == [0, 1, 2]


def test_outcome_unknown_stops_this_writer(trainer: Trainer, store: Gated) -> None:
    with started(trainer, store) as publisher:
        store.fail = lambda i, name, key: StoreError("denied") if name == "swap" else None
        future = publisher.publish(trainer.learn())
        with pytest.raises(OutcomeUnknown, match="whether its head moved to 1"):
            future.result(60)
        with pytest.raises(OutcomeUnknown):
            publisher.publish(trainer.learn())
        assert publisher.head == 0
    assert numbers(store, trainer) == [0]


def test_c07_a_second_trainer_takes_the_run_over(trainer: Trainer, store: Gated) -> None:
    with started(trainer, store) as old:
        new_store = Gated(store.store)
        with started(trainer, new_store) as new:
            assert new.publish(trainer.learn()).result(60).number == 1
            future = old.publish(trainer.learn())
            with pytest.raises(Fenced, match="another writer has claimed run r"):
                future.result(60)
            with pytest.raises(Fenced):
                old.publish(trainer.learn())
            assert new.publish(trainer.learn()).result(60).number == 2
    assert numbers(store, trainer) == [0, 1, 2]


def test_c07_a_trainer_that_cannot_go_on_fences_nobody(trainer: Trainer, store: Gated) -> None:
    """Started from the boot checkpoint although the run has gone on: refused, and the other publishes on."""
    with started(trainer, store) as publisher:
        publisher.publish(trainer.learn()).result(60)
        second = Gated(store.store)
        with (
            pytest.raises(ClaimRefused, match=r"run r is at version 1, whose state is .*: resume from a"),
            started(trainer, second),
        ):
            pass
        assert second.closed
        assert publisher.publish(trainer.learn()).result(60).number == 2
    assert numbers(store, trainer) == [0, 1, 2]


def resumed(trainer: Trainer, store: Gated, saved: int, **more: bool) -> PolicyPublisher:
    return PolicyPublisher(
        lambda: store, trainer.run, trainer.boot, trainer.root / "work", producer={}, saved=saved, **more
    )


def test_c06_resumes_at_any_saved_version(trainer: Trainer, store: Gated) -> None:
    weights = []
    with started(trainer, store) as publisher:
        for _ in range(4):
            weights.append(trainer.learn())
            publisher.publish(weights[-1])
    for saved in (2, 0, 5):
        with resumed(trainer, Gated(store.store), saved) as publisher:
            published = publisher.publish(weights[1]).result(60)
            assert published.manifest.state == state_digest(table_of(weights[1]))
    assert numbers(store, trainer) == [0, 1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(ClaimRefused, match=r"saved at version 9: is this the same store\?"):
        resumed(trainer, Gated(store.store), 9)


def test_c06_resumes_above_a_raised_floor(trainer: Trainer, store: Gated) -> None:
    async def full() -> str:
        writer = trainer.publisher(store.store)
        await writer.claim(trainer.version0)
        return (await writer.publish(trainer.full())).state

    with started(trainer, store) as publisher:
        publisher.publish(trainer.learn())
    floor = asyncio.run(full())
    with resumed(trainer, Gated(store.store), 1) as publisher:
        published = publisher.publish(trainer.learn()).result(60)
        assert published.delta.base == floor
    assert numbers(store, trainer) == [0, 1, 2, 3]
    assert list((trainer.root / "work").iterdir()) == []


def test_c75_a_checked_out_base_that_changes_before_it_is_read(
    trainer: Trainer, store: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it held when it was checked out is not what the encoder has; nobody could apply its deltas."""
    publishing = trainer.publisher(store)
    asyncio.run(publishing.claim(trainer.version0))
    asyncio.run(publishing.publish(trainer.full()))
    bases: list[Path] = []

    async def changed(store: Store, run: str, number: int, directory: Path, **more: Any) -> Manifest:
        manifest = await checkout(store, run, number, directory, **more)
        bases.append(directory)
        ref = Checkpoint.open(directory, PosixFiles()).tensors["b"]
        data = bytearray(ref.file.read_bytes())
        data[ref.offset] ^= 1
        ref.file.write_bytes(data)
        return manifest

    monkeypatch.setattr(policy_publisher, "checkout", changed)
    with pytest.raises(DeltaError) as caught:
        resumed(trainer, store, 1)
    assert str(bases[0]) in str(caught.value)


def test_c35_a_version_that_a_rollback_gave_up(trainer: Trainer, store: Gated) -> None:
    with started(trainer, store) as publisher:
        for _ in range(3):
            publisher.publish(trainer.learn())

    async def rollback() -> None:
        await trainer.publisher(store.store).take_back(1)

    asyncio.run(rollback())
    with pytest.raises(ClaimRefused, match="a rollback to 1 gave up the versions 2 to 3"):
        resumed(trainer, Gated(store.store), 2)
    with resumed(trainer, Gated(store.store), 2, override=True) as publisher:
        assert publisher.publish(trainer.learn()).result(60).number == 4
    assert numbers(store, trainer) == [0, 1, 2, 3, 4]


def test_a_start_that_fails_leaves_no_thread(trainer: Trainer, tmp_path: Path) -> None:
    def broken() -> Store:
        raise StoreError("no such store")

    with pytest.raises(StoreError, match="no such store"):
        PolicyPublisher(broken, "r", trainer.boot, tmp_path / "work", producer={})
    with pytest.raises(CheckpointError, match="no such directory"):
        PolicyPublisher.start("memory://x", "r", tmp_path / "nothing", tmp_path / "work")
    with pytest.raises(ValueError, match="not a store URL"):
        PolicyPublisher.start("/data", "r", trainer.boot, tmp_path / "work")
    with pytest.raises(ValueError, match="run id"):
        PolicyPublisher.start("memory://x", "no/run", trainer.boot, tmp_path / "work")
    assert not any(thread.name == "stitch-publish" for thread in threading.enumerate())


def test_a_real_store_in_a_directory(trainer: Trainer, tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'store'}"
    publisher = PolicyPublisher.start(url, "r", trainer.boot, tmp_path / "work")
    for _ in range(3):
        publisher.publish(trainer.learn())
    publisher.close()
    again = PolicyPublisher.start(url, "s", trainer.boot, tmp_path / "work")
    assert again.publish(trainer.learn()).result(60).number == 1
    again.close()
    assert not any(thread.name.startswith("stitch-publish") for thread in threading.enumerate())
