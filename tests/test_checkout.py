"""A version as a directory: promise 1 (truth) for whoever reads a checkpoint instead of asking a replica."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stitch_core.checkout import CheckoutRefused, checkout
from stitch_core.checkpoint import Checkpoint
from stitch_core.files import PosixFiles
from stitch_core.fulls import upload_full
from stitch_core.host_checkpoint import HostCheckpointError
from stitch_core.manifest import Manifest
from stitch_core.stores.memory import MemoryStore
from stitch_core.stores.transfer import DigestMismatch
from tests.small_run import FILES, Trainer, inline


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


async def published(trainer: Trainer, store: MemoryStore, full_at: int = 0) -> list[Manifest]:
    publisher = trainer.publisher(store)
    chain = [await publisher.claim(trainer.version0)]
    for number in range(1, 5):
        if number == full_at:
            chain.append(await publisher.publish(trainer.full()))
        else:
            chain.append(await trainer.publish(publisher))
    return chain


def out(store: MemoryStore, version: int | None, where: Path, base: Path | None) -> Manifest:
    return asyncio.run(checkout(store, "r", version, where, files=FILES, base=base, run_blocking=inline))


def in_another(function: Callable[..., Any], *args: Any) -> Any:
    """``function`` in a thread, which may have an event loop of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def test_any_version_becomes_a_plain_directory(trainer: Trainer, tmp_path: Path) -> None:
    store = MemoryStore()
    chain = asyncio.run(published(trainer, store))
    (trainer.boot / "config.json").write_text("{}")
    for version in (0, 2, 4, None):
        where = tmp_path / "out" / str(version)
        assert out(store, version, where, trainer.boot) == chain[4 if version is None else version]
        tensors = Checkpoint.open(where, FILES)
        wanted = trainer.weights[chain[4 if version is None else version].state]
        assert {n: tensors.read(n) for n in wanted} == {n: bytes(t.data) for n, t in wanted.items()}
        assert (where / "config.json").read_text() == "{}"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["0", "2", "4", "None"]


def test_a_full_needs_no_base_and_what_is_below_it_does(trainer: Trainer, tmp_path: Path) -> None:
    store = MemoryStore()
    chain = asyncio.run(published(trainer, store, full_at=3))
    out(store, 4, tmp_path / "four", None)
    assert Checkpoint.open(tmp_path / "four", FILES).state() == chain[4].state
    with pytest.raises(CheckoutRefused, match="give the run's base checkpoint"):
        out(store, 2, tmp_path / "two", None)
    assert not (tmp_path / "two").exists()


def test_a_directory_that_is_there_is_proven_or_refused(trainer: Trainer, tmp_path: Path) -> None:
    store = MemoryStore()
    chain = asyncio.run(published(trainer, store))
    where = tmp_path / "out"
    out(store, 2, where, trainer.boot)
    assert out(store, 2, where, None) == chain[2]
    with pytest.raises(CheckoutRefused, match=r"is not r/weight_v000003: its state is"):
        out(store, 3, where, trainer.boot)
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckoutRefused, match="is no checkpoint"):
        out(store, 3, tmp_path / "other", trainer.boot)
    with pytest.raises(CheckoutRefused, match="run r has no version 9: its head is 4"):
        out(store, 9, tmp_path / "nine", trainer.boot)


def test_bytes_that_were_collected_are_said(trainer: Trainer, tmp_path: Path) -> None:
    store = MemoryStore()
    chain = asyncio.run(published(trainer, store))
    file = chain[1].representation.files[0]
    asyncio.run(store.delete(chain[1].file_key(file.name)))
    with pytest.raises(CheckoutRefused, match="needs bytes that were collected"):
        out(store, 3, tmp_path / "three", trainer.boot)


def test_damaged_bytes_are_gone_around_where_there_is_another_way(trainer: Trainer, tmp_path: Path) -> None:
    """A delta with a flipped byte stopped a checkout that a full beside the chain could have served."""
    store = MemoryStore()
    chain = asyncio.run(published(trainer, store))
    key = chain[4].file_key(chain[4].representation.files[0].name)
    sound = store.state.objects[key]
    out(store, 4, tmp_path / "sound", trainer.boot)
    store.state.objects[key] = bytes([sound[0] ^ 1]) + sound[1:]
    with pytest.raises(DigestMismatch, match="is not what was announced"):
        out(store, 4, tmp_path / "four", trainer.boot)
    assert not (tmp_path / "four").exists()
    how = {"rng": random.Random(0), "run_blocking": inline}
    asyncio.run(upload_full(store, chain[4], tmp_path / "sound", FILES, **how))
    out(store, 4, tmp_path / "four", trainer.boot)
    assert Checkpoint.open(tmp_path / "four", FILES).state() == chain[4].state


def test_a_checkout_that_was_cut_off_is_taken_up_again(trainer: Trainer, tmp_path: Path) -> None:
    store = MemoryStore()
    chain = asyncio.run(published(trainer, store))
    file = chain[3].representation.files[0]
    kept = store.state.objects.pop(chain[3].file_key(file.name))
    where = tmp_path / "out"
    with pytest.raises(CheckoutRefused):
        out(store, 4, where, trainer.boot)
    assert not where.exists()
    store.state.objects[chain[3].file_key(file.name)] = kept
    out(store, 4, where, trainer.boot)
    assert Checkpoint.open(where, FILES).state() == chain[4].state
    assert [p.name for p in tmp_path.iterdir() if "checkout" in p.name] == []


def test_two_at_once_are_told_and_the_directory_is_whole(trainer: Trainer, tmp_path: Path) -> None:
    """The slower one ended with a bare [Errno 2] of a directory that nobody had named."""
    store = MemoryStore()
    chain = asyncio.run(published(trainer, store))
    where = tmp_path / "out"

    class Overtaken(PosixFiles):
        def lock(self, path: Path, timeout: float) -> Any:
            self.remove_tree(path.parent)
            in_another(out, store, 4, where, trainer.boot)
            return super().lock(path, timeout)

    slow = checkout(store, "r", 4, where, files=Overtaken(), base=trainer.boot, run_blocking=inline)
    with pytest.raises(CheckoutRefused, match=r"another process made .*out meanwhile: run it again"):
        asyncio.run(slow)
    assert out(store, 4, where, trainer.boot) == chain[4]


def test_nobody_works_in_the_directory_that_is_being_put_in_its_place(
    trainer: Trainer, tmp_path: Path
) -> None:
    """The lock was given back first: a checkout of another version could change what was just verified."""
    store = MemoryStore()
    asyncio.run(published(trainer, store))
    where = tmp_path / "out"

    class Late(PosixFiles):
        def rename(self, source: Path, target: Path) -> None:
            if target == where:
                with pytest.raises(HostCheckpointError, match="is in use by another process"):
                    in_another(out, store, 2, where, trainer.boot)
            super().rename(source, target)

    made = asyncio.run(checkout(store, "r", 4, where, files=Late(), base=trainer.boot, run_blocking=inline))
    assert Checkpoint.open(where, FILES).state() == made.state
