"""What the gateway's ``/metrics`` says of requests, replicas and versions."""

import asyncio

from stitch_core.stores.memory import MemoryStore
from tests.gateway.fleet import Fleet, RawReplica
from tests.small_run import Trainer
from tests.test_metrics import Samples, samples


async def page(fleet: Fleet) -> Samples:
    async with fleet.session.get(fleet.url + "/metrics") as answer:
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        return samples(await answer.text())


async def test_requests_and_replicas(fleet: Fleet) -> None:
    fleet.add(7)
    slow = fleet.add(8)
    await fleet.start(hold=0.05, run="r")
    assert (await fleet.post({"text": "x"}))[0] == 200
    assert (await fleet.post({"text": "x", "weight_version": {"min_version": 9}}))[0] == 409
    assert (await fleet.post({}, "/no/route/4711"))[0] == 404
    await slow.close()
    fleet.servers.remove(slow)
    await fleet.until(lambda: sum(r.alive for r in fleet.gateway.fleet.replicas) == 1)
    found = await page(fleet)
    codes = {key[1]: value for key, value in found.items() if key[0] == "stitch_gateway_requests_total"}
    assert codes == {
        (("code", "200"), ("route", "/generate")): 1,
        (("code", "409"), ("route", "/generate")): 1,
        (("code", "404"), ("route", "other")): 1,
    }
    states = {dict(key[1])["state"]: v for key, v in found.items() if key[0] == "stitch_gateway_replicas"}
    assert states == {"ready": 1, "not_ready": 0, "lost": 1}
    assert found[("stitch_gateway_served_version", (("run", "r"), ("which", "oldest")))] == 7
    assert found[("stitch_gateway_held_seconds_count", ())] == 1
    assert found[("stitch_gateway_held_requests", ())] == 0


async def test_held_requests_and_a_client_that_leaves(fleet: Fleet) -> None:
    fleet.add(7)
    await fleet.start(run="r")
    asking = asyncio.ensure_future(fleet.post({"text": "x", "weight_version": {"min_version": 9}}))
    await fleet.until(lambda: bool(fleet.gateway.dispatcher.held))
    assert (await page(fleet))[("stitch_gateway_held_requests", ())] == 1
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await fleet.until(lambda: not fleet.gateway.dispatcher.held)
    found = await page(fleet)
    assert found[("stitch_gateway_requests_total", (("code", "499"), ("route", "/generate")))] == 1


async def test_staleness_is_counted_for_each_consumer(fleet: Fleet, tmp_path_factory: object) -> None:
    store, trainer = MemoryStore(), Trainer(tmp_path_factory.mktemp("t"))  # type: ignore[attr-defined]
    await trainer.publisher(store).claim(trainer.version0)
    server = fleet.add(7)
    await fleet.start(run="r", store=store)
    head = fleet.gateway.consumers.head
    assert head is not None
    await head.known(5)
    head.number = 9
    for _ in range(2):
        await fleet.post({"text": "x"})
    server.serves(10)
    await fleet.until(lambda: str(fleet.gateway.fleet.replicas[0].serving).endswith("10"))
    await fleet.post({"text": "x"}, headers={"X-Stitch-Consumer": "eval"})
    found = await page(fleet)
    name = "stitch_gateway_staleness_versions"
    assert found[(f"{name}_sum", (("consumer", "rollout"), ("run", "r")))] == 4
    assert found[(f"{name}_count", (("consumer", "rollout"), ("run", "r")))] == 2
    assert found[(f"{name}_sum", (("consumer", "eval"), ("run", "r")))] == 0  # newer than what was read
    assert found[("stitch_gateway_head_version", (("run", "r"),))] == 9
    assert found[("stitch_gateway_head_age_seconds", (("run", "r"),))] >= 0


async def test_failed_tries_are_counted(fleet: Fleet) -> None:
    async with RawReplica(b"garbage\r\n\r\n").running() as broken:
        fleet.add(7)
        await fleet.start(broken.url, run="r", until_ready=2)
        for _ in range(6):
            assert (await fleet.post({"text": "x"}))[0] == 200
            if fleet.gateway.fleet.evictions:
                break
        found = await page(fleet)
        await fleet.stack.aclose()  # before the replica that it asks again and again
    assert found[("stitch_gateway_tries_failed_total", (("reason", "failures"),))] >= 1
    assert found[("stitch_gateway_evictions_total", ())] >= 1
