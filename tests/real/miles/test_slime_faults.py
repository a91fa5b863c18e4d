"""Faults on slime's real path, from the checkout that STITCH_SLIME names: it stops, says why, and resumes.

C04, C06 and C18 on two ranks, and promise 2: no version is lost or there twice.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.miles.processes import PATIENCE, Child, World, session
from tests.real.miles import checkouts
from tests.real.miles.checkouts import chain, start
from tests.real.miles.wire import trained
from tests.rebuild import rebuilt

pytestmark = pytest.mark.real
CHECKOUT = os.environ.get("STITCH_SLIME", "")
if not CHECKOUT:
    pytest.skip("platform: no checkout of slime, set STITCH_SLIME to one", allow_module_level=True)

RANKS = ("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2")


def fleet(world: World) -> str:
    """A replica and a gateway, whose port it returns."""
    port = world.gateway(base_gpu=2).url().rpartition(":")[2]
    world.replica("a")
    return port


def settings(world: World, **more: object) -> None:
    world.settings(
        stitch_run="math", stitch_store=world.store, stitch_work=f"{world.root}/work",
        stitch_channel="latest", **more,
    )  # fmt: skip


def stopped(trainer: Child) -> str:
    """What a trainer said that ended with an error."""
    assert trainer.wait() != 0, trainer.text()[-6000:]
    return trainer.text()


def until(found: Callable[[], bool], trainer: Child) -> None:
    deadline = time.monotonic() + PATIENCE
    while not found():
        assert trainer.process.poll() is None, trainer.text()[-6000:]
        assert time.monotonic() < deadline, trainer.text()[-6000:]
        time.sleep(0.05)


def leave(store: Path, away: Path) -> None:
    store.rename(away)
    store.symlink_to("store")  # a link to itself: nothing below it can be read, or made


def come_back(store: Path, away: Path) -> None:
    store.unlink()
    away.rename(store)


def resume(world: World, port: str, rollouts: int) -> None:
    """Train on to the end: every rollout's weights are the newest of their step, nothing is there twice."""
    checkouts.train(world, CHECKOUT, port, rollouts, *RANKS)
    versions = chain(world)
    numbers, steps = [m.number for m in versions], [m.step for m in versions if m.step is not None]
    assert numbers == list(range(len(numbers)))
    assert steps == sorted(set(steps))
    assert steps[-1] == rollouts - 1
    assert trained(world.root / "ckpt", rollouts - 1) == rebuilt(world.root, versions[-1])


def test_a_flag_that_slime_drops_or_does_not_know_stops_the_run_at_step_0(world: World) -> None:
    trainer = start(
        world, CHECKOUT, fleet(world), 2, *RANKS, "--stitch-lag", "1", "--stitch-chanel=latest",
        "--custom-generate-functon-path", "stitch_slime.rollout.generate",
    )  # fmt: skip
    text = stopped(trainer)
    assert "--stitch-lag was dropped by the framework's parser: write it as stitch_lag in the YAML of" in text
    assert "--stitch-chanel is not a setting, did you mean --stitch-channel?" in text
    assert "--custom-generate-functon-path stitch_slime.rollout.generate was dropped by" in text
    assert "did you mean --custom-generate-function-path?" in text
    assert not (world.root / "store" / "runs").exists()


def test_a_misspelt_setting_stops_the_run_at_step_0(world: World) -> None:
    settings(world, stitch_lagg=1)
    text = stopped(start(world, CHECKOUT, fleet(world), 2))
    assert "stitch_lagg is not a setting, did you mean stitch_lag?" in text
    assert not (world.root / "store" / "runs").exists()


def test_a_gateway_that_is_down_at_start_is_named_and_nothing_is_claimed(world: World) -> None:
    text = stopped(start(world, CHECKOUT, "1", 2))
    assert "127.0.0.1:1" in text
    assert not (world.root / "store" / "runs").exists()


def test_c04_a_disk_that_is_full_while_slime_writes_its_delta(world: World) -> None:
    updates = world.root / "updates"
    updates.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(updates)], check=False)
    if mounted.returncode != 0:
        pytest.skip("platform: no permission to mount a small disk")
    try:
        port = fleet(world)
        text = stopped(start(world, CHECKOUT, port, 2, *RANKS))
        assert "No space left on device" in text
        assert [m.number for m in chain(world)] == [0, 1]  # what it started with, of no bytes
        subprocess.run(["mount", "-o", "remount,size=16m", str(updates)], check=True)
        resume(world, port, 3)
    finally:
        subprocess.run(["umount", "-l", str(updates)], check=True)


def test_c18_a_store_that_is_away_is_waited_for_then_every_rank_stops_and_says_why(world: World) -> None:
    settings(world, stitch_patience=20)
    port, store, away = fleet(world), world.root / "store", world.root / "away"
    trainer = start(world, CHECKOUT, port, 4, *RANKS)
    until(lambda: (store / "runs" / "math" / "head").exists(), trainer)
    leave(store, away)
    time.sleep(5)
    come_back(store, away)
    until(lambda: len(chain(world)) >= 4, trainer)
    leave(store, away)
    text = stopped(trainer)
    come_back(store, away)
    assert "Unavailable" in text
    before = [(m.number, m.step) for m in chain(world)]
    resume(world, port, 4)
    assert [(m.number, m.step) for m in chain(world)][: len(before)] == before


def test_c06_a_rank_that_is_killed_in_a_publish(world: World) -> None:
    settings(world, stitch_patience=300)
    port, store, away = fleet(world), world.root / "store", world.root / "away"
    trainer = start(world, CHECKOUT, port, 2, *RANKS)
    claimed = trainer.until(lambda text: "run math is claimed" in text, "claim")
    first = re.search(r"\(MegatronTrainRayActor pid=(\d+)\).*run math is claimed", claimed)
    assert first is not None
    # The last step's checkpoint is complete with its record, and what comes next is its publish.
    until((world.root / "ckpt" / "stitch" / "rollout_1.json").exists, trainer)
    leave(store, away)  # the publish waits, and nothing of it is seen
    index = world.root / "updates" / "weight_v000003" / "model.safetensors.index.json"
    until(index.exists, trainer)
    time.sleep(1)
    os.kill(next(pid for pid in actors(trainer) if pid != int(first[1])), signal.SIGKILL)
    come_back(store, away)
    text = stopped(trainer)
    assert "is gone (" in text or "actor died" in text.lower()
    assert [m.number for m in chain(world)] == [0, 1, 2]
    resume(world, port, 4)


def actors(trainer: Child) -> list[int]:
    """The processes of the trainer's ranks."""
    found = []
    for pid in session(trainer.process.pid):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if command.startswith(b"ray::MegatronTrainRayActor"):
            found.append(pid)
    assert len(found) == 2, found
    return found
