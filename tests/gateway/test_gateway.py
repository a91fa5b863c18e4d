"""Promises 3 and 5 at the front door: requests find a replica, and losing one is not the client's error."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.gateway.fleet import Fleet, RawReplica, chunked, whole
from tests.replica.scripted import generated, span

PROMPT = {"text": "hi"}
EVENT = b'data: {"text": "x", "meta_info": {"finish_reason": null}}\n\n'
FINAL = b"data: " + json.dumps(generated(span(7, 0, 2))).encode() + b"\n\ndata: [DONE]\n\n"


async def test_answer_comes_through(fleet: Fleet) -> None:
    server = fleet.add()
    await fleet.start()
    async with fleet.session.post(fleet.url + "/generate", json={**PROMPT, "rid": "mine"}) as answer:
        value = await answer.json()
        assert value["meta_info"]["weight_version_start"] == 7
        assert answer.headers["x-stitch-admitted-version"] == "7"
        assert answer.headers["x-stitch-run"] == "r"
        assert answer.headers["x-stitch-replica"] == server.id
    assert server.engine.seen["rid"] == "~rollout~mine~"
    assert "weight_version" not in server.engine.seen


async def test_version_picks_the_replica(fleet: Fleet) -> None:
    old, new = fleet.add(7), fleet.add(8)
    await fleet.start()
    for demands, server in (
        ({"exact_version": 7}, old),
        ({"exact_version": 8}, new),
        ({"min_version": 8}, new),
    ):
        async with fleet.session.post(
            fleet.url + "/generate", json={**PROMPT, "weight_version": demands}
        ) as a:
            assert a.headers["x-stitch-replica"] == server.id
    headers = {"X-Stitch-Exact-Version": "7"}
    async with fleet.session.post(fleet.url + "/generate", json=PROMPT, headers=headers) as answer:
        assert answer.headers["x-stitch-replica"] == old.id


async def test_C12_run_picks_the_replica(fleet: Fleet) -> None:
    fleet.add(9, "a")
    other = fleet.add(1, "b")
    await fleet.start(run="b")
    for body in (PROMPT, {**PROMPT, "weight_version": {"min_version": 1}}):
        async with fleet.session.post(fleet.url + "/generate", json=body) as answer:
            assert answer.headers["x-stitch-replica"] == other.id
    status, value = await fleet.post({**PROMPT, "weight_version": {"run": "a"}})
    assert (status, value["meta_info"]["run"]) == (200, "a")


@pytest.mark.parametrize(
    "field",
    [5, "7", [], {"min_version": "abc"}, {"min_version": -1}, {"x": 1}, {"min_version": 2**63},
     {"exact_version": 10**4000}, {"exact_version": True}, {"min_version": "7" * 5000}],
)  # fmt: skip
async def test_C13_malformed_constraint_is_answered_here(fleet: Fleet, field: Any) -> None:
    server = fleet.add()
    await fleet.start()
    status, value = await fleet.post({**PROMPT, "weight_version": field})
    assert (status, value["error"]["type"]) == (400, "InvalidRequest")
    assert server.engine.path == ""


@pytest.mark.parametrize("text", [str(2**63), "7" * 5000, "-1", "7.0"])
@pytest.mark.parametrize("name", ["X-Stitch-Min-Version", "X-Stitch-Exact-Version"])
async def test_C13_malformed_headers_are_answered_here(fleet: Fleet, name: str, text: str) -> None:
    server = fleet.add()
    await fleet.start()
    status, value = await fleet.post(PROMPT, headers={name: text})
    assert (status, value["error"]["type"]) == (400, "InvalidRequest")
    assert name.lower() in value["error"]["message"]
    assert len(value["error"]["message"]) < 400
    assert server.engine.path == ""


async def test_a_number_of_more_digits_than_are_read_is_400(fleet: Fleet) -> None:
    fleet.add()
    await fleet.start()
    data = b'{"text": "hi", "weight_version": {"min_version": %s}}' % (b"7" * 5000)
    async with fleet.session.post(fleet.url + "/generate", data=data) as answer:
        assert answer.status == 400
        assert "digits" in (await answer.json())["error"]["message"]


async def test_unreadable_bodies(fleet: Fleet) -> None:
    fleet.add()
    await fleet.start(max_body=100)
    for data, expected in ((b"{", 400), (b"[]", 400), (b"x" * 200, 413)):
        async with fleet.session.post(fleet.url + "/generate", data=data) as answer:
            assert answer.status == expected
            assert (await answer.json())["error"]["retryable"] is False


async def test_a_body_that_does_not_decode(fleet: Fleet) -> None:
    fleet.add()
    await fleet.start()
    headers = {"content-encoding": "gzip"}
    for path in ("/generate", "/abort_request"):
        async with fleet.session.post(fleet.url + path, data=b"no gzip", headers=headers) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["type"] == "InvalidRequest"


async def test_load_is_spread(fleet: Fleet) -> None:
    servers = [fleet.add() for _ in range(3)]
    for server in servers:
        server.engine.hang.clear()
    await fleet.start()
    calls = [asyncio.ensure_future(fleet.post(PROMPT)) for _ in range(9)]
    await fleet.until(lambda: all(s.replica.gate.active == 3 for s in servers))
    for server in servers:
        server.engine.hang.set()
    assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 9
    assert all(replica.in_flight == 0 for replica in fleet.gateway.fleet.replicas)


# ---------------------------------------------------------------------------------------------- holding


async def test_C28_request_is_held_until_its_version_is_served(fleet: Fleet) -> None:
    server = fleet.add(7)
    await fleet.start()
    held = asyncio.ensure_future(fleet.post({**PROMPT, "weight_version": {"min_version": 8}}))
    await fleet.until(lambda: len(fleet.gateway.dispatcher.held) == 1)
    server.serves(8)
    status, value = await held
    assert (status, value["meta_info"]["weight_version"]) == (200, "8")


async def test_C28_the_first_replica_of_a_version_does_not_get_all_that_waited(fleet: Fleet) -> None:
    servers = [fleet.add(7) for _ in range(4)]
    for server in servers:
        server.engine.hang.clear()
    await fleet.start()
    body = {**PROMPT, "weight_version": {"min_version": 8}}
    held = [asyncio.ensure_future(fleet.post(body)) for _ in range(60)]
    await fleet.until(lambda: len(fleet.gateway.dispatcher.held) == 60)
    servers[0].serves(8)
    await fleet.until(lambda: servers[0].replica.gate.active > 20)
    await asyncio.sleep(0.1)
    assert servers[0].replica.gate.active <= 1.25 * 15 + 8 + 1
    for server in servers[1:]:
        server.serves(8)
    await fleet.until(lambda: not fleet.gateway.dispatcher.held)
    assert max(server.replica.gate.active for server in servers) <= 1.25 * 15 + 8 + 1
    for server in servers:
        server.engine.hang.set()
    assert {status for status, _ in await asyncio.gather(*held)} == {200}


async def test_C28_but_it_gets_them_if_no_other_comes(fleet: Fleet) -> None:
    first, _ = fleet.add(7), fleet.add(7)
    first.engine.hang.clear()
    await fleet.start()
    fleet.gateway.dispatcher.spread = 0.2
    body = {**PROMPT, "weight_version": {"min_version": 8}}
    held = [asyncio.ensure_future(fleet.post(body)) for _ in range(60)]
    await fleet.until(lambda: len(fleet.gateway.dispatcher.held) == 60)
    first.serves(8)
    await fleet.until(lambda: first.replica.gate.active == 60)
    first.engine.hang.set()
    assert {status for status, _ in await asyncio.gather(*held)} == {200}


async def test_C25_hold_ends_with_a_409_and_evicts_nobody(fleet: Fleet) -> None:
    fleet.add(7)
    await fleet.start(hold=0.1)
    status, value = await fleet.post({**PROMPT, "weight_version": {"min_version": 8}})
    assert (status, value["error"]["type"], value["error"]["retry"]) == (409, "WeightVersionNotReady", "here")
    assert fleet.gateway.fleet.evictions == 0
    assert (await fleet.post(PROMPT))[0] == 200


async def test_C25_409_of_a_replica_moves_the_request_and_evicts_nobody(fleet: Fleet) -> None:
    ahead, right = fleet.add(7), fleet.add(7)
    await fleet.start(poll=30.0)  # what the gateway believes stays old
    ahead.serves(9)
    for _ in range(8):
        async with fleet.session.post(
            fleet.url + "/generate", json={**PROMPT, "weight_version": {"exact_version": 7}}
        ) as answer:
            assert answer.headers["x-stitch-replica"] == right.id
    assert fleet.gateway.fleet.evictions == 0
    assert fleet.gateway.dispatcher.counters["refusals"] <= 1  # the first 409 said what it serves
    assert all(replica.ready for replica in fleet.gateway.fleet.replicas)


async def test_C19_replica_that_is_not_ready_gets_nothing(fleet: Fleet) -> None:
    joiner, ready = fleet.add(7), fleet.add(7)
    joiner.replica.gate.close("catching up")
    await fleet.start(until_ready=1)
    for _ in range(6):
        assert (await fleet.post(PROMPT))[0] == 200
    assert joiner.engine.path == ""
    ready.replica.gate.close("pausing")
    joiner.serves(7)
    await fleet.until(lambda: [r.ready for r in fleet.gateway.fleet.replicas] == [True, False])
    assert (await fleet.post(PROMPT))[0] == 200
    assert joiner.engine.path == "/generate"


async def test_exact_version_that_all_have_passed_is_gone(fleet: Fleet) -> None:
    fleet.add(7), fleet.add(8)
    await fleet.start(hold=0.1)
    status, value = await fleet.post({**PROMPT, "weight_version": {"exact_version": 6}})
    assert (status, value["error"]["type"], value["error"]["retryable"]) == (410, "WeightVersionGone", False)
    for demands in ({"exact_version": 9}, {"exact_version": 6, "run": "s"}):
        assert (await fleet.post({**PROMPT, "weight_version": demands}))[0] == 409


async def test_no_live_replica_is_503(fleet: Fleet) -> None:
    await fleet.start("http://127.0.0.1:1", hold=0.1, until_ready=0)
    for body in (PROMPT, {**PROMPT, "weight_version": {"min_version": 1}}):
        status, value = await fleet.post(body)
        assert (status, value["error"]["type"]) == (503, "EngineUnavailable")
        assert "127.0.0.1:1" in value["error"]["message"]


async def test_held_request_is_aborted(fleet: Fleet) -> None:
    fleet.add(7)
    await fleet.start()
    held = asyncio.ensure_future(fleet.post({**PROMPT, "rid": "x-1", "weight_version": {"min_version": 8}}))
    await fleet.until(lambda: len(fleet.gateway.dispatcher.held) == 1)
    for body in ({}, {"rid": ""}, {"rid": "x", "abort_all": True}):
        assert (await fleet.post(body, "/abort_request"))[0] == 403
    for rid, count in (("x-", 0), ("x", 0), ("x-1", 1)):
        answer = await fleet.post({"rid": rid}, "/abort_request")
        assert answer == (200, {"held": count, "replicas": 1, "gateways": 0})
    assert (await held)[1]["error"]["type"] == "RequestAborted"


async def test_client_that_leaves_is_no_longer_held(fleet: Fleet) -> None:
    fleet.add(7)
    await fleet.start()
    with pytest.raises(TimeoutError):
        await fleet.post(
            {**PROMPT, "weight_version": {"min_version": 8}}, timeout=aiohttp.ClientTimeout(total=0.1)
        )
    await fleet.until(lambda: not fleet.gateway.dispatcher.held)


# --------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        whole(b'{"text": "x"}')[:-3],
        chunked(),
        chunked(b": wait"),
        whole(b'{"error": {"type": "EngineUnavailable", "retry": "elsewhere"}}', b"503 Service Unavailable"),
        whole(b"Service Unavailable", b"503 Service Unavailable", b"text/html"),
        whole(b'{"text": "x"}').replace(b"version: 7", b"version: 6"),
        whole(b'{"text": "x"}').replace(b"x-stitch-run", b"x-other"),
    ],
    ids=[
        "closed",
        "half a head",
        "short body",
        "no event",
        "half an event",
        "503",
        "bare 503",
        "old",
        "unlabelled",
    ],
)
async def test_replica_lost_before_the_first_byte_costs_no_error(fleet: Fleet, answer: bytes) -> None:
    async with RawReplica(answer).running() as broken:
        fleet.add()
        await fleet.start(broken.url, until_ready=2, poll=30.0)
        for _ in range(12):
            status, _ = await fleet.post({**PROMPT, "weight_version": {"min_version": 7}})
            assert status == 200
        assert broken.requests == 1  # evicted at once
        assert fleet.gateway.fleet.evictions == 1


async def test_evicted_replica_comes_back_by_a_probe(fleet: Fleet) -> None:
    error = whole(b"{}", b"503 Service Unavailable")
    async with RawReplica(error, whole(b'{"text": "x"}')).running() as flaky:
        await fleet.start(flaky.url, until_ready=1)
        assert (await fleet.post(PROMPT))[0] == 200
        assert flaky.requests == 2


async def test_attempts_are_bounded(fleet: Fleet) -> None:
    async with RawReplica(b"").running() as broken:
        await fleet.start(broken.url, until_ready=1, attempts=2)
        status, value = await fleet.post(PROMPT)
        assert (status, value["error"]["type"]) == (503, "EngineUnavailable")
        assert broken.requests == 2


@pytest.mark.parametrize("status", [b"400 Bad Request", b"500 Internal Server Error", b"502 Bad Gateway"])
async def test_other_errors_of_a_replica_are_the_clients_to_see(fleet: Fleet, status: bytes) -> None:
    async with RawReplica(whole(b"oops", status, b"text/plain")).running() as replica:
        await fleet.start(replica.url, until_ready=1)
        async with fleet.session.post(fleet.url + "/generate", json=PROMPT) as answer:
            assert (answer.status, await answer.read()) == (int(status[:3]), b"oops")


async def test_answer_that_is_too_large(fleet: Fleet) -> None:
    async with RawReplica(whole(b"x" * 2000)).running() as replica:
        await fleet.start(replica.url, until_ready=1, max_response=1000)
        assert (await fleet.post(PROMPT))[1]["error"]["type"] == "ResponseTooLarge"


# ---------------------------------------------------------------------------------------------- streams


async def test_stream_is_passed_on_as_it_comes(fleet: Fleet) -> None:
    server = fleet.add()
    server.engine.pieces = [EVENT, EVENT[:9], EVENT[9:] + FINAL[:20]]
    server.engine.hang.clear()
    await fleet.start()
    async with fleet.session.post(fleet.url + "/generate", json={**PROMPT, "stream": True}) as answer:
        assert answer.content_type == "text/event-stream"
        assert answer.headers["x-stitch-admitted-version"] == "7"
        got = b""
        while got.count(b"\n\n") < 2:
            got += await answer.content.readany()
        server.engine.hang.set()
        async for data in answer.content.iter_any():
            got += data
    assert b"VersionUnreported" in got  # the engine's stream had no final event


async def test_whole_stream(fleet: Fleet) -> None:
    server = fleet.add()
    server.engine.pieces = [EVENT, FINAL]
    await fleet.start()
    async with fleet.session.post(fleet.url + "/generate", json={**PROMPT, "stream": True}) as answer:
        events = (await answer.read()).decode().split("\n\n")
    assert json.loads(events[1].removeprefix("data: "))["meta_info"]["weight_version"] == "7"
    assert events[2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("tail", [b"", b'data: {"text": "ha'])
async def test_replica_lost_in_mid_stream_is_an_error_event(fleet: Fleet, tail: bytes) -> None:
    async with RawReplica(chunked(EVENT, *([tail] if tail else []))).running() as dying:
        await fleet.start(dying.url, until_ready=1, poll=30.0)
        async with fleet.session.post(fleet.url + "/generate", json={**PROMPT, "stream": True}) as answer:
            body = await answer.read()
        assert body.startswith(EVENT)
        error = json.loads(body[len(EVENT) :].decode().removeprefix("data: "))["error"]
        assert (error["type"], error["retryable"]) == ("EngineUnavailable", True)
        assert fleet.gateway.fleet.evictions == 1
        assert dying.requests == 1


async def test_C20_client_that_leaves_cancels_the_request_at_the_replica(fleet: Fleet) -> None:
    server = fleet.add()
    server.engine.pieces = [EVENT]
    server.engine.hang.clear()
    await fleet.start()
    async with fleet.session.post(fleet.url + "/generate", json={**PROMPT, "stream": True}) as answer:
        await answer.content.readany()
        answer.close()
    await fleet.until(lambda: server.replica.gate.active == 0)
    assert server.engine.disconnected
    server.engine.pieces = None
    server.engine.disconnected = False
    with pytest.raises(TimeoutError):
        await fleet.post(PROMPT, timeout=aiohttp.ClientTimeout(total=0.1))
    await fleet.until(lambda: server.replica.gate.active == 0)
    assert server.engine.disconnected
    assert all(replica.in_flight == 0 for replica in fleet.gateway.fleet.replicas)
    assert fleet.gateway.fleet.evictions == 0


# ------------------------------------------------------------------------------------------ other routes


async def test_information(fleet: Fleet) -> None:
    server = fleet.add(7)
    fleet.add(8)
    await fleet.start("http://127.0.0.1:1", until_ready=2)
    assert (await fleet.get("/health"))[0] == 200
    assert await fleet.get("/ready") == (200, {"ready": True, "replicas": 2, "leaving": False})
    status = (await fleet.get("/status"))[1]
    assert status["versions"] == {"r/weight_v000007": 1, "r/weight_v000008": 1}
    assert [r["alive"] for r in status["replicas"]] == [True, True, False]
    assert (status["in_flight"], status["held"]) == (0, 0)
    server.engine.body = {"model_path": "/m"}
    fleet.servers[1].engine.body = {"model_path": "/m"}
    assert (await fleet.get("/model_info"))[1]["model_path"] == "/m"
    assert await fleet.post({}, "/wake") == (202, {"replicas": 2})
    assert server.replica.wakes == 1


async def test_without_replicas(fleet: Fleet) -> None:
    await fleet.start("http://127.0.0.1:1", until_ready=0)
    assert (await fleet.get("/health"))[0] == 200
    assert (await fleet.get("/ready"))[0] == 503
    assert (await fleet.get("/v1/models"))[1]["error"]["type"] == "EngineUnavailable"


async def test_routes_that_are_not_served(fleet: Fleet) -> None:
    server = fleet.add()
    await fleet.start()
    for method, path, expected in (
        ("POST", "/flush_cache", "RouteBlocked"), ("POST", "/update_weights_from_disk", "RouteBlocked"),
        ("GET", "/nothing", "RouteUnknown"), ("GET", "/generate", "MethodNotAllowed"),
    ):  # fmt: skip
        async with fleet.session.request(method, fleet.url + path) as answer:
            assert (await answer.json())["error"]["type"] == expected
    assert server.engine.path == ""
