"""A stock SGLang server of two tensor-parallel ranks: both take each version, or none does."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

import aiohttp
import pytest

from .checkpoints import random_weights
from .world import RUN, World, faults

pytestmark = pytest.mark.real

PROMPT = [40, 41, 42, 43, 44, 45, 46, 47]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("world"))
    try:
        server = world.start(
            ("--tp-size", "2", "--disable-overlap-schedule"),
            {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", **faults(world.scratch)},
        )
        asyncio.run(server.until_ready())
        yield world
    finally:
        world.close()


async def test_the_boot_checkpoint_is_version_0(world: World) -> None:
    meta = (await world.server.generate(PROMPT))["meta_info"]
    assert meta["weight_versions"] == [{"version": 0, "start": 0, "end": 8}]
    assert (meta["run"], meta["weight_version"], meta["kv"]) == (RUN, "0", "uniform")
    status = (await world.server.call("GET", "/ready"))[1]
    assert (status["state"], status["mode"], status["problem"]) == ("serving", "follower", None)


async def test_versions_follow_and_an_old_one_comes_back(world: World) -> None:
    said = []
    for seed in (1, 2, 1):
        number = world.publish(seed)
        await world.serves(number)
        answer = await world.server.generate(PROMPT)
        assert answer["meta_info"]["weight_version"] == str(number)
        assert answer["meta_info"]["cached_tokens"] == 0
        said.append(answer["output_ids"])
    assert said[0] == said[2]
    assert said[0] != said[1]


async def test_a_generation_spans_an_activation_on_both(world: World) -> None:
    before = len(world.seeds) - 1
    (answer,) = await world.across([PROMPT], 3)
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == [before, before + 1]


async def test_each_rank_has_an_image_of_its_own(world: World) -> None:
    await world.serves(world.publish(4))
    now = (await world.server.call("GET", "/stitch/status"))[1]
    assert now["destination"]["uses"] == "cpu"
    last = now["last_update"]
    whole = sum(one.nbytes for one in random_weights(0).values())
    assert len(last["stage"]["image_bytes"]) == len(last["stage"]["changed_segments"]) == 2
    assert whole / 2 <= last["bytes"] < whole == last["stage"]["bytes"]  # copied, and read, by each


async def test_a_version_that_one_rank_cannot_stage_comes_from_disk_on_both(world: World) -> None:
    """And the next one from images again, of which none equals what is live then."""
    said = []
    for there in (True, False):
        if there:
            (world.scratch / "unfit").touch()
        else:
            (world.scratch / "unfit").unlink()
        for seed in (5, 1):
            await world.serves(world.publish(seed))
            last = (await world.server.call("GET", "/stitch/status"))[1]["last_update"]
            assert last["destination"] == ("disk" if there else "cpu")
            said.append((await world.server.generate(PROMPT))["output_ids"])
    assert "this version is loaded from disk: rank 1: no stage of" in world.server.tail(400)
    assert said[0] == said[2] != said[1] == said[3]


async def test_what_one_rank_cannot_stage_no_rank_activates(world: World) -> None:
    before = await world.server.generate(PROMPT)
    served = len(world.seeds) - 1
    (world.scratch / "read").touch()
    number = world.publish(2)
    problem = await world.status_until(lambda status: status["problem"] is not None)
    assert "rank 1: a fault at " in problem["problem"]["message"]
    after = await world.server.generate(PROMPT)
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["weight_version"] == str(served)
    (world.scratch / "read").unlink()
    await world.serves(number)


async def test_a_copy_that_fails_midway_on_one_rank_ends_the_replica(world: World) -> None:
    """C04, C05, C23: no token of weights that are half one version. The last test of this server."""
    (world.scratch / "copy").touch()
    sampling = {"max_new_tokens": 3000, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling}
    generation = asyncio.ensure_future(world.server.call("POST", "/generate", body))
    await world.status_until(lambda status: status["active_requests"] == 1)
    world.publish(6)
    await asyncio.to_thread(world.server.process.wait, 60)
    assert world.server.process.returncode == -signal.SIGKILL
    assert "this replica must be replaced" in world.server.tail(400)
    assert "rank 1: RuntimeError('a fault after the first segment')" in world.server.tail(400)
    with contextlib.suppress(aiohttp.ClientError):
        status, answer, _ = await generation
        assert (status, answer["error"]["type"]) == (503, "EngineUnavailable")
