"""A stock SGLang server that follows a store by images in memory; test_follower.py has the same from disk.

With overlap scheduling, on a run and a host that it did not begin.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import pytest

from stitch_core.state import state_digest
from stitch_core.testing.checkpoints import table_of

from . import joining, profiling
from . import test_follower as from_disk
from .checkpoints import random_weights, to_publish
from .world import World, faults

pytestmark = pytest.mark.real

PROMPT = [40, 41, 42, 43, 44, 45, 46, 47]

# In this order: the first asks while the server starts.
test_c22_no_boot_weights_under_another_label = joining.no_boot_weights_under_another_label
test_c21_an_exact_pin_holds_up_to_the_deadline = joining.an_exact_pin_holds_up_to_the_deadline
test_spans_are_exact_with_overlap_scheduling = joining.spans_are_exact
test_stitch_profile_of_an_update = profiling.an_update


@pytest.fixture(scope="module")
def starting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = asyncio.run(joining.under_way(tmp_path_factory.mktemp("world"), left=len(joining.SEEDS) - 1))
    try:
        world.start((), faults(world.scratch), destination="cpu", pin_drain=joining.PIN_DRAIN)
        yield world
    finally:
        world.close()


@pytest.fixture(scope="module")
def world(starting: World) -> World:
    asyncio.run(starting.server.until_ready())
    return starting


async def said(world: World) -> dict[str, Any]:
    status, answer, _ = await world.server.call("GET", "/stitch/status")
    assert status == 200, answer
    result: dict[str, Any] = answer
    return result


async def test_a_return_to_what_equalled_a_fresh_server_is_bit_for_bit_the_same(world: World) -> None:
    """Tokens and logprobs; and the same again after another version was served in between."""
    assert world.seeds[-1] == profiling.TARGET, "the profile before this test left it"
    await world.serves(len(world.seeds) - 1)
    prompts = [PROMPT, [33 + i % 90 for i in range(300)], [9]]

    async def answers() -> list[Any]:
        found = []
        for prompt in prompts:
            answer = await world.server.generate(prompt, new=24, return_logprob=True)
            found.append((answer["output_ids"], answer["meta_info"]["output_token_logprobs"]))
        return found

    expected = await answers()
    for _ in range(2):
        await world.serves(world.publish(1))
        other = await answers()
        await world.serves(world.publish(profiling.TARGET))
        assert await answers() == expected != other


async def test_the_status_says_what_it_took(world: World) -> None:
    number = world.publish(2)
    await world.serves(number)
    now = await said(world)
    assert now["destination"] == {"asked": "cpu", "uses": "cpu", "why": "the self-test has passed"}
    assert (now["self_test"]["outcome"], now["self_test"]["state"][:7]) == ("done", "sha256:")
    last = now["last_update"]
    assert (last["version"], last["destination"]) == (f"r/weight_v{number:06d}", "cpu")
    weights = sum(one.nbytes for one in random_weights(0).values())
    (image,) = last["stage"]["image_bytes"]
    assert last["bytes"] == last["stage"]["bytes"] == weights <= image
    assert last["stage"]["images"] == 2
    assert 0 < last["copy"] <= last["pause"] < 5
    assert now["staged"] is None


async def test_only_what_changed_is_copied(world: World) -> None:
    weights = random_weights(2)
    weights["model.norm.weight"] = random_weights(3)["model.norm.weight"]
    await world.serves(world.publish_weights(2, weights))
    last = (await said(world))["last_update"]
    assert last["bytes"] == weights["model.norm.weight"].nbytes
    assert last["stage"]["changed_segments"] == [1]


async def test_a_return_to_the_version_before_reads_nothing(world: World) -> None:
    await world.serves(world.publish(4))
    before = await world.server.generate(PROMPT, new=20)
    await world.serves(world.publish(5))
    await world.serves(world.publish(4))
    assert (await said(world))["last_update"]["stage"]["bytes"] == 0
    after = await world.server.generate(PROMPT, new=20)
    assert after["output_ids"] == before["output_ids"]


async def test_weights_that_do_not_change_are_only_relabelled(world: World) -> None:
    number = world.publish(4)
    await world.serves(number)
    last = (await said(world))["last_update"]
    assert (last["destination"], last["bytes"]) == (None, 0)
    answer = await world.server.generate(PROMPT)
    assert answer["meta_info"]["weight_version"] == str(number)
    await world.serves(world.publish(1))
    assert (await said(world))["last_update"]["destination"] == "cpu"


async def test_bytes_that_rot_on_the_host_are_not_activated(world: World) -> None:
    """In a tensor that the next version does not change: found when it is staged, and the copy made again."""
    weights = random_weights(world.seeds[-1])
    (shard,) = world.host.glob("data-*/*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1  # of another tensor than the one that changes
    shard.write_bytes(data)
    weights["model.embed_tokens.weight"] = random_weights(6)["model.embed_tokens.weight"]
    number = world.publish_weights(6, weights)
    await world.serves(number)
    assert "holds state sha256:" in world.server.log.read_text()
    staged = (await said(world))["last_update"]
    assert (staged["destination"], staged["stage"]["state"][:7]) == ("cpu", "sha256:")
    await world.serves(world.publish(7))
    assert (await world.status_until(lambda status: status["problem"] is None))["ready"]


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(from_disk.test_new_weights_are_served_and_old_kv_is_not_used, id="c12"),
        pytest.param(from_disk.test_a_generation_across_an_activation_says_so, id="c11"),
        pytest.param(from_disk.test_c20_a_client_that_leaves_ends_its_generation, id="c20"),
        pytest.param(from_disk.test_a_store_that_is_gone_is_said_and_survived, id="store gone"),
        pytest.param(from_disk.test_a_full_disk_is_said_and_survived, id="disk full"),
        pytest.param(from_disk.test_a_staging_process_that_is_killed_is_replaced, id="stager killed"),
        pytest.param(from_disk.test_a_corrupt_version_is_said_and_the_next_one_served, id="c09, c14"),
    ],
)
async def test_the_same_as_from_disk(world: World, what: Callable[[World], Awaitable[None]]) -> None:
    await what(world)


async def test_a_state_that_comes_back_is_compared_and_one_live_tensor_that_is_another_found(
    world: World,
) -> None:
    """The damage is done after the copy, which is confirmed: only the probe tells, and the server ends."""
    for seed in (21, 22):
        state = state_digest(table_of(to_publish(random_weights(seed))))
        await world.serves(world.publish(seed))
        await world.status_until(lambda status, state=state: status["probe"]["last"]["state"] == state)
    await world.serves(world.publish(21))
    probe = (await said(world))["probe"]
    assert (probe["able"], probe["last"]["outcome"], probe["noise"]) == (True, "same", 0.0)
    assert probe["last"]["difference"] == pytest.approx(0.0, abs=1e-5)
    kept = json.loads((world.host / "probe.json").read_bytes())
    assert probe["last"]["state"] in kept["answers"]
    (world.scratch / "damaged").touch()
    before = len(world.seeds) - 1
    answers: list[dict[str, Any]] = []
    asking = asyncio.create_task(ask_until_it_ends(world, answers))
    async with asyncio.timeout(60):
        while not answers:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    world.publish(22)
    await asyncio.to_thread(world.server.process.wait, 60)
    await asking
    assert {answer["meta_info"]["weight_version_end"] for answer in answers} == {before}
    assert "must be replaced" in world.server.log.read_text()


async def ask_until_it_ends(world: World, answers: list[dict[str, Any]]) -> None:
    """One request after the other."""
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    with contextlib.suppress(aiohttp.ClientError):
        while world.server.process.poll() is None:
            status, answer, _ = await world.server.call("POST", "/generate", body, timeout=60)
            answers += [answer] if status == 200 else []
