"""One replica's life: it joins, is killed and comes back, its clients leave, a pin outstays its welcome."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from .processes import PATIENCE, Fleet, Trainer, caught_up, get, ready
from .traffic import Outcome, Traffic, ask, failures, proven

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

RUN, SLOW = "lives", "slow"


@dataclass
class World:
    """``slow`` needs 20 s for a long answer and follows a run of its own."""

    fleet: Fleet
    trainer: Trainer
    slow_trainer: Trainer
    gateway: str
    slow: str


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Any:
    fleet = Fleet(tmp_path_factory.mktemp("lives"))
    yield fleet
    fleet.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(fleet: Fleet) -> AsyncIterator[World]:
    gateway = fleet.gateway()
    # Not "r0": an id that is the beginning of another's must not be taken for it.
    stays = fleet.replica("r", "--run", RUN)
    slow = fleet.replica("slow", "--run", SLOW, "--pin-drain", "2", pace=0.4)
    trainer, slow_trainer = fleet.trainer(RUN), fleet.trainer(SLOW)
    slow_trainer.step()
    await caught_up(await stays.url(), trainer)
    await caught_up(await slow.url(), slow_trainer)
    await ready(await gateway.url(), lambda said: said["replicas"] == 2)
    yield World(fleet, trainer, slow_trainer, await gateway.url(), await slow.url())


async def test_c19_c22_a_joiner_and_a_returner_answer_only_for_what_they_serve(world: World) -> None:
    """From its first breath a replica is asked everything, past the gateway too, while it catches up; then it
    is killed and comes back on its old host directory. No answer has boot weights, or a version from before.
    """
    for _ in range(20):
        world.trainer.step()
    world.trainer.start()
    outcomes: list[Outcome] = []
    demand = {"run": RUN}
    async with Traffic(world.gateway, lambda _: demand, seed=1, clients=6) as traffic:
        for _ in range(2):
            head = world.trainer.head
            joiner = world.fleet.replica("r1", "--run", RUN, kv_mode="retract")
            before = len(traffic.outcomes)
            directly = await hammer(await joiner.url(), demand)
            await traffic.more(15)
            joined = [o for o in traffic.outcomes[before:] if o.replica == "r1" and o.ok]
            assert joined
            for outcome in [*(o for o in directly if o.ok), *joined]:
                for answer in outcome.answers:
                    assert answer["meta_info"]["weight_version_start"] >= head
            outcomes += directly
            joiner.kill()
        await traffic.more(5)
    world.trainer.stop()
    assert all(outcome.begun for outcome in failures(traffic.outcomes))
    await proven(world.fleet, RUN, [*traffic.outcomes, *outcomes])


async def hammer(url: str, demand: dict[str, Any]) -> list[Outcome]:
    """Ask a replica that is just starting, again and again, until it has answered a few times."""
    rng = random.Random(2)
    outcomes: list[Outcome] = []
    while sum(outcome.ok for outcome in outcomes) < 3:
        outcome = await ask(url, rng, demand=demand, tokens=8)
        outcomes.append(outcome)
        # 503: not caught up. 409: it does not even know yet which run it follows.
        assert outcome.ok or outcome.error in ("503 EngineUnavailable", "409 WeightVersionNotReady"), outcome
        if not outcome.ok:
            status, _ = await get(url, "/health")
            assert status == 200, "who is slow at catching up is alive"
            await asyncio.sleep(0.02)
    return outcomes


@pytest.mark.parametrize("through", ["gateway", "replica"])
@pytest.mark.parametrize("stream", [True, False])
async def test_c20_a_client_that_leaves_leaves_nothing_running(
    world: World, through: str, stream: bool
) -> None:
    """Gate and engine both have forgotten it long before it would have ended by itself."""
    url = world.gateway if through == "gateway" else world.slow
    body = {
        "input_ids": [3, 4, 5], "stream": stream, "weight_version": {"run": SLOW},
        "sampling_params": {"max_new_tokens": 60, "ignore_eos": True, "n": 2},
    }  # fmt: skip

    async def leave() -> None:
        async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json=body) as answer:
            await answer.content.readline()
            await asyncio.sleep(PATIENCE)

    client = asyncio.create_task(leave())
    await ready(world.slow, lambda said: said["active_requests"] == 1)
    began = asyncio.get_running_loop().time()
    await until_running(world.slow, 2)
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)
    await ready(world.slow, lambda said: said["active_requests"] == 0)
    await until_running(world.slow, 0)
    assert asyncio.get_running_loop().time() - began < 0.8 * 60 * 0.4


async def until_running(url: str, count: int) -> None:
    """Wait until the engine runs this many sequences, by its own count."""
    async with asyncio.timeout(PATIENCE):
        while (await get(url, "/v1/loads"))[1]["loads"][0]["num_total_reqs"] != count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_c21_a_pin_that_lasts_does_not_hold_the_others_up(world: World) -> None:
    """It is given up when the time for pins is over; meanwhile the rest flows, and the next version comes."""
    rng, head = random.Random(3), world.slow_trainer.head
    pinned = [
        asyncio.create_task(
            ask(world.slow, rng, demand={"run": SLOW, "exact_version": head}, stream=stream, tokens=55)
        )
        for stream in (True, False)
    ]
    await ready(world.slow, lambda said: said["active_requests"] == 2)
    world.slow_trainer.step()
    others: list[Outcome] = []
    while not (others and others[-1].answers[0]["meta_info"]["weight_version_start"] > head):
        others.append(await ask(world.slow, rng, demand={"run": SLOW}, tokens=1))
        assert others[-1].ok, others[-1]
    streamed, whole = await asyncio.gather(*pinned)
    assert (streamed.error, streamed.detail["retry"]) == ("event WeightVersionElsewhere", "elsewhere")
    assert (whole.error, whole.detail["retry"]) == ("409 WeightVersionElsewhere", "elsewhere")
    said = await caught_up(world.slow, world.slow_trainer)
    assert said["updates"][-1]["drain"] >= 2
    # While the pins were waited for others were served by the version that was on its way out.
    old = [o for o in others if o.answers[0]["meta_info"]["weight_version_end"] == head]
    assert len(old) >= 2
    await proven(world.fleet, SLOW, others)


async def test_a_killed_replica_that_was_given_no_directory_leaves_none_behind_the_next(world: World) -> None:
    """The next one that starts on its host removes it; one that is told to end removes its own."""
    words = (
        "replica", "--store", world.fleet.store_url, "--run", RUN, "--base", str(world.fleet.boot),
        "--port", "0", "--poll", "0.3", "--json",
    )  # fmt: skip
    hosts: list[Path] = []
    for number, ends in enumerate((signal.SIGKILL, signal.SIGTERM)):
        replica = world.fleet.cli(f"nowhere{number}", *words)
        await caught_up(await replica.url(), world.trainer)
        hosts.append(Path(replica.stderr().partition("the host checkpoint is in ")[2].split()[0]))
        assert list(hosts[-1].glob("data-*/*.safetensors"))
        assert not hosts[0].exists() or number == 0
        replica.send(ends)
        await replica.ended()
    assert hosts[0] != hosts[1]
    assert not any(host.parent.exists() for host in hosts)
