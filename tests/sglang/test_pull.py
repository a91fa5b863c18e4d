"""Receiving a stock trainer's directories, without SGLang: chains, other bytes, damage, paths."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from pathlib import Path

import pytest

from stitch_core.checkpoint import Checkpoint
from stitch_core.delta import DeltaError
from stitch_core.dialects import INDEX_NAME
from stitch_core.files import PosixFiles
from stitch_core.host_checkpoint import HostCheckpoint
from stitch_core.safetensors import CheckpointError, Tensor, write_file
from stitch_core.testing.checkpoints import table_of, write_checkpoint
from stitch_core.testing.runs import RunBuilder
from stitch_core.versions import directory_name
from stitch_sglang.pull import Puller, PullRefused

FILES = PosixFiles()


class World:
    """A trainer's published directories ``source/weight_vNNNNNN``, and a receiver."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.trainer = RunBuilder(tmp_path / "trainer", FILES)
        self.source = tmp_path / "source"
        self.source.mkdir()
        self._names = (f"n{i}" for i in itertools.count())
        self.restart()

    def restart(self) -> None:
        """Another process of the receiver."""
        host, roots = HostCheckpoint(self.tmp_path / "host", FILES), [self.tmp_path.resolve()]
        self.puller = Puller("job", host, self.trainer.boot, roots, lambda: next(self._names))

    def delta(self, encoding: str = "xor") -> int:
        return self.publish(self.trainer.delta(encoding=encoding).number)

    def full(self) -> int:
        return self.publish(self.trainer.full().number)

    def publish(self, number: int) -> int:
        target = self.trainer.directory_of(self.trainer.versions[number])
        (self.source / directory_name(number)).symlink_to(target)
        return number

    def pull(self, number: int) -> str:
        """The version that is held afterwards; its bytes are the trainer's."""
        manifest = self.puller.pull(self.source, number)
        held = Checkpoint.open(self.puller.host.directory, FILES).table()
        assert held == table_of(self.trainer.tensors[number])
        assert manifest.state == self.trainer.versions[number].state
        return str(manifest.version)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_deltas_and_fulls_one_by_one_and_at_once(world: World) -> None:
    world.puller.boot()
    assert world.pull(world.delta()) == "job.n0/weight_v000001"
    world.delta("overwrite")
    assert world.pull(world.delta()) == "job.n0/weight_v000003"
    world.full()
    assert world.pull(world.delta()) == "job.n0/weight_v000005"


def test_target_0_is_the_boot_checkpoint_under_a_new_run(world: World) -> None:
    assert world.pull(0) == "job.n0/weight_v000000"
    world.pull(world.delta())
    assert world.pull(0) == "job.n1/weight_v000000"
    assert world.pull(0) == "job.n1/weight_v000000"


@pytest.mark.parametrize("after", ["the same child", "another child"])
def test_c76_target_0_of_another_boot_checkpoint_is_refused(world: World, after: str) -> None:
    """Version 0 is what was served first; who wants other weights starts the replica anew."""
    world.pull(0)
    world.pull(world.delta())
    started_with = world.puller.boot_state
    right, held = world.trainer.boot.with_name("right"), world.puller.host.holding
    world.trainer.boot.rename(right)
    write_checkpoint(world.trainer.boot, FILES, world.trainer.tensors[1])
    if after == "another child":
        world.puller.host.close()
        world.restart()
        world.puller.boot_state = started_with
    for _ in range(2):
        with pytest.raises(PullRefused, match="boot"):
            world.puller.pull(world.source, 0)
    assert world.puller.host.holding == held
    FILES.remove_tree(world.trainer.boot)
    right.rename(world.trainer.boot)
    assert world.pull(0).endswith("weight_v000000")


def test_a_repeated_pull_does_nothing_and_other_bytes_are_another_run(world: World) -> None:
    """C08: one name never means two sets of weights."""
    first = world.delta()
    assert world.pull(first) == "job.n0/weight_v000001"
    assert world.pull(first) == "job.n0/weight_v000001"
    again = World(world.tmp_path / "again")
    again.trainer.boot.rename(world.tmp_path / "unused")
    again.trainer = RunBuilder(world.tmp_path / "restarted", FILES)
    again.trainer.delta(density=0.9)
    directory = again.trainer.directory_of(again.trainer.versions[1])
    link = world.source / directory_name(1)
    link.unlink()
    link.symlink_to(directory)
    world.trainer.tensors[1], world.trainer.versions[1] = again.trainer.tensors[1], again.trainer.versions[1]
    assert world.pull(1) == "job.n1/weight_v000001"


def test_numbers_that_fall_are_a_restarted_trainer(world: World) -> None:
    world.delta()
    world.pull(world.delta())
    assert world.pull(1) == "job.n1/weight_v000001"


def test_a_missing_version_is_named_and_nothing_changes(world: World) -> None:
    world.pull(world.delta())
    world.trainer.delta()
    world.delta()
    with pytest.raises(PullRefused, match="weight_v000002 is not there"):
        world.puller.pull(world.source, 3)
    assert world.puller.host.holding is not None
    assert world.puller.host.holding.version.number == 1


@pytest.mark.parametrize("suffix", ["safetensors", "sparse"])
def test_c74_a_delta_with_weights_that_no_index_names_is_refused(world: World, suffix: str) -> None:
    """Ranks of a trainer that died left it, of tensors that the retry does not change."""
    number = world.delta()
    left = world.source / directory_name(number) / f"model-00003-of-00003.{suffix}"
    frame = Tensor("U8", (1,), b"x")
    write_file(left, FILES, {"another": frame}, {"another": "0" * 32})
    with pytest.raises(DeltaError, match=re.escape(left.name)):
        world.puller.pull(world.source, number)
    assert world.puller.host.holding is not None
    assert world.puller.host.holding.version.number == 0
    left.unlink()
    assert world.pull(number) == "job.n0/weight_v000001"


def test_c74_a_full_is_what_its_index_names(world: World) -> None:
    number = world.full()
    directory = world.source / directory_name(number)
    left = directory / "model-00003-of-00003.safetensors"
    left.write_bytes(next(directory.glob("*.safetensors")).read_bytes())
    assert world.pull(number) == "job.n0/weight_v000001"
    assert left.name not in FILES.list(world.puller.host.directory)
    assert world.pull(number) == "job.n0/weight_v000001", "it is held still"
    (directory / INDEX_NAME).unlink()
    again = World(world.tmp_path / "again")
    shutil.copytree(directory, again.source / directory_name(number))
    with pytest.raises(CheckpointError, match=re.escape(left.name)):
        again.puller.pull(again.source, number)


def test_a_damaged_delta_is_refused_and_a_repaired_one_taken(world: World) -> None:
    number = world.delta()
    shard = next((world.source / directory_name(number)).glob("*.safetensors"))
    good = shard.read_bytes()
    shard.write_bytes(good[:-1])
    with pytest.raises(CheckpointError):
        world.puller.pull(world.source, number)
    flipped = bytearray(good)
    flipped[-6] ^= 1
    shard.write_bytes(flipped)
    with pytest.raises(DeltaError, match=r"tensor .* on this base, its checksum promises"):
        world.puller.pull(world.source, number)
    assert world.puller.host.holding is not None
    assert world.puller.host.holding.version.number == 0
    shard.write_bytes(good)
    assert world.pull(number) == "job.n0/weight_v000001"


def test_a_delta_on_another_base_names_both_versions(world: World) -> None:
    world.delta()
    second = world.delta()
    (world.source / directory_name(1)).unlink()
    (world.source / directory_name(2)).rename(world.source / directory_name(1))
    with pytest.raises(PullRefused, match="builds on version 1, not on 0"):
        world.puller.pull(world.source, second - 1)


def test_links_out_of_the_roots_are_refused(world: World, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    number = world.delta()
    link = world.source / directory_name(number)
    real = link.resolve()
    link.unlink()
    link.symlink_to(outside)
    with pytest.raises(PullRefused, match="outside the roots"):
        world.puller.pull(world.source, number)
    link.unlink()
    link.symlink_to(real)
    os.rename(real / INDEX_NAME, outside / INDEX_NAME)
    (real / INDEX_NAME).symlink_to(outside / INDEX_NAME)
    with pytest.raises(PullRefused, match="outside the roots"):
        world.puller.pull(world.source, number)
