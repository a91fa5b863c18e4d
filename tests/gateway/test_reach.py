"""What gateways tell replicas and each other: that a request waits, and what was aborted."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stitch_gateway.pools import StaticPool
from tests.gateway.fleet import Fleet
from tests.gateway.trainer import EngineReplica, RunStore, Trainer, boot_checkpoint

PROMPT = {"text": "hi"}
LONG = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1_000_000}}


def waiting(demands: dict[str, Any], fleet: Fleet, **fields: Any) -> "asyncio.Future[Any]":
    return asyncio.ensure_future(fleet.post({**PROMPT, **fields, "weight_version": demands}))


@pytest.mark.parametrize("demands", [{"run": "new"}, {"min_version": 8}, {"exact_version": 9}])
async def test_C36_a_request_that_waits_wakes_the_replicas(fleet: Fleet, demands: dict[str, Any]) -> None:
    servers = [fleet.add(7), fleet.add(7)]
    await fleet.start(hold=0.3)
    calls = [waiting(demands, fleet) for _ in range(10)]
    await fleet.until(lambda: all(server.replica.wakes for server in servers))
    assert {status for status, _ in await asyncio.gather(*calls)} == {409}
    assert [server.replica.wakes for server in servers] == [1, 1]  # not once for each request


async def test_who_cannot_get_there_is_not_woken(fleet: Fleet) -> None:
    ahead, behind = fleet.add(9), fleet.add(7)
    await fleet.start(hold=0.2)
    await waiting({"exact_version": 8}, fleet)
    assert (ahead.replica.wakes, behind.replica.wakes) == (0, 1)


async def two_gateways(fleet: Fleet, second: Fleet, **settings: Any) -> None:
    """The second one knows the first, and the first both: itself as well, as a headless service tells it."""
    peers: list[Any] = []

    class Both:
        async def replicas(self) -> Any:
            return await StaticPool([each.url for each in peers]).replicas()

        async def close(self) -> None:
            return

    await fleet.start(peers=Both(), **settings)
    await second.start(peers=Both(), **settings)
    peers += [fleet, second]


async def test_an_abort_reaches_what_another_gateway_holds(fleet: Fleet) -> None:
    fleet.add(7)
    second = Fleet()
    second.servers = fleet.servers
    await two_gateways(fleet, second)
    try:
        held = waiting({"min_version": 8}, second, rid="mine")
        other = waiting({"min_version": 8}, second, rid="mine-1")
        await second.until(lambda: len(second.gateway.dispatcher.held) == 2)
        answer = await fleet.post({"rid": "mine"}, "/abort_request")
        assert answer == (200, {"held": 0, "replicas": 1, "gateways": 2})
        assert (await held)[1]["error"]["type"] == "RequestAborted"
        assert not other.done()
        other.cancel()
    finally:
        await second.stack.aclose()


async def test_an_abort_all_reaches_what_another_gateway_holds_and_is_answered_as_an_abort(
    fleet: Fleet, tmp_path: Path
) -> None:
    replica = EngineReplica(boot_checkpoint(tmp_path / "boot"))
    replica.serves(7)
    fleet.servers.append(replica)
    store = RunStore()
    await store.publish(7)
    second = Fleet()
    second.servers = fleet.servers
    await two_gateways(fleet, second, store=store, run="r", facade=True, head_poll=0.02)
    try:
        demands = {"weight_version": {"min_version": 8}}
        held = asyncio.ensure_future(Trainer(second).rollout({**LONG, **demands}))
        running = asyncio.ensure_future(Trainer(second).rollout(LONG))
        other = asyncio.ensure_future(second.post({**LONG, **demands}, headers={"X-Stitch-Consumer": "eval"}))
        await second.until(lambda: len(second.gateway.dispatcher.held) == 2 and len(replica.ids) == 1)
        await Trainer(fleet).post("/abort_request", {"abort_all": True})
        for call in (held, running):
            assert (await asyncio.wait_for(call, 60))["meta_info"]["finish_reason"]["type"] == "abort"
        assert not other.done()
        other.cancel()
    finally:
        await second.stack.aclose()


async def test_peers_that_are_not_there_do_not_keep_an_abort(fleet: Fleet) -> None:
    class Lost:
        async def replicas(self) -> Any:
            raise OSError("no such name")

        async def close(self) -> None:
            return

    fleet.add(7).engine.body = b""
    await fleet.start(peers=Lost())
    assert await fleet.post({"rid": "x"}, "/abort_request") == (
        200,
        {"held": 0, "replicas": 1, "gateways": 0},
    )


@pytest.mark.real
async def test_a_gateway_that_is_killed_in_mid_stream(tmp_path: Path) -> None:
    """Its client gets an error and no end of a stream, and the replica gives the generation up."""
    replica = EngineReplica(boot_checkpoint(tmp_path / "boot"))
    replica.serves(7)
    command = [
        sys.executable,
        "-m",
        "stitch_core.cli",
        "gateway",
        "--json",
        "--replica",
        replica.url,
        "--port",
        "0",
    ]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, env=paths)
    try:
        assert process.stdout is not None
        url = json.loads(await asyncio.wait_for(process.stdout.readline(), 30))["url"]
        body = {**LONG, "stream": True}
        async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json=body) as answer:
            assert answer.status == 200
            await answer.content.readany()
            assert len(replica.ids) == 1
            process.send_signal(signal.SIGKILL)
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.content.read()
        async with asyncio.timeout(60):
            while replica.ids:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await replica.close()
