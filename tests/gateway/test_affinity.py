"""Sessions and groups stay with a replica, at every gateway alike; load and version come first."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from aiohttp import web

from tests.gateway.fleet import Fleet, RawReplica, whole

PROMPT = {"text": "hi"}


async def home(fleet: Fleet, body: dict[str, Any] | None = None, **headers: str) -> str:
    """The replica that answers."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with fleet.session.post(
        fleet.url + "/generate", json={**PROMPT, **(body or {})}, headers=named
    ) as a:
        assert a.status == 200
        return a.headers["x-stitch-replica"]


async def test_several_gateways_agree_without_talking(fleet: Fleet) -> None:
    for _ in range(4):
        fleet.add()
    second = Fleet()
    second.servers = fleet.servers[::-1]
    await fleet.start()
    await second.start()
    try:
        homes = [await home(fleet, x_stitch_session=f"s{i}") for i in range(40)]
        assert [await home(second, x_stitch_session=f"s{i}") for i in range(40)] == homes
        assert len(set(homes)) == 4
    finally:
        await second.stack.aclose()


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"X-Stitch-Session": "key-1"}, {}),
        ({"X-SMG-Routing-Key": "key-1"}, {}),
        ({"X-Stitch-Group": "key-1", "X-Stitch-Session": "any"}, {}),
        ({}, {"user": "key-1"}),
        ({}, {"session_params": {"id": "key-1"}, "user": "any"}),
    ],
)
async def test_who_names_the_same_goes_to_the_same(
    fleet: Fleet, headers: dict[str, str], body: dict[str, Any]
) -> None:
    for _ in range(8):
        fleet.add()
    await fleet.start()
    expected = await home(fleet, x_stitch_session="key-1")
    assert {await home(fleet, body, **headers) for _ in range(6)} == {expected}


async def test_what_is_no_name_is_none(fleet: Fleet) -> None:
    fleet.add(), fleet.add()
    await fleet.start()
    for body in ({"user": ""}, {"user": 5}, {"user": None}, {"session_params": "x"}, {"user": "\ud800"}):
        await home(fleet, body, x_stitch_session="")


async def test_C25_a_session_moves_off_a_replica_that_answers_503_and_back(fleet: Fleet) -> None:
    for _ in range(3):
        fleet.add()
    await fleet.start()
    first = await home(fleet, x_stitch_session="s")
    server = next(each for each in fleet.servers if each.id == first)
    server.engine.status = 503
    server.engine.body = {"detail": "queue is full"}
    after = {await home(fleet, x_stitch_session="s") for _ in range(3)}
    assert len(after) == 1
    assert after != {first}
    # Others are not starved, and go anywhere.
    assert len({await home(fleet, x_stitch_session=f"o{i}") for i in range(20)} - {first}) == 2
    server.engine.status = 200
    server.serves(7)
    await fleet.until(lambda: all(replica.ready for replica in fleet.gateway.fleet.replicas))
    await asyncio.sleep(0.3)  # a request avoids who has just refused it
    assert await home(fleet, x_stitch_session="s") == first


async def test_a_hot_session_is_spread_over_its_load_bound(fleet: Fleet) -> None:
    for _ in range(3):
        fleet.add().engine.hang.clear()
    await fleet.start()
    calls = [asyncio.ensure_future(home(fleet, x_stitch_session="hot")) for _ in range(45)]
    await fleet.until(lambda: sum(r.in_flight for r in fleet.gateway.fleet.replicas) == 45)
    for server in fleet.servers:
        server.engine.hang.set()
    taken = Counter(await asyncio.gather(*calls))
    assert len(taken) > 1
    assert max(taken.values()) <= 1.25 * 15 + 8 + 1


async def test_batches_count_as_what_they_are(fleet: Fleet) -> None:
    for _ in range(2):
        fleet.add().engine.hang.clear()
    await fleet.start(poll=30.0)
    batch = {"text": ["a", "b", "c"], "sampling_params": {"n": 4}}
    big = asyncio.ensure_future(fleet.post(batch))
    replicas = fleet.gateway.fleet.replicas
    await fleet.until(lambda: sum(r.sequences for r in replicas) == 12)
    small = [asyncio.ensure_future(fleet.post(PROMPT)) for _ in range(10)]
    await fleet.until(lambda: sum(r.in_flight for r in replicas) == 11)
    assert sorted(r.in_flight for r in replicas) == [1, 10]
    for server in fleet.servers:
        server.engine.hang.set()
    await asyncio.gather(big, *small)
    assert [r.sequences for r in replicas] == [0, 0]


class Telling:
    """A replica whose engine tells what it has in its queue."""

    def __init__(self, loads: Any, status: int = 200) -> None:
        self.loads, self.status = loads, status
        self.served = 0
        self.url = ""

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.add_routes([web.get("/ready", self._ready), web.get("/v1/loads", self._loads)])
        app.add_routes([web.post("/generate", self._generate)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def _ready(self, request: web.Request) -> web.Response:
        return web.json_response({"ready": True, "run": "r", "weight_version": "7", "active_requests": 2})

    async def _loads(self, request: web.Request) -> web.Response:
        return web.json_response(self.loads, status=self.status)

    async def _generate(self, request: web.Request) -> web.Response:
        self.served += 1
        headers = {"x-stitch-run": "r", "x-stitch-admitted-version": "7"}
        return web.json_response({"meta_info": {}}, headers=headers)


def load(running: int, waiting: int) -> dict[str, int]:
    return {"num_running_reqs": running, "num_waiting_reqs": waiting}


async def test_the_engines_queue_decides(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stitch_gateway.fleet.LOADS_EVERY", 0.02)
    replicas = [
        Telling({"loads": [load(3, 90), load(2, 5)]}),
        Telling({"loads": [load(1, 0)]}),
        Telling({"loads": [load(4, 0)]}),
    ]
    runners = [await replica.start() for replica in replicas]
    try:
        await fleet.start(*(replica.url for replica in replicas), until_ready=3)
        await fleet.until(lambda: [r.others for r in fleet.gateway.fleet.replicas] == [100, 1, 4])
        for _ in range(5):
            await fleet.post(PROMPT)
        assert [replica.served for replica in replicas] == [0, 5, 0]
    finally:
        for runner in runners:
            await runner.cleanup()


@pytest.mark.parametrize("loads", [{}, [], {"loads": 5}, {"loads": [{}]}, {"loads": [load("x", None)]}])  # type: ignore[arg-type]
async def test_an_engine_that_does_not_tell_is_counted_by_its_gate(fleet: Fleet, loads: Any) -> None:
    replica = Telling(loads)
    runner = await replica.start()
    try:
        await fleet.start(replica.url, until_ready=1)
        await asyncio.sleep(0.05)
        assert [r.others for r in fleet.gateway.fleet.replicas] == [2]
    finally:
        await runner.cleanup()


async def test_a_request_with_state_in_the_engine_is_not_sent_twice(fleet: Fleet) -> None:
    async with RawReplica(b"", whole(b'{"text": "x"}')).running() as dying:
        await fleet.start(dying.url, until_ready=1)
        body = {**PROMPT, "session_params": {"id": "s"}}
        status, value = await fleet.post(body)
        assert (status, value["error"]["type"], value["error"]["retry"]) == (
            503,
            "EngineUnavailable",
            "never",
        )
        assert dying.requests == 1
        await fleet.until(lambda: all(r.ready for r in fleet.gateway.fleet.replicas))
        assert (await fleet.post(body))[0] == 200
    fleet.add()
    other = Fleet()
    other.servers = fleet.servers
    try:
        # One that never got a connection was not sent at all.
        await other.start("http://127.0.0.1:1", until_ready=1)
        for replica in other.gateway.fleet.replicas:
            replica.ready, replica.serving = True, replica.serving or other.gateway.fleet.replicas[0].serving
        for _ in range(4):
            assert (await other.post(body))[0] == 200
    finally:
        await other.stack.aclose()


async def test_one_late_probe_is_no_loss(fleet: Fleet) -> None:
    """An engine under load answers late; only one that stays silent is out of rotation."""
    server = fleet.add()
    await fleet.start(probe_timeout=0.2)
    replica = fleet.gateway.fleet.replicas[0]
    silent = asyncio.Event()
    seen: set[tuple[int, bool]] = set()
    app = server.replica.app

    async def late(scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") == "/ready" and silent.is_set():
            seen.add((replica.late, replica.ready))
            await receive()
            await receive()  # until the gateway has given up
        await handler(scope, receive, send)

    handler, app._http = app._http, late
    silent.set()
    await fleet.until(lambda: not replica.ready)
    assert (1, True) in seen
    assert (1, False) not in seen
    silent.clear()
    await fleet.until(lambda: replica.ready)
