"""The real trainer of miles-rl with two tensor-parallel ranks on gloo: its gather feeds Stitch's encoder."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from recipes.miles.processes import World
from stitch_core.checkpoint import Checkpoint
from stitch_core.files import PosixFiles
from stitch_core.stores.local import LocalStore
from tests.small_run import chain_of

pytestmark = pytest.mark.real


def test_two_ranks_publish_one_policy(tmp_path: Path) -> None:
    world = World(tmp_path)
    try:
        gateway = world.gateway(trainer_gpus=2)
        world.replica("a")
        trainer = world.trainer(
            gateway, 2, "--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"
        )
        assert trainer.wait() == 0, trainer.text()[-6000:]
    finally:
        world.close()
    versions = asyncio.run(chain_of(LocalStore(tmp_path / "store"), "math"))
    # Nothing was published at start: what two ranks gathered is version 0, to the bit.
    assert [(m.number, m.step) for m in versions] == [(0, None), (1, 0), (2, 1)]
    assert versions[0].state == Checkpoint.open(tmp_path / "boot", PosixFiles()).state()
    assert len(versions[1].representation.changed) > 10
