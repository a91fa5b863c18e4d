"""A trainer of several ranks: promise 2 (durable before visible), and one outcome on every rank."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stitch_core.chain import ChainReader
from stitch_core.delta import DeltaError
from stitch_core.delta.directory import DeltaDirectory, write_shards
from stitch_core.dialects import INDEX_NAME
from stitch_core.manifest import Manifest
from stitch_core.safetensors import Tensor
from stitch_core.trainers.group import RanksFailed, Solo, together
from stitch_core.trainers.own_delta import OwnDelta
from stitch_core.trainers.receipts import Listing, assign
from tests import rebuild
from tests.small_run import FILES, chain_of
from tests.trainers.ranks import Stock, ThreadGroup, World, on_ranks, own, same


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def versions(world: World) -> list[Manifest]:
    return asyncio.run(chain_of(world.store(), "r"))


def rebuilt(world: World, number: int) -> dict[str, bytes]:
    """A version's tensors, from the boot checkpoint and the store alone."""
    return rebuild.rebuilt(world.root, next(m for m in versions(world) if m.number == number))


def plain(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: bytes(tensor.data) for name, tensor in tensors.items()}


def publish_own(world: World, size: int, steps: int, **settings: Any) -> list[int]:
    todo = [world.learn() for _ in range(steps)]

    def train(group: ThreadGroup) -> list[int]:
        delta = own(world, group, **settings)
        return [delta.publish(world.share(t, group.rank, size), step=i) for i, t in enumerate(todo)]

    return same(on_ranks(size, train))


# ------------------------------------------------------------------------------------------ one outcome


def test_a_failure_on_one_rank_is_everybodys_with_every_message() -> None:
    def call(group: ThreadGroup) -> None:
        def work() -> None:
            if group.rank:
                raise OSError(f"disk {group.rank} is full")

        together(group, "publishing", work)

    for error in on_ranks(3, call):
        assert isinstance(error, RanksFailed)
        assert "rank 1: OSError: disk 1 is full; rank 2: OSError: disk 2 is full" in str(error)
        assert "2 of 3 ranks" in str(error)


def test_a_rank_that_dies_in_a_publish_stops_the_others(world: World) -> None:
    def train(group: ThreadGroup) -> None:
        delta = own(world, group)
        if group.rank == 1:
            group.die()
        delta.publish(world.share(world.history[0], group.rank, 2))

    results = on_ranks(2, train)
    assert isinstance(results[0], RanksFailed)
    assert "a process of this trainer is gone" in str(results[0])


# ------------------------------------------------------------------------------------------- own encoder


@pytest.mark.parametrize(("size", "encoding"), [(1, "xor"), (3, "xor"), (1, "sparse"), (3, "sparse")])
def test_own_encoder_publishes_the_whole_policy(world: World, size: int, encoding: str) -> None:
    assert publish_own(world, size, 2, encoding=encoding) == [1, 2]
    chain = versions(world)
    assert [m.representation.encoding for m in chain[1:]] == [encoding] * 2
    assert [(m.number, m.step) for m in chain] == [(0, None), (1, 0), (2, 1)]
    assert rebuilt(world, 2) == plain(world.history[2])
    assert not world.left()


def test_c06_a_resumed_trainers_weights_are_the_next_version(world: World) -> None:
    publish_own(world, 2, 3)
    # It goes on from what it saved two versions ago.
    saved = world.history[1]

    def resume(group: ThreadGroup) -> tuple[int, int, int]:
        publisher = world.publisher(group)
        start = publisher.claim()
        delta = OwnDelta(publisher, FILES)
        first = delta.publish(world.share(saved, group.rank, 2))
        return start.number, first, delta.publish(world.share(saved, group.rank, 2))

    assert same(on_ranks(2, resume)) == (3, 4, 5)
    chain = versions(world)
    assert [m.number for m in chain] == [0, 1, 2, 3, 4, 5]
    assert chain[4].state == chain[1].state == chain[5].state
    assert chain[4].representation.base == chain[0].state
    assert rebuilt(world, 4) == plain(saved)


def test_c06_a_trainer_that_resumes_at_the_head_gives_its_weights_a_number_of_its_own(world: World) -> None:
    publish_own(world, 2, 2)
    saved, after = world.history[2], world.learn()

    def resume(group: ThreadGroup) -> list[int]:
        delta = own(world, group)
        return [delta.publish(world.share(tensors, group.rank, 2)) for tensors in (saved, after)]

    assert same(on_ranks(2, resume)) == [3, 4]
    chain = versions(world)
    assert chain[3].state == chain[2].state
    assert chain[4].representation.base == chain[3].state
    assert rebuilt(world, 4) == plain(after)


def test_c79_a_new_run_begins_with_the_trainers_own_weights(world: World) -> None:
    """They are another checkpoint's than the boot one; equal ones have a number as well, and no payload."""
    other, after = world.learn(), world.learn()

    def train(group: ThreadGroup) -> list[int]:
        delta = own(world, group)
        return [delta.publish(world.share(tensors, group.rank, 2)) for tensors in (other, other, after)]

    assert same(on_ranks(2, train)) == [1, 2, 3]
    chain = versions(world)
    assert chain[1].representation.base == chain[0].state
    assert rebuilt(world, 1) == plain(other)
    assert chain[2].representation.changed == {}


def test_c07_the_trainer_before_is_fenced(world: World) -> None:
    old = own(world, Solo())
    new = own(world, Solo())
    assert new.publish(world.learn()) == 1
    with pytest.raises(RanksFailed, match="another writer has claimed run r"):
        old.publish(world.learn())
    assert [m.number for m in versions(world)] == [0, 1]


def test_c04_a_failed_publish_leaves_the_base_and_the_next_repairs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta = own(world, Solo())
    delta.publish(world.learn())
    lost = world.learn()
    monkeypatch.setattr(
        delta._publisher, "_upload", lambda *_: (_ for _ in ()).throw(OSError("no space left"))
    )
    with pytest.raises(RanksFailed, match="no space left"):
        delta.publish(lost)
    monkeypatch.undo()
    number = delta.publish(world.learn())
    assert number == 3
    assert rebuilt(world, 3) == plain(world.tensors)


def test_c14_what_was_gathered_must_be_the_boot_checkpoints_tensors(world: World) -> None:
    delta = own(world, Solo())
    tensors = dict(world.learn())
    tensors["model.extra"] = Tensor("F32", (1,), bytes(4))
    with pytest.raises(RanksFailed, match=r"tensor model.extra is extra in"):
        delta.publish(tensors)
    del tensors["model.extra"], tensors["model.norm.weight"]
    with pytest.raises(RanksFailed, match=r"tensor model.norm.weight is missing from"):
        delta.publish(tensors)
    wrong = dict(world.tensors) | {"scale": Tensor("F32", (1,), bytes(4))}
    with pytest.raises(RanksFailed, match=r"tensor scale has shape \[1\], expected \[\]"):
        delta.publish(wrong)


def test_another_boot_checkpoint_is_refused_before_anybody_is_fenced(world: World, tmp_path: Path) -> None:
    first = own(world, Solo())
    other = World(tmp_path / "other", seed=1)
    with pytest.raises(RanksFailed, match="is not version 0 of run r"):
        world.publisher(Solo(), boot=other.boot).claim()
    assert first.publish(world.learn()) == 1


def test_c18_a_store_that_is_away_is_waited_for_then_every_rank_stops(world: World) -> None:
    (world.root / "real-store").mkdir()
    store = world.root / "store"
    store.symlink_to("real-store")

    def away() -> None:
        store.unlink()
        store.symlink_to("store")  # a link to itself: nothing below it can be read

    def back() -> None:
        store.unlink()
        store.symlink_to("real-store")

    def train(group: ThreadGroup) -> list[str | int | None]:
        publisher = world.publisher(group, patience=1.0)
        publisher.claim()
        delta = OwnDelta(publisher, FILES)
        done: list[str | int | None] = []
        together(group, "test", lambda: (away(), threading.Timer(0.3, back).start()) if group.rank else None)
        done.append(delta.publish(world.share(todo[0], group.rank, 2)))
        together(group, "test", lambda: away() if group.rank else None)
        try:
            done.append(delta.publish(world.share(todo[1], group.rank, 2)))
        except RanksFailed as error:
            done.append(str(error).split(":")[0])
        return done

    todo = [world.learn(), world.learn()]
    done = same(on_ranks(2, train))
    assert done == [1, "publishing weight_v000002 of run r (uploading) failed on 2 of 2 ranks; rank 0"], done
    back()
    assert [m.number for m in versions(world)] == [0, 1]


# ------------------------------------------------------------------------------------ stock directories


def publish_stock(world: World, directory: Path, number: int, size: int = 2) -> list[Any]:
    def train(group: ThreadGroup) -> int:
        publisher = world.publisher(group)
        publisher.claim()
        return publisher.publish(directory, number)

    return on_ranks(size, train)


def test_c15_stock_deltas_become_versions_though_ranks_write_one_tensor_twice(
    world: World, tmp_path: Path
) -> None:
    stock = Stock(world, tmp_path / "updates")
    directories = [stock.write(world.learn()) for _ in range(3)]

    def train(group: ThreadGroup) -> list[int]:
        publisher = world.publisher(group, channel="latest")
        publisher.claim()
        return [publisher.publish(path, i + 1) for i, path in enumerate(directories)]

    assert same(on_ranks(2, train)) == [1, 2, 3]
    assert rebuilt(world, 3) == plain(world.tensors)
    assert not directories[0].exists()
    assert asyncio.run(ChainReader(world.store()).channel("latest")).run == "r"


def test_a_step_that_changed_nothing_is_a_version(world: World, tmp_path: Path) -> None:
    directory = Stock(world, tmp_path / "updates").write(world.tensors)
    assert same(publish_stock(world, directory, 1)) == 1
    chain = versions(world)
    assert chain[1].state == chain[0].state
    assert chain[1].representation.changed == {}


def test_c15_copies_that_differ_are_refused(world: World, tmp_path: Path) -> None:
    stock = Stock(world, tmp_path / "updates")
    directory = stock.write(world.learn(), size=1)
    delta = DeltaDirectory.open(directory, FILES)
    name = next(iter(delta.payloads))
    write_shards(directory, FILES, {name: (delta.read(name), "0" * 32)}, stem="model-copy")
    for error in publish_stock(world, directory, 1):
        assert "is also in" in str(error)
        assert "with another payload" in str(error)
    assert len(versions(world)) == 1


def test_a_number_that_is_not_the_runs_is_refused(world: World, tmp_path: Path) -> None:
    directory = Stock(world, tmp_path / "updates").write(world.learn())
    for error in publish_stock(world, directory, 4):
        assert "the run goes on at 1, and the framework's own counter says 4" in str(error)
    assert len(versions(world)) == 1


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("checksum_format", "adler32", "--update-weight-delta-checksum xxh3-128"),
        ("delta_encoding", "xor_sparse", "--update-weight-delta-encoding xor"),
        (None, None, "rank 0 has no model.safetensors.index.json"),
    ],
)
def test_c26_a_dialect_that_does_not_name_weights_is_refused_with_the_flag(
    world: World, tmp_path: Path, field: str | None, value: str | None, message: str
) -> None:
    directory = Stock(world, tmp_path / "updates").write(world.learn())
    index = directory / INDEX_NAME
    if field is None:
        index.unlink()
    else:
        document = json.loads(index.read_text())
        document["metadata"][field] = value
        index.write_text(json.dumps(document))
    for error in publish_stock(world, directory, 1):
        assert message in str(error)


def test_a_shard_that_no_rank_has_is_named(world: World, tmp_path: Path) -> None:
    directory = Stock(world, tmp_path / "updates").write(world.learn())
    for path in directory.iterdir():
        if path.name.startswith("model-1"):
            path.unlink()
    for error in publish_stock(world, directory, 1):
        assert "model-1-00000-of-00001.safetensors" in str(error)


def test_one_uploader_per_host() -> None:
    shared = {"a": 1, "b": 2, "c": 3, INDEX_NAME: 4}
    named = frozenset({"a", "b", "c", "d", INDEX_NAME})
    # Ranks 0 and 1 share a disk, rank 2 sees the same files from another host, rank 3 has one of its own.
    listings = [Listing("x", shared, named=named), Listing("x", shared), Listing("y", shared)]
    duties = assign([*listings, Listing("z", {"d": 4})], "v")
    assert [duty.uploads for duty in duties] == [("a", "c", INDEX_NAME), (), ("b",), ("d",)]
    assert not any(duty.copies or duty.strays for duty in duties)


def test_c74_copies_that_may_differ_are_compared_and_what_no_index_names_is_looked_into() -> None:
    files, named = {"a.safetensors": 1, "b.safetensors": 2}, frozenset({"a.safetensors", INDEX_NAME})
    marks = {name: (i,) for i, name in enumerate(files)}
    mine = Listing("x", {**files, INDEX_NAME: 3}, marks, named)
    duties = assign([mine, Listing("y", files, marks), Listing("z", files, {"a.safetensors": (7,)})], "v")
    assert [duty.uploads for duty in duties] == [("a.safetensors", INDEX_NAME), (), ()]
    assert [duty.copies for duty in duties] == [(), ("a.safetensors",), ("a.safetensors",)]
    # Hosts x and y share the file, which one look settles.
    assert [duty.strays for duty in duties] == [("b.safetensors",), (), ("b.safetensors",)]


@pytest.mark.parametrize(
    ("listings", "names"),
    [
        ([Listing("x", {"a": 1, INDEX_NAME: 1}), Listing("y", {"a": 9})], ("a", "rank 0", "rank 1")),
        ([Listing("x", {INDEX_NAME: 1}), Listing("y", {})], ("v/a",)),
        ([Listing("x", {"a": 1})], ("rank 0", INDEX_NAME)),
    ],
)
def test_what_is_not_there_or_of_two_sizes_is_named(listings: list[Listing], names: tuple[str, ...]) -> None:
    named = frozenset({"a", INDEX_NAME}) if INDEX_NAME in listings[0].sizes else None
    with pytest.raises(DeltaError) as caught:
        assign([replace(listings[0], named=named), *listings[1:]], "v")
    assert all(name in str(caught.value) for name in names)
