"""C74: ranks die while they write a version, and what they left beside the retry's files is no part of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stitch_core.delta.directory import DeltaDirectory, write_shards
from stitch_core.dialects import INDEX_NAME
from stitch_core.safetensors import Tensor
from stitch_core.state import state_digest
from stitch_core.testing.checkpoints import step, table_of
from stitch_core.trainers import hooks
from stitch_core.trainers.group import RanksFailed, Solo
from stitch_core.trainers.own_delta import OwnDelta
from stitch_core.versions import directory_name
from tests.small_run import FILES
from tests.trainers.ranks import Stock, ThreadGroup, World, on_ranks, own, same
from tests.trainers.test_hooks import StockUpdater
from tests.trainers.test_publication import plain, rebuilt, versions


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def changed(world: World, *indices: int) -> dict[str, Tensor]:
    """The next step's policy, in which only these tensors, by their place among the sorted names, change."""
    names = [sorted(world.tensors)[i] for i in indices]
    some = step(world.rng, {name: world.tensors[name] for name in names}, 1.0)
    world.tensors = {**world.tensors, **some}
    world.history.append(world.tensors)
    return world.tensors


def everything(world: World) -> dict[str, Tensor]:
    """Every tensor that is not empty changes."""
    return changed(world, *range(len(world.tensors)))


def check(world: World, number: int, tensors: dict[str, Tensor]) -> None:
    """The version is exactly these weights, to a replica that has nothing but the store."""
    manifest = next(m for m in versions(world) if m.number == number)
    assert manifest.state == state_digest(table_of(tensors))
    assert rebuilt(world, number) == plain(tensors)


# ------------------------------------------------------------------------------------------ own encoder


def die_after_writing(world: World, size: int, tensors: dict[str, Tensor], encoding: str) -> None:
    """Every rank writes its part of the next version, and dies before there is an index."""

    def train(group: ThreadGroup) -> None:
        delta = own(world, group, encoding=encoding)
        delta._index = lambda *_: group.die()  # type: ignore[method-assign]
        delta.publish(world.share(tensors, group.rank, size))

    assert all(isinstance(result, Exception) for result in on_ranks(size, train))


@pytest.mark.parametrize("encoding", ["xor", "sparse"])
def test_c74_a_retry_with_fewer_ranks_takes_no_file_of_the_dead_ones(world: World, encoding: str) -> None:
    before = world.tensors
    die_after_writing(world, 3, everything(world), encoding)
    world.tensors = before
    retried = changed(world, 0, 1)

    def train(group: ThreadGroup) -> int | None:
        return own(world, group, encoding=encoding).publish(world.share(retried, group.rank, 2))

    assert same(on_ranks(2, train)) == 1
    check(world, 1, retried)


def test_c74_what_a_fenced_trainer_still_writes_is_in_no_version(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stalled; its successor on the same host writes the same number at this moment."""
    lost, mine = everything(world), everything(world)
    old = own(world, Solo())
    new = own(world, Solo())
    deliver = new._publisher.deliver

    def late(*args: Any, **more: Any) -> None:
        with pytest.raises(RanksFailed):
            old.publish(lost)
        deliver(*args, **more)

    monkeypatch.setattr(new._publisher, "deliver", late)
    assert new.publish(mine) == 1
    check(world, 1, mine)


def test_c74_two_runs_may_share_the_directory_that_they_work_in(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that starts empties its own part of it, not what the other is about to upload."""
    todo = [everything(world), everything(world)]
    first = own(world, Solo())
    deliver = first._publisher.deliver

    def meanwhile(*args: Any, **more: Any) -> None:
        second = own(world, Solo(), run="s")
        second.publish(todo[1])
        second.close()
        deliver(*args, **more)

    monkeypatch.setattr(first._publisher, "deliver", meanwhile)
    assert first.publish(todo[0]) == 1
    check(world, 1, todo[0])


def test_c74_what_the_files_hold_must_be_what_the_encoders_hold(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever else writes into the directory, under whatever name: the version is refused, not mixed."""
    other = Stock(world, world.root / "other").write(everything(world), size=1)
    delta = own(world, Solo())
    deliver = delta._publisher.deliver

    def replaced(directory: Path, *args: Any, **more: Any) -> None:
        (theirs,) = other.glob("*.safetensors")
        (ours,) = directory.glob("*.safetensors")
        shutil.copy(theirs, ours)
        deliver(directory, *args, **more)

    monkeypatch.setattr(delta._publisher, "deliver", replaced)
    with pytest.raises(RanksFailed):
        delta.publish(everything(world))
    assert [m.number for m in versions(world)] == [0]


# ------------------------------------------------------------------------------------ stock directories


class Hosts:
    """What a stock trainer of two ranks on two hosts has written: a directory on each."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.roots = [world.root / "host0", world.root / "host1"]
        self.directories = [root / directory_name(1) for root in self.roots]

    def write(self, tensors: dict[str, Tensor], **index: Any) -> None:
        """Rank 0 writes ``model-0...`` and the index on its host, rank 1 ``model-1...`` on the other."""
        Stock(self.world, self.roots[0]).write(tensors, **index)
        self.directories[1].mkdir(parents=True, exist_ok=True)
        for path in self.directories[0].glob("model-1*"):
            path.rename(self.directories[1] / path.name)

    def publish(self) -> list[Any]:
        def train(group: ThreadGroup) -> int:
            publisher = self.world.publisher(group)
            publisher.claim()
            return publisher.publish(self.directories[group.rank], 1)

        return on_ranks(2, train)

    def refused(self) -> str:
        """What all ranks say; no version is there."""
        texts = {str(error) for error in self.publish() if isinstance(error, RanksFailed)}
        assert len(texts) == 1
        assert [m.number for m in versions(self.world)] == [0]
        return texts.pop()


def leftover(world: World, directory: Path, name: str, *indices: int) -> Path:
    """A shard that an earlier attempt left in ``directory``, of tensors that this one does not change."""
    before = world.tensors
    other = Stock(world, world.root / f"earlier-{name}").write(changed(world, *indices), size=1)
    world.tensors = before
    directory.mkdir(parents=True, exist_ok=True)
    (shard,) = other.glob("*.safetensors")
    return Path(shutil.copy(shard, directory / name))


def test_stock_directories_of_two_hosts_become_a_version(world: World) -> None:
    hosts, tensors = Hosts(world), everything(world)
    hosts.write(tensors)
    assert all(path.glob("*.safetensors") for path in hosts.directories)
    assert same(hosts.publish()) == 1
    check(world, 1, tensors)


@pytest.mark.parametrize("host", [0, 1])
def test_c74_a_shard_that_no_index_names_is_refused_by_its_name(world: World, host: int) -> None:
    """An earlier attempt had more ranks, and its files lie beside those of this one."""
    hosts = Hosts(world)
    leftover(world, hosts.directories[host], "model-00002-of-00003.safetensors", 5)
    leftover(world, hosts.directories[host], "model-00001-of-00003.safetensors", 6)
    hosts.write(changed(world, 0, 1))
    text = hosts.refused()
    assert "model-00001-of-00003.safetensors" in text
    assert "model-00002-of-00003.safetensors" in text


def test_c74_an_index_that_another_host_has_left_names_nothing(world: World) -> None:
    """Rank 0 wrote on that host in the earlier attempt: two indexes, of equal size even."""
    hosts, tensors = Hosts(world), changed(world, 0, 1)
    hosts.write(tensors)
    index = json.loads((hosts.directories[0] / INDEX_NAME).read_text())
    index["weight_map"] = {}
    (hosts.directories[1] / INDEX_NAME).write_text(json.dumps(index))
    assert same(hosts.publish()) == 1
    check(world, 1, tensors)


def test_c74_a_file_of_the_same_name_and_size_on_another_host_is_compared(world: World) -> None:
    """Nothing but its bytes tells the copy that this attempt wrote from the one that was left."""
    hosts = Hosts(world)
    hosts.write(everything(world))
    (mine,) = hosts.directories[0].glob("model-0*")
    data = bytearray(mine.read_bytes())
    data[-1] ^= 1
    (hosts.directories[1] / mine.name).write_bytes(data)
    text = hosts.refused()
    assert mine.name in text
    assert "rank 0" in text
    assert "rank 1" in text


def test_equal_files_of_two_hosts_are_one(world: World) -> None:
    """As where hosts share a file system that shows each of them other inodes."""
    hosts, tensors = Hosts(world), everything(world)
    hosts.write(tensors)
    for name in FILES.list(hosts.directories[0]):
        shutil.copy(hosts.directories[0] / name, hosts.directories[1] / name)
    assert same(hosts.publish()) == 1
    check(world, 1, tensors)


def test_c15_a_shard_of_nothing_but_equal_copies_is_no_leftover(world: World) -> None:
    """A pipeline stage changed nothing else than a tensor which it shares: the index names one of two."""
    tensors = everything(world)
    directory = Stock(world, world.root / "updates").write(tensors, size=1)
    delta = DeltaDirectory.open(directory, FILES)
    name, payload = next(iter(delta.payloads.items()))
    assert payload.checksum is not None
    write_shards(directory, FILES, {name: (delta.read(name), payload.checksum)}, stem="model-copy")

    def train(group: ThreadGroup) -> int:
        publisher = world.publisher(group)
        publisher.claim()
        return publisher.publish(directory, 1)

    assert same(on_ranks(2, train)) == 1
    check(world, 1, tensors)
    names = {file.name for file in versions(world)[1].representation.files}
    assert not any("copy" in name for name in names)


def test_c74_files_that_are_no_weights_are_not_taken(world: World) -> None:
    directory = Stock(world, world.root / "updates").write(everything(world), size=1)
    (directory / "notes.txt").write_text("of another attempt")
    publisher = world.publisher(Solo())
    publisher.claim()
    assert publisher.publish(directory, 1) == 1
    assert "notes.txt" not in {file.name for file in versions(world)[1].representation.files}


def test_c74_a_stock_trainer_starts_with_an_empty_directory_on_every_host(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The framework itself empties it on rank 0's host alone."""
    hosts, tensors = Hosts(world), everything(world)
    for root in hosts.roots:
        leftover(world, root / directory_name(1), "model-00002-of-00003.safetensors", 5)
        (root / "notes").mkdir()
    claimed: list[Any] = []

    def train(group: ThreadGroup) -> list[str]:
        publisher = world.publisher(group)
        args = SimpleNamespace(
            update_weight_disk_dir=str(hosts.roots[group.rank]), hf_checkpoint=str(world.boot)
        )
        trainer = hooks.Trainer(world.settings(), group, "test", args)
        trainer._publisher = publisher
        claimed.append(trainer)
        hooks.empty_versions(trainer, args)
        return FILES.list(hosts.roots[group.rank])

    assert same(on_ranks(2, train)) == ["notes"]
    hosts.write(tensors)
    assert same(hosts.publish()) == 1
    check(world, 1, tensors)


def test_c74_the_hook_empties_the_directory_before_the_framework_takes_its_snapshot(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_TRAINER", None)
    updates = world.root / "updates"
    left = leftover(world, updates / directory_name(1), "model-00002-of-00003.safetensors", 5)
    args = SimpleNamespace(
        stitch_run="r", stitch_store=f"file:{world.root}/store", hf_checkpoint=str(world.boot),
        stitch_work=str(world.root / "work"), update_weight_disk_dir=str(updates),
    )  # fmt: skip
    hooks.set_up(args, Solo(), "test", lambda: None)
    stock = type("Updater", (StockUpdater,), {})
    hooks.start_through_stitch(stock, lambda _: None)
    made = stock(Stock(world, updates), args)
    made.update_weights()
    assert not left.exists()
    made.tensors = everything(world)
    made.update_weights()
    check(world, 2, world.tensors)


def test_own_work_is_gone_once_it_is_published(world: World) -> None:
    delta: OwnDelta = own(world, Solo())
    delta.publish(everything(world))
    assert not world.left()
