"""The stock ``train_async.py --fully-async`` of Miles, from a checkout that STITCH_MILES names.

Generation never stops, so samples span activations; StitchDataBuffer keeps stale ones from training, and a
run that was killed goes on. One run for the module.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.miles.processes import Child, World
from stitch_core.manifest import Manifest
from stitch_core.stores.local import LocalStore
from stitch_core.trainers.record import record_path
from tests.small_run import chain_of

pytestmark = pytest.mark.real
CHECKOUT = os.environ.get("STITCH_MILES", "")
if not CHECKOUT:
    pytest.skip("platform: no checkout of Miles, set STITCH_MILES to one", allow_module_level=True)

ROLLOUTS, KILLED_AFTER, MOST_STALE, HELD_BACK = 9, 5, 2, 1
IN_FLIGHT, BUFFERED, BATCH = 8, 8, 4
"""Samples: asked for at once, in a full buffer, and in the batch collected while another is trained on."""


def chain(world: World) -> list[Manifest]:
    return asyncio.run(chain_of(LocalStore(world.root / "store"), "math"))


def train(world: World, port: str) -> Child:
    driver = Path(__file__).with_name("checkout_driver.py")
    return world.start(
        "trainer", str(driver), str(world.root), port, str(ROLLOUTS), CHECKOUT, "fully-async",
        "--rollout-max-response-len", "24", "--async-max-concurrent-samples", str(IN_FLIGHT),
        "--async-unused-samples-handler", "retry",
    )  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("miles"))
    try:
        yield world
    finally:
        world.close()


@pytest.fixture(scope="module")
def lives(world: World) -> list[str]:
    """What the trainer printed before it was killed, and after it was resumed."""
    world.settings(
        stitch_run="math", stitch_store=world.store, stitch_work=f"{world.root}/work",
        stitch_channel="latest", stitch_lag=1, stitch_max_staleness=MOST_STALE,
        stitch_inner_generate="held_back.generate", held_back_sample=HELD_BACK,
        held_back_versions=MOST_STALE + 2,
    )  # fmt: skip
    port = world.gateway(base_gpu=0).url().rpartition(":")[2]
    world.replica("a", "--engine-opt=pace=0.15")
    world.replica("b", "--engine-opt=pace=0.15", kv_mode="retract")
    first = train(world, port)
    first.until(lambda text: f"[disk delta v={KILLED_AFTER + 2}]" in text, "some versions")
    first.kill()
    second = train(world, port)
    assert second.wait() == 0, second.text()[-6000:]
    return [first.text(), second.text()]


@pytest.fixture(scope="module")
def trained(world: World, lives: list[str]) -> dict[int, list[dict[str, Any]]]:
    """The samples of every rollout, with those that the killed trainer did not come to replaced by others."""
    paths = {n: world.root / f"samples_{n}.pt" for n in range(ROLLOUTS)}
    return {n: torch.load(path, weights_only=False)["samples"] for n, path in paths.items()}


def test_every_sample_has_one_record_that_covers_its_answer(trained: dict[int, list[dict[str, Any]]]) -> None:
    spanning = 0
    for sample in (sample for group in trained.values() for sample in group):
        # A prompt that was asked again had the record of the answer that was thrown away as well.
        (report,) = sample["metadata"]["stitch"]
        spans = report["spans"]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == sample["response_length"]
        versions = [span["version"] for span in spans]
        assert (report["start"], report["end"]) == (versions[0], versions[-1])
        assert {str(report["start"]), str(report["end"])} == set(sample["weight_versions"])
        spanning += len(versions) > 1
    assert spanning > 0


def test_a_sample_that_was_held_back_is_not_trained_on_and_that_is_said(
    world: World, lives: list[str], trained: dict[int, list[dict[str, Any]]]
) -> None:
    made = {m.step: m.number for m in chain(world) if m.step is not None}
    behind = [
        made[rollout] - 1 - min(map(int, sample["weight_versions"]))
        for rollout, group in trained.items()
        for sample in group
        if rollout in made  # not if it was killed between checkpoint and publishing
    ]
    assert len(behind) >= (ROLLOUTS - 1) * BATCH
    assert max(behind) <= MOST_STALE
    assert min(behind) < max(behind)
    assert f"sample {HELD_BACK} was held back from version 1 to {MOST_STALE + 3}" in lives[0]
    said = "".join(lives)
    filtered = [int(n) for n in re.findall(r"Filtered stale group \(staleness=(\d+) > max=2\)", said)]
    assert filtered
    assert max(filtered) > MOST_STALE + 1
    counted = re.findall(r"stale_groups_filtered': (\d+)", said)
    assert 0 < sum(map(int, counted)) <= len(filtered)


def test_numbers_go_on_and_no_sample_is_trained_on_twice(
    world: World, trained: dict[int, list[dict[str, Any]]]
) -> None:
    versions = chain(world)
    assert [m.number for m in versions] == list(range(len(versions)))
    steps = [m.step for m in versions if m.step is not None]
    assert steps == sorted(set(steps))
    assert len(steps) >= ROLLOUTS - 1
    assert {m.epoch for m in versions} == {1, 2}
    indices = [sample["index"] for group in trained.values() for sample in group]
    assert len(indices) == ROLLOUTS * BATCH
    # Killed between Megatron's checkpoint and what goes with it, it asks again for what was asked meanwhile.
    torn = [n for n in range(ROLLOUTS) if not record_path(world.root / "ckpt", n).exists()]
    assert len(torn) <= 1
    assert len(indices) - len(set(indices)) <= BATCH * len(torn)
    # At each end, what is on its way or in the buffer; Miles does not ask for it again after a resume.
    lost = set(range(max(indices))) - set(indices)
    assert len(lost) <= 2 * (IN_FLIGHT + BUFFERED + BATCH)


BOUNDS = """
import sys
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
from miles.rollout.fully_async_data_buffer import DataBufferConstructorInput
from stitch_miles.buffer import StitchDataBuffer

required = {"stitch_run": "r", "stitch_store": "file:/store", "stitch_boot": "/boot", "rollout_batch_size": 2,
            "async_data_buffer_capacity_factor": 2.0, "dynamic_sampling_filter_path": None}
for strict, stock in ((None, None), (1, 1), (0, None), (2, None), (None, 3)):
    args = SimpleNamespace(**required, stitch_max_staleness=strict, max_weight_staleness=stock)
    try:
        buffer = StitchDataBuffer(DataBufferConstructorInput(args, lambda group: None))
        print(buffer._args.max_weight_staleness, args.max_weight_staleness)
    except ValueError as error:
        print(error)
"""


def test_the_buffer_wants_one_bound_that_the_loop_can_keep() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BOUNDS, CHECKOUT], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    none, both, too_strict, strict, stock = done.stdout.splitlines()[-5:]
    assert "set stitch_max_staleness or --max-weight-staleness" in none
    assert none == both
    assert "stitch_max_staleness must be at least 1" in too_strict
    # Miles' own arguments stay as they are.
    assert (strict, stock) == ("2 None", "3 3")
