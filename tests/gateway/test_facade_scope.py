"""What a trainer aborts and counts are its own requests, on every replica, and nobody else's."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.fleet import Fleet
from tests.gateway.trainer import EngineReplica, RunStore, Trainer, boot_checkpoint, load_of

LONG = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1_000_000}}
EVAL = {"X-Stitch-Consumer": "eval"}


@pytest.fixture
async def replicas(fleet: Fleet, tmp_path: Path) -> list[EngineReplica]:
    """Two of them serve version 7 of run r, behind a gateway with a facade."""
    boot = boot_checkpoint(tmp_path / "boot")
    made = [EngineReplica(boot) for _ in range(2)]
    for replica in made:
        replica.serves(7)
        fleet.servers.append(replica)
    store = RunStore()
    await store.publish(7)
    await fleet.start(store=store, run="r", facade=True, head_poll=0.02)
    return made


def running(replicas: list[EngineReplica]) -> list[str]:
    return [own for replica in replicas for own in replica.ids]


async def load(fleet: Fleet, path: str = "/v1/loads", **options: Any) -> int:
    async with fleet.session.get(fleet.url + path, **options) as answer:
        return load_of(await answer.json())


async def test_abort_all_of_one_consumer_leaves_the_others_alone(
    fleet: Fleet, replicas: list[EngineReplica]
) -> None:
    mine = [asyncio.ensure_future(fleet.post({**LONG, "rid": f"m{i}"})) for i in range(6)]
    others = [
        asyncio.ensure_future(fleet.post({**LONG, "rid": "e0"}, headers=EVAL)),
        asyncio.ensure_future(fleet.post({**LONG, "rid": "s0"}, headers={"X-Stitch-Consumer": "rollout2"})),
    ]
    stream = await fleet.session.post(fleet.url + "/generate", json={**LONG, "stream": True}, headers=EVAL)
    await fleet.until(lambda: len(running(replicas)) == 9)
    assert all(replica.ids for replica in replicas)
    assert [own for own in running(replicas) if "rollout~" in own] == [
        own for own in running(replicas) if own.startswith("r~rollout~m") and own.endswith("~")
    ]
    assert (await load(fleet), await load(fleet, headers=EVAL), await load(fleet, "/get_load")) == (6, 2, 6)

    assert await fleet.post({"abort_all": True}, "/abort_request") == (200, {"requests": 6, "replicas": 2})
    for i, (status, value) in enumerate(await asyncio.gather(*mine)):
        meta = value["meta_info"]
        assert (status, meta["finish_reason"]["type"], meta["id"]) == (200, "abort", f"m{i}")
        assert (meta["weight_version_start"], meta["weight_version_end"]) == (7, 7)
        assert len(value["output_ids"]) == meta["completion_tokens"]  # what it had is the trainer's to keep
    assert (await load(fleet), await load(fleet, headers=EVAL)) == (0, 2)
    assert not any(call.done() for call in others)
    before = sum(replica.engine.tokens for replica in replicas)
    await stream.content.readany()
    await fleet.until(lambda: sum(replica.engine.tokens for replica in replicas) > before)

    answer = await fleet.post({"abort_all": True}, "/abort_request", headers=EVAL)
    assert answer == (200, {"requests": 2, "replicas": 2})
    assert (await others[0])[1]["meta_info"]["id"] == "e0"
    last = [line for line in (await stream.text()).split("\n\n") if line][-2]
    assert json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "abort"
    assert not others[1].done()
    others[1].cancel()


async def test_another_gateways_requests_of_the_same_consumer_are_reached(
    fleet: Fleet, replicas: list[EngineReplica]
) -> None:
    second = Fleet()
    second.servers = list(replicas)
    await second.start(run="r")
    try:
        call = asyncio.ensure_future(second.post(LONG))
        other = asyncio.ensure_future(second.post(LONG, headers=EVAL))
        await second.until(lambda: len(running(replicas)) == 2)
        await fleet.post({"abort_all": True}, "/abort_request")
        assert (await call)[1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert not other.done()
        other.cancel()
    finally:
        await second.stack.aclose()


async def test_another_run_is_not_reached(fleet: Fleet, replicas: list[EngineReplica]) -> None:
    replicas[1].serves(7, "other")
    await fleet.until(lambda: {str(r.serving.run) for r in fleet.gateway.fleet.replicas} == {"r", "other"})
    other = asyncio.ensure_future(fleet.post(LONG, headers={"X-Stitch-Run": "other"}))
    await fleet.until(lambda: len(replicas[1].ids) == 1)
    await fleet.post({"abort_all": True}, "/abort_request")
    await asyncio.sleep(0.05)
    assert not other.done()
    assert (await load(fleet), await load(fleet, headers={"X-Stitch-Run": "other"})) == (0, 1)
    await fleet.post({"abort_all": True}, "/abort_request", headers={"X-Stitch-Run": "other"})
    assert (await other)[1]["meta_info"]["run"] == "other"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a", "return_logprob": True}),
        ("/generate", {"text": ["a", "b"], "sampling_params": {"n": 2}}),
        ("/generate", {"text": "a", "stream": True}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/chat/completions", {"messages": [], "n": 2}),
        ("/v1/chat/completions", {"messages": [], "stream": True}),
    ],
)
async def test_what_is_held_is_answered_as_an_engine_answers_an_abort(
    fleet: Fleet, replicas: list[EngineReplica], path: str, body: dict[str, Any]
) -> None:
    wanted = {"weight_version": {"min_version": 9}}
    call = asyncio.ensure_future(fleet.session.post(fleet.url + path, json={**body, **wanted}))
    await fleet.until(lambda: len(fleet.gateway.dispatcher.held) == 1)
    assert await load(fleet) == 1
    await fleet.post({"abort_all": True}, "/abort_request")
    answer = await call
    assert answer.status == 200
    text = await answer.text()
    if body.get("stream"):
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        assert events.pop() == "[DONE]"
        values = [json.loads(event) for event in events]
    else:
        values = json.loads(text) if isinstance(json.loads(text), list) else [json.loads(text)]
    assert len(values) == (4 if isinstance(body.get("text"), list) else 1)
    for value in values:
        report = value.get("meta_info") or value["metadata"]
        kinds = [choice["finish_reason"] for choice in value.get("choices", [])]
        if path == "/generate":
            kinds = [report["finish_reason"]["type"]]
            assert (value["text"], report["completion_tokens"]) == ("", 0)
        assert set(kinds) == {"abort"}
        assert len(kinds) == (2 if "prompt" in body or "n" in body else 1)
        assert (report["run"], report["weight_version"], report["weight_version_start"]) == ("r", "9", 9)
    assert await load(fleet) == 0


async def test_slime_ends_a_step_with_requests_held_and_in_flight(
    fleet: Fleet, replicas: list[EngineReplica]
) -> None:
    trainer = Trainer(fleet)
    calls = [asyncio.ensure_future(trainer.rollout(LONG)) for _ in range(20)]
    calls += [
        asyncio.ensure_future(trainer.rollout({**LONG, "weight_version": {"min_version": 8}}))
        for _ in range(4)
    ]
    # Some are on their way at this moment: at no replica yet, and no longer held.
    await fleet.until(lambda: len(running(replicas)) > 3)
    rounds = await trainer.abort_until_idle()
    answers = await asyncio.wait_for(asyncio.gather(*calls), 60)
    assert rounds < 40
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"abort"}
    assert set(trainer.tries) == {1}
    assert running(replicas) == []


async def test_miles_aborts_once_and_waits_for_all(fleet: Fleet, replicas: list[EngineReplica]) -> None:
    trainer = Trainer(fleet)
    calls = [asyncio.ensure_future(trainer.rollout(LONG)) for _ in range(20)]
    await fleet.until(lambda: len(running(replicas)) > 3)
    await trainer.post("/abort_request", {"abort_all": True})
    late = asyncio.ensure_future(trainer.rollout(LONG))  # of the next step: not meant
    answers = await asyncio.wait_for(asyncio.gather(*calls), 60)
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"abort"}
    await asyncio.sleep(0.3)
    assert not late.done()
    late.cancel()


async def test_C13_a_consumer_that_cannot_be_is_refused(fleet: Fleet, replicas: list[EngineReplica]) -> None:
    for consumer in ("a~b", "", "-a", "a b", "x" * 129):
        for path in ("/generate", "/abort_request"):
            headers = {"X-Stitch-Consumer": consumer}
            status, value = await fleet.post({**LONG, "abort_all": True}, path, headers=headers)
            assert (status, value["error"]["type"]) == (400, "InvalidRequest")


async def test_C39_an_abort_by_an_id_that_two_consumers_use(
    fleet: Fleet, replicas: list[EngineReplica]
) -> None:
    """Only the asker's, wherever it runs or is held; what begins alike goes on (C82)."""
    eights = {"weight_version": {"min_version": 8}}
    mine = [asyncio.ensure_future(fleet.post({**LONG, "rid": rid})) for rid in ("q", "q-2", "q~b")]
    theirs = asyncio.ensure_future(fleet.post({**LONG, "rid": "q"}, headers=EVAL))
    held = [
        asyncio.ensure_future(fleet.post({**LONG, **eights, "rid": "h"}, headers=headers))
        for headers in ({}, EVAL)
    ]
    await fleet.until(lambda: len(running(replicas)) == 4 and len(fleet.gateway.dispatcher.held) == 2)
    told = {"replicas": 2, "gateways": 0}
    for rid in ("q-", "h~", "r~rollout~q", "r~roll"):
        assert await fleet.post({"rid": rid}, "/abort_request") == (200, {"held": 0, **told})
    assert await fleet.post({"rid": "h"}, "/abort_request", headers=EVAL) == (200, {"held": 1, **told})
    assert (await held[1])[1]["error"]["type"] == "RequestAborted"
    assert await fleet.post({"rid": "q"}, "/abort_request") == (200, {"held": 0, **told})
    status, value = await mine[0]
    assert (status, value["meta_info"]["id"], value["meta_info"]["finish_reason"]["type"]) == (
        200,
        "q",
        "abort",
    )
    assert len(running(replicas)) == 3
    assert not any(call.done() for call in (*mine[1:], theirs, held[0]))
    for call in (*mine[1:], theirs, held[0]):
        call.cancel()
