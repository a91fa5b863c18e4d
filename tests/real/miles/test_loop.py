"""The real trainer of miles-rl, from PyPI, through gateway and replicas: publish, roll out, die, resume.

Promises 1 to 3 and C06; one run for the module, since Ray takes most of a minute to start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.miles.processes import World
from stitch_core.manifest import Manifest
from stitch_core.stores.local import LocalStore
from stitch_core.trainers.record import load_record
from tests.small_run import FILES, chain_of

pytestmark = pytest.mark.real
ROLLOUTS = 5


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("miles"))
    try:
        yield world
    finally:
        world.close()


@pytest.fixture(scope="module")
def finished(world: World) -> World:
    """A run that was killed after its second rollout and resumed."""
    gateway = world.gateway()
    world.replica("a")
    world.replica("b", kv_mode="retract")
    first = world.trainer(gateway, ROLLOUTS)
    first.until(lambda text: "finished 1" in text, "second rollout")
    first.kill()
    second = world.trainer(gateway, ROLLOUTS)
    assert second.wait() == 0, second.text()[-6000:]
    return world


def chain(world: World) -> list[Manifest]:
    return asyncio.run(chain_of(LocalStore(world.root / "store"), "math"))


def samples(world: World, rollout_id: int) -> list[dict[str, Any]]:
    path = world.root / f"samples_{rollout_id}.pt"
    loaded: list[dict[str, Any]] = torch.load(path, weights_only=False)["samples"]
    return loaded


def test_numbers_go_on_and_no_version_is_lost_or_doubled(finished: World) -> None:
    versions = chain(finished)
    assert [m.number for m in versions] == list(range(len(versions)))
    steps = [m.step for m in versions if m.step is not None]
    # What was trained and not saved is trained again, under a number of its own.
    assert steps == sorted(steps)
    assert set(steps) == set(range(ROLLOUTS))
    assert [m.epoch for m in versions] == sorted(m.epoch for m in versions)
    assert {m.epoch for m in versions} == {1, 2}


def test_every_sample_says_which_versions_made_it_and_none_is_stale(finished: World) -> None:
    by_step = {m.step: m.number for m in chain(finished)}
    for rollout_id in range(ROLLOUTS):
        group = samples(finished, rollout_id)
        assert len(group) == 4
        for sample in group:
            (report,) = sample["metadata"]["stitch"]
            assert report["run"] == "math"
            assert sample["weight_versions"] == sorted({str(report["start"]), str(report["end"])})
            assert report["spans"][-1]["end"] == sample["response_length"]
            # A synchronous loop has lag 0: the version before the one that this rollout made.
            assert report["start"] == by_step[rollout_id] - 1


def test_the_checkpoint_says_where_the_run_stood(finished: World) -> None:
    by_step = {m.step: m for m in chain(finished)}
    for rollout_id in range(ROLLOUTS):
        record = load_record(Path(finished.root / "ckpt"), rollout_id, FILES)
        assert record is not None
        assert record.version == by_step[rollout_id].number - 1


def test_a_typo_stops_the_trainer_at_step_0_with_the_nearest_name(finished: World) -> None:
    gateway = next(child for child in finished.children if child.name == "gateway")
    before = chain(finished)[-1]
    finished.settings(stitch_run="math", stitch_stroe=finished.store)
    trainer = finished.trainer(gateway, ROLLOUTS + 1)
    assert trainer.wait() != 0
    assert "stitch_stroe is not a setting, did you mean stitch_store?" in trainer.text()
    assert chain(finished)[-1] == before
