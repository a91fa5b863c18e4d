"""A stock SGLang server that joins a run under way, with overlap scheduling: what it says from the start."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp
import pytest

from .world import ENDLESS, World

pytestmark = pytest.mark.real

PROMPT = [40, 41, 42, 43, 44, 45, 46, 47]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("world"))
    for seed in (1, 2, 3):
        world.publish(seed)
    world.start((), kv_mode="in_place", pin_drain="3")
    try:
        yield world
    finally:
        world.close()


async def test_c22_no_answer_carries_boot_weights_under_another_label(world: World) -> None:
    """Asked all the time while it boots and catches up, it refuses or answers as version 3."""
    answers: list[dict] = []
    refusals: set[str] = set()

    async def ask() -> None:
        while not answers:
            try:
                body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
                status, answer, _ = await world.server.call("POST", "/generate", body, timeout=20)
            except (aiohttp.ClientError, TimeoutError):
                status, answer = 0, None
            if status == 200:
                answers.append(answer)
            elif status:
                refusals.add(answer["error"]["type"])
            await asyncio.sleep(0.05)

    asking = asyncio.create_task(ask())
    await world.server.until_ready()
    await asyncio.wait_for(asking, 60)
    assert refusals <= {"EngineUnavailable"}
    assert answers[0]["meta_info"]["weight_version"] == "3"
    again = await world.server.generate(PROMPT, new=4)
    assert again["output_ids"] == answers[0]["output_ids"]


async def test_a_demand_that_is_not_met_yet_is_told_to_wait(world: World) -> None:
    body = {"input_ids": PROMPT, "weight_version": {"min_version": 4}}
    status, answer, headers = await world.server.call("POST", "/generate", body)
    assert (status, answer["error"]["type"], answer["error"]["retry"]) == (
        409,
        "WeightVersionNotReady",
        "here",
    )
    assert int(headers["retry-after"]) >= 1
    body = {"input_ids": PROMPT, "weight_version": {"exact_version": 2}}
    status, answer, _ = await world.server.call("POST", "/generate", body)
    assert (status, answer["error"]["type"]) == (409, "WeightVersionElsewhere")


async def test_an_exact_pin_holds_an_activation_up_to_the_deadline(world: World) -> None:
    """C21: the pinned request is ended with a retryable error, the others are served on across it."""
    pinned = asyncio.ensure_future(world.server.call("POST", "/generate", {
        "input_ids": PROMPT, "sampling_params": {"max_new_tokens": ENDLESS, "ignore_eos": True},
        "weight_version": {"exact_version": 3},
    }))  # fmt: skip
    await world.status_until(lambda status: status["active_requests"] == 1)
    (free,) = await world.across([PROMPT], 4)
    status, answer, _ = await pinned
    assert (status, answer["error"]["type"]) == (409, "WeightVersionElsewhere")
    assert [span["version"] for span in free["meta_info"]["weight_versions"]] == [3, 4]


async def test_spans_are_exact_with_overlap_scheduling(world: World) -> None:
    """The tokens of the first span, and no further one, are what the old weights alone would have said."""
    before = len(world.seeds) - 1
    prompts = [[32 + 5 * i + j for j in range(8)] for i in range(3)]
    answers, after = await world.across(prompts, 1), before + 1
    await world.serves(world.publish(world.seeds[before]))
    further = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        old, new = answer["meta_info"]["weight_versions"]
        assert (old["version"], new["version"]) == (before, after)
        end = old["end"]
        alone = (await world.server.generate(prompt, new=end + 1))["output_ids"]
        assert alone[:end] == answer["output_ids"][:end]
        further += alone[end] == answer["output_ids"][end]
    assert further <= 1  # by chance
