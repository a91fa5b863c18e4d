"""A replica that joins a run under way, with overlap scheduling: tests for both destinations."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from stitch_core.chain import ChainReader
from stitch_core.replica.stage_process import StagerProcess
from stitch_core.stores import open_store

from .world import ENDLESS, RUN, World

PROMPT = [40, 41, 42, 43, 44, 45, 46, 47]
SEEDS = (1, 2, 3)
"""Of the versions that are there when the replica starts."""
PIN_DRAIN = "3"


async def under_way(scratch: Path, left: int) -> World:
    """A run that has versions before any replica has started, on a host that one of version ``left`` left."""
    world = World(scratch)
    store = open_store(world.url)
    before = StagerProcess(world.url, world.boot, world.host)
    try:
        chain = ChainReader(store)
        for seed in SEEDS:
            if world.publish(seed) == left:
                head, _ = await chain.head(RUN)
                await before.stage(await chain.manifest(RUN, head))
    finally:
        await before.close()
        await store.close()
    return world


async def no_boot_weights_under_another_label(starting: World) -> None:
    """C22: asked all the time while it boots and catches up, it refuses or answers as the newest version."""
    answers: list[dict] = []
    refusals: set[str] = set()

    async def ask() -> None:
        while not answers:
            try:
                body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
                status, answer, _ = await starting.server.call("POST", "/generate", body, timeout=20)
            except (aiohttp.ClientError, TimeoutError):
                status, answer = 0, None
            if status == 200:
                answers.append(answer)
            elif status:
                refusals.add(answer["error"]["type"])
            await asyncio.sleep(0.05)

    asking = asyncio.create_task(ask())
    await starting.server.until_ready()
    await asyncio.wait_for(asking, 60)
    assert refusals <= {"EngineUnavailable"}
    assert answers[0]["meta_info"]["weight_version"] == str(len(SEEDS))
    again = await starting.server.generate(PROMPT, new=4)
    assert again["output_ids"] == answers[0]["output_ids"]


async def a_demand_is_told_to_wait(world: World) -> None:
    body = {"input_ids": PROMPT, "weight_version": {"min_version": len(world.seeds)}}
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


async def an_exact_pin_holds_up_to_the_deadline(world: World) -> None:
    """C21: the pinned request is ended with a retryable error, the others are served on across it."""
    before = len(world.seeds) - 1
    pinned = asyncio.ensure_future(world.server.call("POST", "/generate", {
        "input_ids": PROMPT, "sampling_params": {"max_new_tokens": ENDLESS, "ignore_eos": True},
        "weight_version": {"exact_version": before},
    }))  # fmt: skip
    await world.status_until(lambda status: status["active_requests"] == 1)
    (free,) = await world.across([PROMPT], 4)
    status, answer, _ = await pinned
    assert (status, answer["error"]["type"]) == (409, "WeightVersionElsewhere")
    assert [span["version"] for span in free["meta_info"]["weight_versions"]] == [before, before + 1]


async def spans_are_exact(world: World) -> None:
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
