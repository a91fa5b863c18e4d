"""What a replica counts, and its page behind the engine's own."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from stitch_core.ports import Unavailable
from stitch_core.replica import metering
from stitch_core.replica.asgi import Receive, Scope, Send
from stitch_core.replica.metering import Metered, ReplicaMetrics
from stitch_core.testing.asgi_client import AsgiClient
from tests.replica.following import Following
from tests.replica.scripted import Replica
from tests.test_metrics import samples
from tests.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time

ENGINE = b"# TYPE sglang_tokens counter\nsglang_tokens_total 5"


def metered(replica: Replica, app: Any = None) -> AsgiClient:
    metrics = ReplicaMetrics(replica.gate, LoopClock(), dict)
    return AsgiClient(Metered(app or replica.app, metrics, LoopClock()))


async def page(client: AsgiClient, **options: Any) -> str:
    answer = await client.get("/metrics", **options)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return answer.body.decode()


async def test_answers_are_counted_by_route_and_status(replica: Replica) -> None:
    client = metered(replica)
    await client.post("/generate", {"text": "x"})
    await client.post("/generate", {"text": "x", "weight_version": {"exact_version": 99}})
    await client.post("/no/such/route/1", {})
    await client.post("/no/such/route/2", {})
    found = samples(await page(client))
    codes = {key[1]: value for key, value in found.items() if key[0] == "stitch_replica_requests_total"}
    assert codes == {
        (("code", "200"), ("route", "/generate")): 1,
        (("code", "409"), ("route", "/generate")): 1,
        (("code", "404"), ("route", "other")): 2,
    }
    assert found[("stitch_replica_request_seconds_count", (("route", "/generate"),))] == 2
    assert found[("stitch_replica_ready", ())] == 1
    assert found[("stitch_replica_version", (("run", "r"),))] == 7
    assert found[("stitch_replica_problem_age_seconds", ())] == 0


class Engine:
    """Around a replica's app: answers /metrics as a test says."""

    def __init__(self, app: Any, kind: str, body: bytes = ENGINE, hang: bool = False) -> None:
        self.app, self.kind, self.body, self.hang = app, kind, body, hang
        self.headers: dict[bytes, bytes] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/metrics":
            await self.app(scope, receive, send)
            return
        self.headers = dict(scope["headers"])
        if self.hang:
            await asyncio.sleep(60)
        headers = [(b"Content-Type", self.kind.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


async def test_the_engines_page_comes_first_and_in_the_text_format(replica: Replica) -> None:
    engine = Engine(replica.app, "text/plain; version=0.0.4")
    client = metered(replica, engine)
    found = samples(
        await page(client, headers={"accept": "application/openmetrics-text", "accept-encoding": "gzip"})
    )
    assert found[("sglang_tokens_total", ())] == 5
    assert found[("stitch_replica_ready", ())] == 1
    assert not {b"accept", b"accept-encoding"} & set(engine.headers)


@pytest.mark.parametrize("hang", [False, True])
async def test_an_engine_without_a_page_does_not_hide_ours(
    replica: Replica, hang: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metering, "ENGINE_SECONDS", 0.02)
    engine = Engine(replica.app, "application/json", b"{}", hang)
    client = metered(replica, engine)
    assert samples(await page(client))[("stitch_replica_ready", ())] == 1


async def test_a_client_that_left_is_a_499(replica: Replica) -> None:
    async def stalls(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    metrics = ReplicaMetrics(replica.gate, LoopClock(), dict)
    await AsgiClient(Metered(stalls, metrics, LoopClock())).post("/generate", {})
    assert 'route="/generate",code="499"' in metrics.registry.render()


async def test_activations_and_failed_passes_are_counted(tmp_path: Path) -> None:
    f = Following(tmp_path)
    await f.publish()
    metrics = ReplicaMetrics(f.gate, LoopClock(), f.reconciler.status)
    metrics.follow(f.reconciler)
    f.store.fail = lambda *_: Unavailable("away")
    running = asyncio.ensure_future(f.reconciler.run())
    try:
        await f.until(lambda: f.reconciler.failed_passes > 0)
        assert samples(metrics.registry.render())[("stitch_replica_problem_age_seconds", ())] > 0
        f.store.fail = lambda *_: None
        f.reconciler.wake()
        await f.serves(f.versions[1])
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    found = samples(metrics.registry.render())
    assert found[("stitch_replica_failed_passes_total", ())] >= 1
    assert found[("stitch_replica_activations_total", ())] >= 1
    assert found[("stitch_replica_fetched_bytes_total", ())] > 0
    assert found[("stitch_replica_version", (("run", "r"),))] == 1
    assert found[("stitch_replica_target_version", (("run", "r"),))] == 1
    phases = {
        dict(labels)["phase"] for name, labels in found if name == "stitch_replica_activation_seconds_sum"
    }
    assert phases == {"fetch", "stage", "drain", "pause"}


async def test_a_probes_outcomes_are_counted_and_the_last_difference_shown(tmp_path: Path) -> None:
    f = Following(tmp_path, probes=True)
    metrics = ReplicaMetrics(f.gate, LoopClock(), f.reconciler.status)
    client = AsgiClient(Metered(Replica().app, metrics, LoopClock()))
    assert "stitch_replica_probes_total{" not in await page(client)
    await f.publish()
    await f.catch_up()
    await f.until(lambda: f.reconciler.status()["probe"]["last"]["outcome"] == "kept")
    f.engine.noise = lambda: 0.01
    await f.bring_back(f.versions[1])
    await f.catch_up()
    found = samples(await page(client))
    counts = {key[1]: value for key, value in found.items() if key[0] == "stitch_replica_probes_total"}
    assert counts == {(("outcome", "kept"),): 2, (("outcome", "same"),): 1}
    assert 0 < found[("stitch_replica_probe_difference_ratio", ())] < 1
