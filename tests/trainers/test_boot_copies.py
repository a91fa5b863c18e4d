"""C75: what deltas are made from is the version that they say, on every host, to the last byte read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stitch_core.checkpoint import Checkpoint
from stitch_core.files import PosixFiles
from stitch_core.safetensors import Tensor
from stitch_core.testing.checkpoints import ODD, write_checkpoint
from stitch_core.trainers import hooks
from stitch_core.trainers.boot import prove_copies
from stitch_core.trainers.group import RanksFailed, Solo
from stitch_core.trainers.own_delta import OwnDelta
from stitch_core.trainers.publication import GroupPublisher
from tests.small_run import FILES
from tests.trainers.ranks import Stock, ThreadGroup, World, on_ranks, same
from tests.trainers.test_hooks import StockUpdater
from tests.trainers.test_publication import plain, rebuilt, versions

NAMES = [name for name in sorted(ODD) if name != "empty"]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def flip(directory: Path, name: str) -> Path:
    """One bit of a tensor changes in place, as a disk does it; its file."""
    ref = Checkpoint.open(directory, FILES).tensors[name]
    with open(ref.file, "r+b") as file:
        file.seek(ref.offset + ref.nbytes - 1)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    return ref.file


def copies(world: World, size: int) -> list[Path]:
    """A copy of the boot checkpoint for each host."""
    made = [world.root / f"host{i}" / "boot" for i in range(size)]
    for directory in made:
        shutil.copytree(world.boot, directory)
    return made


def refused(results: list[Any]) -> str:
    """What the ranks say, all of which have failed."""
    assert all(isinstance(result, RanksFailed) for result in results), results
    return str(results[0])


def everything(world: World) -> dict[str, Tensor]:
    """Every tensor changes in every element, so that each is encoded."""
    return world.learn(1.0)


# ------------------------------------------------------------------------------------------ own encoder


def publish(world: World, boots: list[Path], after_claim: Callable[[], None] = lambda: None) -> list[Any]:
    """Two steps of a trainer whose rank i is on a host with ``boots[i]``."""
    todo = [everything(world), everything(world)]

    def train(group: ThreadGroup) -> list[int | None]:
        publisher = world.publisher(group, boot=boots[group.rank])
        publisher.claim()
        delta = OwnDelta(publisher, FILES)
        if group.rank == 0:
            after_claim()
        group.gather(None)
        return [delta.publish(world.share(tensors, group.rank, len(boots))) for tensors in todo]

    return on_ranks(len(boots), train)


@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_c75_a_boot_copy_of_one_host_that_differs_makes_no_version_that_nobody_can_apply(
    world: World, name: str, host: int
) -> None:
    boots = copies(world, 2)
    file = flip(boots[host], name)
    text = refused(publish(world, boots))
    assert name in text
    # Rank 0's is what the others are compared with.
    assert str(boots[1] / file.name) in text
    assert not (world.root / "store/runs").exists(), "nobody was fenced"


@pytest.mark.parametrize("name", NAMES)
def test_c75_a_boot_copy_that_changes_between_claim_and_encode_is_named(world: World, name: str) -> None:
    boots = copies(world, 1)
    changed: list[Path] = []
    results = publish(world, boots, lambda: changed.append(flip(boots[0], name)))
    text = refused(results)
    assert name in text
    assert str(changed[0]) in text
    assert [m.number for m in versions(world)] == [0]


class OneBadRead(PosixFiles):
    """The first read of these many bytes of a tensor gives another one; the file is sound."""

    def __init__(self, size: int) -> None:
        self.left, self._count = 1, size

    def read(self, path: Path, offset: int = 0, length: int | None = None) -> bytes:
        data = super().read(path, offset, length)
        if offset > 8 and length == self._count and self.left:
            self.left -= 1
            return data[:-1] + bytes([data[-1] ^ 1])
        return data


def test_one_bad_read_of_the_base_is_read_again(world: World) -> None:
    size = Checkpoint.open(world.boot, FILES).tensors[NAMES[0]].nbytes
    publisher = world.publisher(Solo())
    publisher.claim()
    files = OneBadRead(size)
    assert OwnDelta(publisher, files).publish(everything(world)) == 1
    assert files.left == 0
    assert rebuilt(world, 1) == plain(world.tensors)


def test_c75_a_boot_copy_that_is_put_right_again_is_used_by_the_next_try(world: World) -> None:
    boots = copies(world, 1)
    publisher = world.publisher(Solo(), boot=boots[0])
    publisher.claim()
    delta = OwnDelta(publisher, FILES)
    flip(boots[0], NAMES[0])
    with pytest.raises(RanksFailed):
        delta.publish(everything(world))
    flip(boots[0], NAMES[0])
    assert delta.publish(world.tensors) == 1
    assert rebuilt(world, 1) == plain(world.tensors)


# ---------------------------------------------------------------------------------------- stock encoders


def claimed(world: World, boots: list[Path]) -> list[Any]:
    def train(group: ThreadGroup) -> int:
        publisher = world.publisher(group, boot=boots[group.rank])
        return publisher.claim().number

    return on_ranks(len(boots), train)


@pytest.mark.parametrize("host", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_c75_every_hosts_copy_is_proven_where_another_encoder_reads_it(
    world: World, name: str, host: int
) -> None:
    """Which of its tensors a framework reads where, nobody tells: all of each copy are hashed."""
    boots = copies(world, 3)
    file = flip(boots[host], name)
    text = refused(claimed(world, boots))
    assert name in text
    assert str(file) in text or host == 0
    assert not (world.root / "store/runs").exists(), "nobody was fenced"


def test_a_host_with_another_checkpoint_is_told_by_its_first_tensor(world: World) -> None:
    boots = copies(world, 2)
    other = {**world.tensors, NAMES[0]: Tensor("F32", (1,), bytes(4))}
    shutil.rmtree(boots[1])
    write_checkpoint(boots[1], FILES, other)
    text = refused(claimed(world, boots))
    assert NAMES[0] in text
    assert str(boots[1]) in text


def test_copies_that_are_equal_are_claimed(world: World) -> None:
    assert same(claimed(world, copies(world, 3))) == 0


class Counting(PosixFiles):
    """Counts what is read of tensors, by the file's path."""

    def __init__(self) -> None:
        self.bytes: dict[Path, int] = {}

    def read_into(self, path: Path, offset: int, out: memoryview) -> int:
        count = super().read_into(path, offset, out)
        self.bytes[path.parent] = self.bytes.get(path.parent, 0) + count
        return count


def test_a_copy_that_hosts_share_is_read_once_whatever_its_path(world: World) -> None:
    """A file system of the network, mounted here and there: reading it for each host takes as long each."""
    total = sum(ref.nbytes for ref in Checkpoint.open(world.boot, FILES).tensors.values())
    mounts = [world.root / "mount0", world.root / "mount1"]
    for mount in mounts:
        mount.symlink_to(world.boot)
    counting = [Counting(), Counting()]

    def train(group: ThreadGroup) -> int:
        return len(prove_copies(mounts[group.rank], counting[group.rank], group).table)

    same(on_ranks(2, train))
    assert sum(sum(files.bytes.values()) for files in counting) == total
    counting = [Counting(), Counting()]
    mounts = copies(world, 2)
    same(on_ranks(2, train))
    assert [files.bytes[mount] for files, mount in zip(counting, mounts, strict=True)] == [total, total]


def stock(world: World, monkeypatch: pytest.MonkeyPatch, boot: Path) -> StockUpdater:
    monkeypatch.setattr(hooks, "_TRAINER", None)
    args = SimpleNamespace(
        stitch_run="r", stitch_store=f"file:{world.root}/store", hf_checkpoint=str(boot),
        stitch_work=str(world.root / "work"),
    )  # fmt: skip
    hooks.set_up(args, Solo(), "test", lambda: None)
    kind = type("Updater", (StockUpdater,), {})
    hooks.start_through_stitch(kind, lambda _: None)
    made: StockUpdater = kind(Stock(world, world.root / "updates"), args)
    return made


@pytest.mark.parametrize("restored", [False, True])
def test_c75_a_boot_copy_that_changes_while_a_framework_takes_its_snapshot(
    world: World, monkeypatch: pytest.MonkeyPatch, restored: bool
) -> None:
    """Also where it is as before in the end: what was read meanwhile is not known."""
    (boot,) = copies(world, 1)
    made = stock(world, monkeypatch, boot)
    snapshot = made._stock.snapshot
    changed: list[Path] = []

    def meanwhile(directory: Path) -> None:
        changed.append(flip(directory, NAMES[0]))
        snapshot(directory)
        if restored:
            flip(directory, NAMES[0])

    monkeypatch.setattr(made._stock, "snapshot", meanwhile)
    with pytest.raises(RanksFailed) as caught:
        made.update_weights()
    assert str(changed[0]) in str(caught.value)
    made.tensors = everything(world)
    with pytest.raises(RanksFailed):
        made.update_weights()  # the snapshot is what it is: only a restart takes another
    assert [m.number for m in versions(world)] == [0]


def test_a_framework_that_reads_an_unchanged_copy_publishes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (boot,) = copies(world, 1)
    made = stock(world, monkeypatch, boot)
    made.update_weights()
    made.tensors = everything(world)
    made.update_weights()
    assert rebuilt(world, 2) == plain(world.tensors)


def test_c75_a_checked_out_base_that_changes_before_the_encoder_reads_it(world: World) -> None:
    """After the floor has risen the base is no boot checkpoint, and the same holds for it."""
    from tests.trainers.test_resume import publish_full

    first = OwnDelta(_claimed(world), FILES)
    first.publish(everything(world))
    publish_full(world, everything(world))
    publisher = _claimed(world)
    assert publisher.base != world.boot
    file = flip(publisher.base, NAMES[0])
    with pytest.raises(RanksFailed) as caught:
        OwnDelta(publisher, FILES).publish(everything(world))
    assert NAMES[0] in str(caught.value)
    assert str(file) in str(caught.value)
    assert [m.number for m in versions(world)] == [0, 1, 2]


def _claimed(world: World) -> GroupPublisher:
    publisher = world.publisher(Solo())
    publisher.claim()
    return publisher
