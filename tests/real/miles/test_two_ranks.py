"""The real trainer of miles-rl on two ranks, on gloo: what they gather feeds Stitch's encoder."""

from __future__ import annotations

import asyncio

import pytest

from recipes.miles.processes import World
from stitch_core.checkpoint import Checkpoint
from stitch_core.files import PosixFiles
from stitch_core.stores.local import LocalStore
from tests.small_run import chain_of

pytestmark = pytest.mark.real


@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_two_ranks_publish_one_policy(world: World, split: str) -> None:
    gateway = world.gateway(base_gpu=2)
    world.replica("a")
    trainer = world.trainer(
        gateway, 2, "--actor-num-gpus-per-node", "2", f"--{split}-model-parallel-size", "2"
    )
    assert trainer.wait() == 0, trainer.text()[-6000:]
    versions = asyncio.run(chain_of(LocalStore(world.root / "store"), "math"))
    assert [(m.number, m.step) for m in versions] == [(0, None), (1, None), (2, 0), (3, 1)]
    # What was published at start, as two ranks gathered it, is version 0, to the bit.
    boot = Checkpoint.open(world.root / "boot", PosixFiles()).state()
    assert versions[1].state == versions[0].state == boot
    assert len(versions[2].representation.changed) > 10
