"""Staging in a child process: the same results as in this one, errors as text, and a child that may die."""

import asyncio
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest

from stitch_core.chain import ChainReader
from stitch_core.checkpoint import Checkpoint
from stitch_core.files import PosixFiles
from stitch_core.manifest import Manifest
from stitch_core.policy_publisher import PolicyPublisher
from stitch_core.replica.stage_process import StagerProcess, StagingFailed
from stitch_core.replica.staging import WrongBase
from stitch_core.safetensors import Tensor
from stitch_core.stores import open_store
from stitch_core.testing.checkpoints import random_tensors, step, table_of, write_checkpoint

RUN = "r"


class World:
    """A run with two versions, and the stager of one replica."""

    def __init__(self, tmp_path: Path) -> None:
        self.url, self.boot, self.host = f"file:{tmp_path}/store", tmp_path / "boot", tmp_path / "host"
        rng = np.random.default_rng(0)
        self.tensors: dict[str, Tensor] = random_tensors(rng)
        write_checkpoint(self.boot, PosixFiles(), self.tensors)
        publisher = PolicyPublisher.start(self.url, RUN, self.boot, tmp_path / "work")
        for _ in range(2):
            self.tensors = step(rng, self.tensors, 0.1)
            publisher.publish(self.tensors)
        publisher.close()
        self.activities: list[str] = []
        self.stager = StagerProcess(self.url, self.boot, self.host, activity=self.activities.append)

    async def head(self) -> Manifest:
        chain = ChainReader(open_store(self.url))
        head, _ = await chain.head(RUN)
        return await chain.manifest(RUN, head)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_stages_as_the_stager_does(world: World) -> None:
    boot = (await world.stager.boot()).table
    staged = await world.stager.stage(await world.head())
    await world.stager.close()
    assert staged.table == table_of(world.tensors)
    assert boot != staged.table
    assert staged.directory == world.host / "weight_v000002"
    assert Checkpoint.open(staged.directory, PosixFiles()).table() == staged.table
    assert staged.bytes > 0
    assert "fetching" in world.activities
    assert "staging" in world.activities


async def test_c81_the_child_fetches_when_the_parent_has_announced_what(world: World) -> None:
    """What it reads before is not payload: that is taken away while it waits."""
    head, said = await world.head(), []
    payload = [path for path in (world.boot.parent / "store").rglob("weight_v*/*") if path.is_file()]

    async def announce() -> None:
        said.append(world.stager.fetching)
        for path in payload:
            path.rename(path.with_name("." + path.name))

    with pytest.raises(StagingFailed):
        await world.stager.stage(head, announce)
    for path in payload:
        path.with_name("." + path.name).rename(path)
    ((*_, last),) = said
    assert (last, world.stager.fetching) == (head.digest(), ())
    staged = await world.stager.stage(head)
    assert staged.table == table_of(world.tensors)
    await world.stager.close()


async def test_an_error_is_text_and_the_child_goes_on(world: World) -> None:
    head = await world.head()
    bad = world.boot.parent / "store" / "runs" / RUN
    payload = next(path for path in bad.rglob("*.safetensors") if "weight_v000002" in str(path))
    data = payload.read_bytes()
    payload.unlink()
    with pytest.raises(StagingFailed, match="weight_v000002"):
        await world.stager.stage(head)
    payload.write_bytes(data)
    assert (await world.stager.stage(head)).table == table_of(world.tensors)
    await world.stager.close()


async def test_another_boot_checkpoint_is_told_apart(world: World) -> None:
    write_checkpoint(world.boot.with_name("other"), PosixFiles(), world.tensors)
    stager = StagerProcess(world.url, world.boot.with_name("other"), world.host)
    with pytest.raises(WrongBase, match="is not version 0 of run r"):
        await stager.stage(await world.head())
    await stager.close()


async def test_a_killed_child_is_replaced(world: World) -> None:
    await world.stager.boot()
    assert world.stager.pid is not None
    os.kill(world.stager.pid, signal.SIGKILL)
    with pytest.raises(StagingFailed, match="ended with status -9"):
        await world.stager.stage(await world.head())
    assert (await world.stager.stage(await world.head())).table == table_of(world.tensors)
    await world.stager.close()


async def test_a_cancelled_call_leaves_no_child(world: World) -> None:
    calls = [asyncio.ensure_future(world.stager.boot())]
    await asyncio.sleep(random.Random(0).uniform(0.01, 0.05))
    calls[0].cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert world.stager.pid is None
