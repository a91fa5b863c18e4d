"""Stock slime and stock Miles, request by request, in the order that they make them: nothing stops them."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stitch_core.versions import VersionError
from stitch_gateway.app import GatewaySettings
from tests.gateway.fleet import Fleet
from tests.gateway.trainer import EngineReplica, RunStore, Trainer, boot_checkpoint

BODY = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
PULL = {"local_checkpoint_dir": "/unused", "source_dir": "/local/run/updates"}


class Run:
    """A fleet of one replica, the store, and the trainer in front of the gateway."""

    def __init__(self, fleet: Fleet, boot: Path) -> None:
        self.fleet = fleet
        self.store = RunStore()
        self.replica = EngineReplica(boot)
        fleet.servers.append(self.replica)
        self.trainer = Trainer(fleet)

    async def start(self, **settings: Any) -> None:
        await self.fleet.start(store=self.store, run="r", facade=True, head_poll=0.02, **settings)

    async def publish(self, number: int) -> None:
        """What the plugin's hook does before the framework goes on, and replicas some time later."""
        await self.store.publish(number)
        asyncio.get_running_loop().call_later(0.03, self.replica.serves, number)


@pytest.fixture
def run(fleet: Fleet, tmp_path: Path) -> Run:
    made = Run(fleet, boot_checkpoint(tmp_path / "boot"))
    made.replica.serves(0)
    return made


async def test_slime_delta_loop(run: Run) -> None:
    await run.store.publish(0)
    await run.start()
    ask = run.trainer
    url = run.fleet.url
    host, port = url.removeprefix("http://").split(":")

    info = await ask.get("/server_info")
    assert (info["host"], info["port"]) == (host, int(port))
    assert (info["tp_size"], info["pp_size"], info["enable_memory_saver"]) == (1, 1, False)
    assert info["weight_version"] == "0"
    await ask.get("/server_info")
    await ask.post("/workers", {"url": url, "worker_type": "regular"})
    assert (await ask.post("/pull_weights", {**PULL, "target_version": 0}))["success"] is True

    for number in (1, 2, 3):
        answers = await asyncio.gather(*(ask.rollout(BODY) for _ in range(4)))
        assert {answer["meta_info"]["weight_version"] for answer in answers} == {str(number - 1)}
        assert await ask.abort_until_idle() == 1
        await run.publish(number)
        assert (await ask.post("/pull_weights", {**PULL, "target_version": number}))["success"] is True
        await ask.post("/pause_generation")
        assert isinstance(await ask.get("/flush_cache"), str)
        loaded = await ask.post(
            "/update_weights_from_disk", {"model_path": "/unused", "weight_version": str(number)}
        )
        assert loaded["success"] is True
        await ask.post("/continue_generation")
        assert await ask.get("/get_weight_version") == {"run": "r", "weight_version": str(number)}
        assert (await ask.get("/health_generate"))["status"] == "ok"
    assert ask.tries == [1] * 12
    assert run.replica.wakes > 0


async def test_slime_full_loop(run: Run) -> None:
    """The initial weights are published first, as version 1, and nothing need be pulled."""
    await run.store.publish(0)
    await run.start()
    ask = run.trainer
    await ask.get("/server_info")
    await ask.post("/workers", {"url": run.fleet.url, "worker_type": "regular"})
    for number in (1, 2):
        await run.publish(number)
        await ask.post("/pause_generation")
        await ask.get("/flush_cache")
        body = {"model_path": f"/local/weight_v{number:06d}", "weight_version": str(number)}
        assert (await ask.post("/update_weights_from_disk", body))["success"] is True
        assert (await ask.get("/get_weight_version"))["weight_version"] == str(number)
        await ask.post("/continue_generation")
        assert (await ask.rollout(BODY))["meta_info"]["weight_version"] == str(number)
        assert await ask.abort_until_idle() == 1


async def test_miles_loop(run: Run) -> None:
    await run.start(engine={"base_gpu_id": 4, "tp_size": 2, "model_path": "/models/m"})
    ask = run.trainer
    # Before any claim and any replica that serves: Miles waits for both of these without an end.
    await ask.get("/health_generate")
    await ask.get("/flush_cache")
    info = await ask.get("/get_server_info")
    host, port = run.fleet.url.removeprefix("http://").split(":")
    compared = {
        "host": host, "port": int(port), "nnodes": 1, "node_rank": 0, "gpu_id_step": 1, "base_gpu_id": 4,
        "tp_size": 2, "dp_size": 1, "pp_size": 1, "ep_size": 1, "enable_memory_saver": False,
    }  # fmt: skip
    assert {key: info[key] for key in compared} == compared
    await run.store.publish(0)
    results = [await ask.post("/pull_weights", {**PULL, "target_version": 0})]
    for number in (1, 2):
        answer = await ask.rollout(BODY)
        assert answer["meta_info"]["weight_version"].isdigit()
        assert (await ask.get("/list_workers"))["urls"] == [run.fleet.url]
        await ask.post("/abort_request", {"abort_all": True})
        await run.publish(number)
        results.append(await ask.post("/pull_weights", {**PULL, "target_version": number}))
        await ask.post("/pause_generation", {"mode": "in_place"})
        results.append(
            await ask.post(
                "/update_weights_from_disk", {"model_path": "/unused", "weight_version": str(number)}
            )
        )
        await ask.post("/begin_weight_update", {"selector": "all"})
        results.append(
            await ask.post(
                "/update_weight_version", {"new_version": str(number), "abort_all_requests": False}
            )
        )
        await ask.post("/end_weight_update")
        await ask.post("/continue_generation")
        info = await ask.get("/model_info")
        assert (info["model_path"], info["weight_version"]) == ("/models/m", str(number))
    assert all(result["success"] is True for result in results)
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        assert (await ask.post(path, {"tags": None}))["success"] is True


async def test_no_request_of_the_trainer_reaches_an_engine(run: Run) -> None:
    await run.store.publish(3)
    await run.start()
    calls: list[str] = []
    for route in list(run.replica.app._app.routes):  # type: ignore[attr-defined]

        async def note(value: dict[str, Any], route: str = route) -> tuple[int, Any]:
            calls.append(route)
            return 200, {}

        run.replica.app._app.routes[route] = note  # type: ignore[attr-defined]
    for path, body in (
        ("/pause_generation", {}),
        ("/flush_cache", {}),
        ("/update_weights_from_disk", {"model_path": "/m", "weight_version": "3"}),
        ("/pull_weights", {**PULL, "target_version": 3}),
        ("/continue_generation", {}),
    ):
        await run.trainer.post(path, body)
    await run.trainer.get("/server_info")
    assert calls == []


async def test_an_update_waits_for_the_head_and_then_says_what_is_missing(run: Run) -> None:
    await run.start(hold=0.15)
    status, value = await run.fleet.post({**PULL, "target_version": 0}, "/pull_weights")
    assert (status, value["error"]["type"]) == (409, "WeightVersionNotReady")
    assert "claimed" in value["error"]["message"]
    await run.store.publish(4)
    asyncio.get_running_loop().call_later(0.03, lambda: asyncio.ensure_future(run.store.publish(5)))
    assert (await run.fleet.post({**PULL, "target_version": 5}, "/pull_weights"))[0] == 200
    assert (await run.fleet.post({**PULL, "target_version": 2}, "/pull_weights"))[0] == 200
    for path, body in (
        ("/pull_weights", {**PULL, "target_version": 6}),
        ("/update_weights_from_disk", {"model_path": "/m", "weight_version": "000006"}),
        ("/update_weight_version", {"new_version": "6"}),
    ):
        status, value = await run.fleet.post(body, path)
        assert (status, value["error"]["applied"], value["error"]["target_version"]) == (409, 5, 6)


async def test_C13_a_version_that_cannot_be_read_is_never_success(run: Run) -> None:
    await run.store.publish(9)
    await run.start()
    for target in (None, -1, "v7", True, 1.5, [7], "", "7 ", 10**18, 2**63, "7" * 5000):
        assert (await run.fleet.post({**PULL, "target_version": target}, "/pull_weights"))[0] == 400


async def test_weights_that_would_reach_nobody_are_refused(run: Run) -> None:
    await run.start()
    for path in ("/update_weights_from_distributed", "/update_weights_from_tensor", "/weights_checker"):
        status, value = await run.fleet.post({}, path)
        assert (status, value["error"]["type"]) == (403, "RouteBlocked")
        assert "disk" in value["error"]["message"]
    status, value = await run.fleet.post(
        {"url": "http://10.0.0.7:15000", "worker_type": "regular"}, "/workers"
    )
    assert (status, value["error"]["type"]) == (403, "RouteBlocked")


async def test_the_gateway_is_known_by_every_name_that_it_was_called_by(run: Run) -> None:
    await run.start()
    named = {"Host": "gateway.example:30000"}
    async with run.fleet.session.get(run.fleet.url + "/server_info", headers=named) as answer:
        info = await answer.json()
    assert (info["host"], info["port"]) == ("gateway.example", 30000)
    assert (await run.fleet.post({}, "/add_worker?url=http://gateway.example:30000"))[0] == 200


async def test_without_a_store_the_trainers_word_is_taken(fleet: Fleet, run: Run) -> None:
    await fleet.start(run="r", facade=True)
    assert (await fleet.post({**PULL, "target_version": 9}, "/pull_weights"))[0] == 200
    assert (await fleet.get("/get_weight_version"))[1]["weight_version"] == "0"  # what is served


async def test_without_the_option_there_is_no_facade(fleet: Fleet, run: Run) -> None:
    await fleet.start(run="r", store=run.store)
    for path in ("/pause_generation", "/pull_weights", "/abort_request"):
        assert (await fleet.post({"abort_all": True}, path))[1]["error"]["type"] == "RouteBlocked"
    assert (await fleet.get("/workers"))[1]["error"]["type"] == "RouteUnknown"


@pytest.mark.parametrize("settings", [{"facade": True}, {"lag": 0}, {"run": "r", "consumer": "a~b"}])
def test_settings_that_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(VersionError):
        GatewaySettings(**settings)


async def test_a_lag_needs_the_store(fleet: Fleet, run: Run) -> None:
    with pytest.raises(VersionError, match="store"):
        await fleet.start(run="r", lag=1)
    fleet.session = await fleet.stack.enter_async_context(aiohttp.ClientSession())
