"""The stock ``train.py`` of Miles, from a checkout that STITCH_MILES names: its delta writer and its loop.

Promises 1 to 3, C06 and C27: rank 0's extra call of the hook is in the way of every start.
"""

from __future__ import annotations

import os

import pytest
import torch

from recipes.miles.processes import World
from tests.real.miles import checkouts
from tests.real.miles.checkouts import chain, keep_files, prove

pytestmark = pytest.mark.real
CHECKOUT = os.environ.get("STITCH_MILES", "")
if not CHECKOUT:
    pytest.skip("platform: no checkout of Miles, set STITCH_MILES to one", allow_module_level=True)


def train(world: World, port: str, rollouts: int, *flags: str) -> None:
    checkouts.train(world, CHECKOUT, port, rollouts, *flags)


def test_miles_publishes_rolls_out_and_resumes(world: World) -> None:
    keep_files(world)
    port = world.gateway(base_gpu=0).url().rpartition(":")[2]
    world.replica("a")
    train(world, port, 2)
    versions = chain(world)
    assert [(m.number, m.step) for m in versions] == [(0, None), (1, None), (2, 0), (3, 1)]
    assert {m.epoch for m in versions} == {1}
    assert versions[1].state == versions[0].state, "it starts with the boot checkpoint's weights"
    assert all(m.representation.changed for m in versions[2:])
    for rollout_id in range(2):
        for sample in torch.load(world.root / f"samples_{rollout_id}.pt", weights_only=False)["samples"]:
            (report,) = sample["metadata"]["stitch"]
            assert report["start"] == rollout_id + 1
    prove(world, versions[1:], "xor")
    # A resumed Miles has weights that nobody serves: its own become the next version, then it goes on.
    train(world, port, 4, "--update-weight-delta-encoding", "overwrite")
    versions = chain(world)
    assert [(m.number, m.step) for m in versions[4:]] == [(4, None), (5, 2), (6, 3)]
    assert versions[4].state == versions[3].state
    assert {m.epoch for m in versions[4:]} == {2}
    prove(world, versions[4:], "overwrite")
