"""A stock SGLang server that a stock trainer drives, retract: slime's calls in slime's order, and misuse."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file

from stitch_core.checkpoint import Checkpoint
from stitch_core.delta.encoder import DeltaEncoder
from stitch_core.safetensors import Tensor
from stitch_core.versions import directory_name

from .checkpoints import random_weights, to_publish
from .stock_trainer import FILES, PROMPT, Trainer
from .world import small_disk

pytestmark = pytest.mark.real
both_destinations = pytest.mark.parametrize("destination", ["cpu", "disk"])


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path_factory.mktemp("trainer"))
    try:
        asyncio.run(trainer.server.until_ready())
        yield trainer
    finally:
        trainer.server.stop()


async def test_slimes_calls_in_its_order(trainer: Trainer) -> None:
    """Before the first update it pulls version 0, and generates with what the engine booted from."""
    assert (await trainer.pull(0))[0] == 200
    # Nothing changed while it started, so nothing is loaded again.
    assert (await trainer.said())["last_update"]["destination"] is None
    first = await trainer.server.generate(PROMPT)
    assert first["meta_info"]["weight_version"] == "0"
    said = [first["output_ids"]]
    for seed in (1, 2, 1):
        number = trainer.write(seed)
        await trainer.move(number)
        answer = await trainer.server.generate(PROMPT)
        meta = answer["meta_info"]
        assert meta["weight_version"] == str(number)
        assert meta["weight_versions"] == [{"version": number, "start": 0, "end": 8}]
        assert meta["cached_tokens"] == 0
        said.append(answer["output_ids"])
        assert (await trainer.server.call("GET", "/get_weight_version"))[1] == {"weight_version": str(number)}
    assert said[1] == said[3]
    assert len({tuple(ids) for ids in said}) == 3


async def test_a_generation_across_an_update_is_recomputed(trainer: Trainer) -> None:
    """`retract`: two spans, and every token over KV of its own version."""
    before = trainer.number
    generation = asyncio.ensure_future(trainer.server.generate(PROMPT, new=3000, rid="long"))
    await asyncio.sleep(1.5)
    after = trainer.write(3)
    assert (await trainer.pull(after))[0] == 200
    assert (await trainer.update(after))[0] == 200
    await asyncio.sleep(1.0)
    assert (await trainer.post("/abort_request", rid="long"))[0] == 200
    meta = (await generation)["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == [before, after]
    assert meta["weight_versions"][-1]["end"] == meta["completion_tokens"]
    assert meta["kv"] == "uniform"
    assert meta["num_retractions"] >= 1


async def test_a_pause_in_the_default_mode_aborts(trainer: Trainer) -> None:
    generation = asyncio.ensure_future(trainer.server.generate(PROMPT, new=3000))
    await asyncio.sleep(1.0)
    assert (await trainer.post("/pause_generation"))[0] == 200
    meta = (await generation)["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert 0 < meta["completion_tokens"] < 3000
    assert meta["weight_versions"][-1]["end"] == meta["completion_tokens"]
    # Nothing stays paused, whoever forgets to continue.
    assert (await trainer.server.generate(PROMPT))["meta_info"]["completion_tokens"] == 8


async def test_abort_all_is_the_trainers(trainer: Trainer) -> None:
    generation = asyncio.ensure_future(trainer.server.generate(PROMPT, new=3000))
    await asyncio.sleep(1.0)
    assert (await trainer.post("/abort_request", rid="", abort_all=True))[0] == 200
    assert (await generation)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_what_was_never_pulled_is_not_activated(trainer: Trainer) -> None:
    served = (await trainer.status())["applied"]
    number = trainer.write(4)
    status, answer = await trainer.update(number, model_path=str(trainer.source / directory_name(number)))
    assert (status, answer["success"]) == (400, False)
    assert "holds nothing that was pulled" in answer["message"]
    assert (await trainer.pull(number))[0] == 200
    status, answer = await trainer.update(number + 1)
    assert (status, answer["success"]) == (400, False)
    now = await trainer.status()
    assert (now["applied"], now["ready"]) == (served, True)
    assert f"version {number} was pulled" in now["problem"]["message"]
    await trainer.move(number)
    assert (await trainer.status())["problem"] is None


async def test_paths_outside_the_roots_are_refused(trainer: Trainer) -> None:
    for changes in (
        {"source_dir": "/etc"},
        {"local_checkpoint_dir": str(trainer.roots / ".." / "elsewhere")},
    ):
        status, answer = await trainer.pull(1, **changes)
        assert (status, answer["success"]) == (400, False)
        assert "outside the roots" in answer["message"]
    assert (await trainer.pull(1, source_dir="relative"))[0] == 400
    assert (await trainer.pull(1, target_version="2"))[0] == 400


async def test_a_second_pull_while_one_runs_is_refused(trainer: Trainer) -> None:
    number = trainer.write(5)
    answers = await asyncio.gather(*(trainer.pull(number) for _ in range(4)))
    assert sorted(status for status, _ in answers) == [200, 400, 400, 400]
    assert any("one at a time" in answer["message"] for _, answer in answers)
    await trainer.move(number)


@both_destinations
async def test_a_corrupt_source_changes_nothing_and_is_repaired(trainer: Trainer, destination: str) -> None:
    served = (await trainer.status())["applied"]
    number = trainer.write(6 if destination == "cpu" else 1)
    shard = next((trainer.source / directory_name(number)).glob("*.safetensors"))
    good = shard.read_bytes()
    shard.write_bytes(good[:-3])
    status, answer = await trainer.pull(number, destination=destination)
    assert (status, answer["success"]) == (400, False)
    now = await trainer.status()
    assert (now["ready"], now["applied"]) == (True, served)
    assert now["problem"]["age"] >= 0
    assert (await trainer.server.generate(PROMPT))["meta_info"]["weight_version"] == str(served)
    assert (await trainer.update(number))[0] == 400
    shard.write_bytes(good)
    await trainer.activate(number, destination)


@both_destinations
async def test_activate_weights_activates_what_was_pulled(trainer: Trainer, destination: str) -> None:
    number = trainer.write(7)
    status, answer = await trainer.post("/activate_weights", target_version=number)
    assert (status, answer["success"]) == (400, False)
    assert (await trainer.pull(number, destination=destination))[0] == 200
    waits = (await trainer.said())["staged"]
    assert (waits is not None) == (destination == "cpu")
    assert (await trainer.post("/activate_weights", target_version=number + 1))[0] == 400
    for _ in range(2):
        status, answer = await trainer.post("/activate_weights", target_version=number)
        assert (status, answer["success"]) == (200, True), answer
    assert (await trainer.said())["last_update"]["destination"] == destination
    assert (await trainer.server.generate(PROMPT))["meta_info"]["weight_version"] == str(number)
    assert (await trainer.post("/activate_weights", target_version="x"))[0] == 400
    assert (await trainer.pull(number + 1, destination="gpu"))[0] == 400
    trainer.write(2)
    await trainer.move(trainer.number)


async def test_the_admin_key_guards_what_moves_weights(trainer: Trainer) -> None:
    for path in ("/pull_weights", "/activate_weights", "/update_weights_from_disk", "/wake"):
        status, _, _ = await trainer.server.call("POST", path, {}, headers={"Authorization": "Bearer other"})
        assert status == 401, path


@both_destinations
async def test_a_newer_pull_supersedes_the_one_that_runs(trainer: Trainer, destination: str) -> None:
    """While the older one is on its way into the host's copy, here made to last."""
    (worker,) = trainer.server.children("pull_worker")
    older, newer = trainer.write(3), trainer.write(4 if destination == "cpu" else 5)
    os.kill(worker, signal.SIGSTOP)
    try:
        pulls = []
        for number in (older, newer):
            pulls.append(asyncio.ensure_future(trainer.pull(number, destination=destination)))
            await asyncio.sleep(0.5)
    finally:
        os.kill(worker, signal.SIGCONT)
    (old_status, old), (new_status, _) = await asyncio.gather(*pulls)
    assert (old_status, old["success"]) == (400, False)
    assert f"superseded by {newer}" in old["message"]
    assert new_status == 200
    await trainer.activate(newer, destination)


async def test_a_newer_pull_supersedes_one_on_its_way_into_images(trainer: Trainer) -> None:
    """And the engine serves meanwhile."""
    served = (await trainer.status())["applied"]
    older, newer = trainer.write(1), trainer.write(2)
    slow = trainer.scratch / "slow"
    slow.touch()
    try:
        first = asyncio.ensure_future(trainer.pull(older, destination="cpu"))
        for _ in range(300):
            if (trainer.scratch / "host" / directory_name(older)).exists():
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
        assert (await trainer.server.generate(PROMPT))["meta_info"]["weight_version"] == str(served)
        assert not first.done()
        second = asyncio.ensure_future(trainer.pull(newer, destination="cpu"))
        await asyncio.sleep(0.5)
    finally:
        slow.unlink()
    (old_status, old), (new_status, _) = await asyncio.gather(first, second)
    assert (old_status, f"superseded by {newer}" in old["message"]) == (400, True)
    assert new_status == 200
    await trainer.activate(newer, "cpu")


@both_destinations
async def test_a_pull_whose_worker_is_killed_is_repeated(trainer: Trainer, destination: str) -> None:
    (worker,) = trainer.server.children("pull_worker")
    served, number = (await trainer.status())["applied"], trainer.write(5 if destination == "cpu" else 6)
    os.kill(worker, signal.SIGSTOP)
    pull = asyncio.ensure_future(trainer.pull(number, destination=destination))
    await asyncio.sleep(0.5)
    os.kill(worker, signal.SIGKILL)
    assert (await pull)[0] == 400
    assert (await trainer.server.generate(PROMPT))["meta_info"]["weight_version"] == str(served)
    await trainer.activate(number, destination)


@both_destinations
async def test_a_full_disk_refuses_the_pull_with_its_name(trainer: Trainer, destination: str) -> None:
    served, number = (await trainer.status())["applied"], trainer.write(3 if destination == "cpu" else 4)
    with small_disk(trainer.scratch / "host" / "fetch"):
        status, answer = await trainer.pull(number, destination=destination)
        assert (status, answer["success"]) == (400, False)
        assert "No space left" in answer["message"]
        assert str(trainer.scratch / "host" / "fetch") in answer["message"]
        assert (await trainer.server.generate(PROMPT))["meta_info"]["weight_version"] == str(served)
    await trainer.activate(number, destination)


def without(tensors: dict[str, Tensor]) -> None:
    del tensors["model.norm.weight"]


def extra(tensors: dict[str, Tensor]) -> None:
    tensors["model.other.weight"] = tensors["model.norm.weight"]


def retyped(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"]._replace(dtype="F16")


def reshaped(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"]._replace(shape=(8, 8))


def lost(directory: Path) -> str:
    (shard, _) = sorted(directory.glob("*.safetensors"))
    shard.unlink()
    return shard.name


def cut(directory: Path) -> str:
    (shard, _) = sorted(directory.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    return shard.name


@both_destinations
@pytest.mark.parametrize("harm", [without, extra, retyped, reshaped, lost, cut])
async def test_c14_a_full_that_does_not_fit_is_refused_with_its_name(
    trainer: Trainer, harm: Callable[[Any], Any], destination: str
) -> None:
    served = await trainer.server.generate(PROMPT)
    tensors = to_publish(random_weights(8))
    name = "model.other.weight" if harm is extra else "model.norm.weight"
    if harm in (lost, cut):
        directory = trainer.write_full(tensors)
        name = harm(directory)
    else:
        harm(tensors)
        trainer.write_full(tensors)
    status, answer = await trainer.pull(trainer.number, destination=destination)
    assert (status, answer["success"]) == (400, False)
    assert name in answer["message"]
    assert (await trainer.post("/activate_weights", target_version=trainer.number))[0] == 400
    after = await trainer.server.generate(PROMPT)
    assert after["output_ids"] == served["output_ids"]
    assert after["meta_info"]["weight_version"] == served["meta_info"]["weight_version"]


async def test_a_full_is_staged_and_served(trainer: Trainer) -> None:
    trainer.write_full(to_publish(random_weights(8)))
    await trainer.move(trainer.number)
    assert (await trainer.said())["last_update"]["destination"] == "cpu"
    assert (await trainer.server.generate(PROMPT))["meta_info"]["weight_version"] == str(trainer.number)


async def test_every_other_way_to_change_weights_is_refused(trainer: Trainer) -> None:
    for path in (
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
        "/update_weights_from_ipc",
        "/begin_weight_update",
        "/end_weight_update",
        "/init_weights_update_group",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/load_lora_adapter",
    ):
        assert (await trainer.post(path))[0] == 403, path
    assert (await trainer.post("/update_weight_version", new_version="77"))[0] == 400


async def test_a_restarted_trainer_is_another_run(trainer: Trainer) -> None:
    before = await trainer.status()
    run, compared = before["run"], before["probe"]["outcomes"]["same"]
    trainer.encoder = DeltaEncoder.from_checkpoint(Checkpoint.open(trainer.boot, FILES))
    trainer.number = 0
    trainer.source = trainer.roots / "restarted"
    await trainer.move(0)
    # The boot checkpoint's weights came back, and the probe knows them.
    assert (await trainer.status())["probe"]["outcomes"]["same"] == compared + 1
    first = await trainer.server.generate(PROMPT)
    await trainer.move(trainer.write(2))
    now = await trainer.status()
    assert (now["applied"], now["run"] == run) == (1, False)
    assert now["run"].startswith("job.")
    answer = await trainer.server.generate(PROMPT)
    assert answer["meta_info"]["run"] == now["run"] == first["meta_info"]["run"]
    assert answer["meta_info"]["cached_tokens"] == 0


def change_shards(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite the tensors of a host checkpoint behind everybody's back."""
    for shard in directory.rglob("data-*/*.safetensors"):
        tensors = load_file(shard)
        change(tensors)
        save_file(tensors, shard, metadata={"format": "pt"})


async def test_an_update_that_fails_midway_ends_the_replica(trainer: Trainer) -> None:
    """C04, C05, C23: weights that nobody can vouch for are never served. The last test of this server."""
    number = trainer.write(8)
    assert (await trainer.pull(number, destination="disk"))[0] == 200
    name = "model.norm.weight"
    change_shards(
        trainer.scratch / "host", lambda tensors: tensors.__setitem__(name, tensors[name][:-1].clone())
    )
    with contextlib.suppress(aiohttp.ClientError):  # the answer, if it comes at all, is no success
        assert (await trainer.update(number))[0] == 400
    await asyncio.to_thread(trainer.server.process.wait, 60)
    assert trainer.server.process.returncode == -signal.SIGKILL
    assert "this replica must be replaced" in trainer.server.tail(400)
