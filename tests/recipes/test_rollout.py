"""The local recipe's client: demands a version, repeats what may be repeated, drops what is stale."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from recipes.local import rollout, task
from recipes.local.rollout import GatewayClient, NoRollouts, RequestFailed, Rollouts
from recipes.local.settings import Settings

SETTINGS = Settings(seed=0, steps=10, out=Path("unused"), groups=2, group_size=2, in_flight=4)
PROMPT = [task.BOS, *[3] * task.LENGTH, task.SEP]


def refusal(status: int, kind: str, *, retryable: bool) -> web.Response:
    return web.json_response({"error": {"type": kind, "retryable": retryable}}, status=status)


def group_of(version: int) -> web.Response:
    meta = {
        "id": "x",
        "run": SETTINGS.run,
        "weight_version": str(version),
        "weight_versions": [{"version": version, "start": 0, "end": 1}],
        "output_token_logprobs": [[-0.5, 2, None]],
    }
    body = [{"output_ids": [2], "meta_info": meta}] * SETTINGS.group_size
    return web.json_response(body, headers={"X-Stitch-Replica": "r0"})


class Gateway:
    """Answers what the test says, in turn, and the last of it for ever."""

    def __init__(self) -> None:
        self.answers: Iterator[Callable[[], web.Response]] = iter([])
        self.asked: list[dict[str, Any]] = []
        self.head = 9

    async def generate(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        return next(self.answers)()


@pytest.fixture
async def gateway() -> Gateway:
    return Gateway()


@pytest.fixture
async def client(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GatewayClient]:
    monkeypatch.setattr(rollout, "FIRST_BACKOFF", 0.001)
    app = web.Application()
    app.router.add_post("/generate", gateway.generate)
    async with TestServer(app) as server:
        url = f"http://{server.host}:{server.port}"
        modes = {"r0": "retract"}
        async with GatewayClient(url, SETTINGS, lambda: gateway.head, modes.__getitem__) as client:
            yield client


async def test_a_group_is_asked_for_with_the_version_that_the_head_implies(
    gateway: Gateway, client: GatewayClient
) -> None:
    gateway.answers = iter([lambda: group_of(7)])
    group = await client.group(PROMPT)
    assert [(t.oldest, t.kv_mode, t.replica) for t in group] == [(7, "retract", "r0")] * 2
    asked = gateway.asked[0]
    assert asked["weight_version"] == {"min_version": 9 - SETTINGS.lag, "run": SETTINGS.run}
    assert asked["sampling_params"]["n"] == SETTINGS.group_size


async def test_what_may_be_repeated_is_repeated_with_the_head_of_then(
    gateway: Gateway, client: GatewayClient
) -> None:
    def moved() -> web.Response:
        gateway.head = 20
        return refusal(503, "EngineUnavailable", retryable=True)

    gateway.answers = iter([
        moved, lambda: refusal(409, "WeightVersionNotReady", retryable=True),
        lambda: web.Response(status=502, text="a proxy's own words"), lambda: group_of(20),
    ])  # fmt: skip
    assert len(await client.group(PROMPT)) == 2
    assert client.retries == {"EngineUnavailable": 1, "WeightVersionNotReady": 1, "HTTP 502": 1}
    assert gateway.asked[-1]["weight_version"]["min_version"] == 20 - SETTINGS.lag
    assert client.in_flight == 0


async def test_a_final_refusal_is_an_error_with_its_words(gateway: Gateway, client: GatewayClient) -> None:
    gateway.answers = iter([lambda: refusal(410, "WeightVersionGone", retryable=False)])
    with pytest.raises(RequestFailed, match="WeightVersionGone"):
        await client.group(PROMPT)


async def test_waiting_has_an_end(
    gateway: Gateway, client: GatewayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "REQUEST_SECONDS", 0.05)
    gateway.answers = iter(lambda: lambda: refusal(503, "EngineUnavailable", retryable=True), None)
    with pytest.raises(RequestFailed, match="EngineUnavailable"):
        await client.group(PROMPT)
    rollouts = Rollouts(client, SETTINGS, lambda group: None)
    with pytest.raises(NoRollouts, match="0 of 2 groups"):
        await rollouts.batch(oldest=0, timeout=0.01)


async def test_requests_stay_in_flight_and_stale_groups_are_dropped(
    gateway: Gateway, client: GatewayClient
) -> None:
    versions = iter([1, 1, 1, *[5] * 10_000])
    gateway.answers = iter(lambda: lambda: group_of(next(versions)), None)
    seen: list[int] = []
    rollouts = Rollouts(client, SETTINGS, lambda group: seen.append(group[0].oldest))
    running = asyncio.create_task(rollouts.run())
    try:
        for _ in range(5):
            batch = await rollouts.batch(oldest=2, timeout=5)
            assert len(batch) == SETTINGS.groups
            assert all(t.oldest == 5 for group in batch for t in group)
        # Nobody takes any more: old groups make room for new ones.
        async with asyncio.timeout(5):
            while rollouts.dropped < 10:  # noqa: ASYNC110 (a counter, nothing to wait on)
                await asyncio.sleep(0.01)
        assert client.in_flight <= SETTINGS.in_flight
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert seen.count(1) == 3, "dropped groups are recorded all the same"
    assert rollouts.finished == len(seen)
    assert not rollouts.failures
