"""Case C28: a normal update costs a run none of its tries. And the lag of requests that name no version."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stitch_core.ports import Blob, Unavailable
from tests.gateway.fleet import Fleet
from tests.gateway.trainer import TRIES, EngineReplica, RunStore, Trainer, boot_checkpoint

BODY = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}
# One second of life in the tests' time.
SECOND = 0.005


class AwayStore(RunStore):
    away = False

    async def load(self, key: str) -> Blob:
        if self.away:
            raise Unavailable("the store is away")
        return await super().load(key)


@pytest.fixture
def store() -> AwayStore:
    return AwayStore()


@pytest.fixture
def replica(fleet: Fleet, tmp_path: Path) -> EngineReplica:
    made = EngineReplica(boot_checkpoint(tmp_path / "boot"), step_seconds=0.001)
    made.serves(7)
    fleet.servers.append(made)
    return made


async def start(fleet: Fleet, store: RunStore, **settings: Any) -> None:
    defaults = {"run": "r", "facade": True, "head_poll": 0.02}
    await fleet.start(store=store, **{**defaults, **settings})
    head = fleet.gateway.consumers.head
    assert head is not None
    await fleet.until(lambda: head.error is None or store.away)  # type: ignore[attr-defined]


async def update(replica: EngineReplica, number: int, seconds: float, pause: float) -> None:
    """Fetch and stage while serving, then close, copy and open."""
    await asyncio.sleep(seconds - pause)
    replica.gate.close("activating")
    await asyncio.sleep(pause)
    replica.serves(number)


async def test_C28_an_update_of_three_minutes(fleet: Fleet, store: AwayStore, replica: EngineReplica) -> None:
    await store.publish(7)
    await start(fleet, store, hold=50 * SECOND)
    trainer = Trainer(fleet, sleep=1 * SECOND)
    assert (await trainer.rollout(BODY))["meta_info"]["weight_version"] == "7"
    await store.publish(8)
    await trainer.post("/pull_weights", {"target_version": 8})
    updating = asyncio.ensure_future(update(replica, 8, 180 * SECOND, 20 * SECOND))
    answers = await asyncio.gather(*(trainer.rollout(BODY) for _ in range(16)))
    await updating
    assert {answer["meta_info"]["weight_version"] for answer in answers} == {"8"}
    # Three minutes are four holds of 50 s: 4 tries of 60, where an answer at once would take all of them.
    assert max(trainer.tries) <= 6


async def test_C28_without_holding_the_run_would_die(
    fleet: Fleet, store: AwayStore, replica: EngineReplica
) -> None:
    await store.publish(8)
    await start(fleet, store, hold=0)
    trainer = Trainer(fleet, sleep=1 * SECOND)
    # Far longer than 60 tries take on a machine that has other work.
    updating = asyncio.ensure_future(update(replica, 8, 5000 * SECOND, 20 * SECOND))
    with pytest.raises(aiohttp.ClientResponseError):
        await trainer.rollout(BODY)
    assert trainer.tries == []
    assert not updating.done()
    updating.cancel()


async def test_C28_a_fleet_that_updates_one_by_one_costs_no_try(
    fleet: Fleet, store: AwayStore, tmp_path: Path
) -> None:
    """More replicas close under a request than may fail under it: closing is not failing."""
    boot = boot_checkpoint(tmp_path / "boot")
    replicas = [EngineReplica(boot, step_seconds=0.001) for _ in range(8)]
    for replica in replicas:
        replica.serves(7)
        fleet.servers.append(replica)
    await store.publish(7)
    await start(fleet, store, hold=30.0, attempts=2, lag=1, poll=0.4)
    for replica in replicas:
        replica.gate.close("activating")
    trainer = Trainer(fleet)
    calls = [asyncio.ensure_future(trainer.rollout(BODY)) for _ in range(4)]
    await fleet.until(lambda: not any(r.ready for r in fleet.gateway.fleet.replicas))
    for replica in replicas:
        replica.serves(8)
    for answer in await asyncio.gather(*calls):
        assert answer["meta_info"]["weight_version"] == "8"
    assert trainer.tries == [1] * 4


def test_the_hold_is_below_the_idle_limits_of_load_balancers_and_the_tries_last_for_most_of_an_hour() -> None:
    from stitch_gateway.app import GatewaySettings

    hold = GatewaySettings().hold
    assert hold < 60
    assert TRIES * hold >= 45 * 60


# -------------------------------------------------------------------------------------------------- lag


async def version(fleet: Fleet, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    status, value = await fleet.post({**BODY, **fields}, headers=headers)
    return int(value["meta_info"]["weight_version"]) if status == 200 else value["error"]["type"]


async def test_lag_of_requests_that_name_none(fleet: Fleet, store: AwayStore, replica: EngineReplica) -> None:
    await store.publish(8)
    await start(fleet, store, hold=0.1)
    late = "WeightVersionNotReady"
    assert await version(fleet) == late
    assert await version(fleet, {"X-Stitch-Consumer": "rollout"}) == late
    assert await version(fleet, {"X-Stitch-Consumer": "eval"}) == 7
    assert await version(fleet, weight_version={"min_version": 3}) == 7
    assert await version(fleet, weight_version={"exact_version": 7}) == 7
    assert await version(fleet, {"X-Stitch-Min-Version": "7"}) == 7
    replica.serves(8)
    assert await version(fleet) == 8


@pytest.mark.parametrize(("lag", "head", "served"), [(1, 8, True), (1, 9, False), (2, 9, True), (9, 3, True)])
async def test_lag_is_counted_from_the_head(
    fleet: Fleet, store: AwayStore, replica: EngineReplica, lag: int, head: int, served: bool
) -> None:
    await store.publish(head)
    await start(fleet, store, hold=0.1, lag=lag, facade=False)
    assert await version(fleet) == (7 if served else "WeightVersionNotReady")


@pytest.mark.parametrize(
    ("lag", "head", "served"), [(1, 0, True), (1, 1, False), (9, 3, False), (9, 0, True)]
)
async def test_c79_no_lag_reaches_back_to_the_boot_checkpoint(
    fleet: Fleet, store: AwayStore, replica: EngineReplica, lag: int, head: int, served: bool
) -> None:
    """Version 1 has the weights that the trainer started with, which may be others."""
    replica.serves(0)
    await store.publish(head)
    await start(fleet, store, hold=0.1, lag=lag, facade=False)
    assert await version(fleet) == (0 if served else "WeightVersionNotReady")


async def test_the_head_is_as_new_as_the_last_update_that_was_answered(
    fleet: Fleet, store: AwayStore, replica: EngineReplica
) -> None:
    await store.publish(7)
    await start(fleet, store, hold=0.3, head_poll=60.0)
    await store.publish(8)
    assert await version(fleet) == 7  # at most one look old
    await Trainer(fleet).post("/pull_weights", {"target_version": 8})
    assert await version(fleet) == "WeightVersionNotReady"


async def test_C18_while_the_store_is_away_the_last_head_counts(
    fleet: Fleet, store: AwayStore, replica: EngineReplica
) -> None:
    await store.publish(7)
    await start(fleet, store, hold=0.2)
    store.away = True
    head = fleet.gateway.consumers.head
    assert head is not None
    await fleet.until(lambda: head.error is not None)
    assert await version(fleet) == 7
    shown = (await fleet.get("/status"))[1]["head"]
    assert (shown["number"], shown["error"]) == (7, "Unavailable: the store is away")
    assert shown["age"] >= 0
    status, value = await fleet.post({"target_version": 8}, "/pull_weights")
    assert (status, value["error"]["type"]) == (503, "EngineUnavailable")


async def test_a_head_that_was_never_read_is_not_made_up(
    fleet: Fleet, store: AwayStore, replica: EngineReplica
) -> None:
    store.away = True
    await store.publish(7)
    await start(fleet, store, hold=0.2)
    assert await version(fleet) == "EngineUnavailable"


async def test_a_head_that_was_never_read_is_waited_for(
    fleet: Fleet, store: AwayStore, replica: EngineReplica
) -> None:
    store.away = True
    await store.publish(7)
    await start(fleet, store)
    waiting = asyncio.ensure_future(version(fleet))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    store.away = False
    assert await waiting == 7


async def test_before_the_first_claim_there_is_nothing_to_lag_behind(
    fleet: Fleet, store: AwayStore, replica: EngineReplica
) -> None:
    await start(fleet, store)
    assert await version(fleet) == 7
