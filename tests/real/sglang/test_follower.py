"""A stock SGLang server that follows a store, in place, from disk: versions, routes, faults, SIGTERM.

With overlap scheduling, which is SGLang's default, on a run and a host that it did not begin.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stitch_core.replica import sse

from . import joining
from .world import RUN, World, faults, small_disk

pytestmark = pytest.mark.real

PROMPT = [40, 41, 42, 43, 44, 45, 46, 47]
CHAT = {"messages": [{"role": "user", "content": "what is 2+2?"}], "model": "policy"}
COMPLETION = {"prompt": "what is 2+2?", "model": "policy"}

# In this order: the first asks while the server starts.
test_c22_no_boot_weights_under_another_label = joining.no_boot_weights_under_another_label
test_a_demand_that_is_not_met_yet_is_told_to_wait = joining.a_demand_is_told_to_wait
test_c21_an_exact_pin_holds_up_to_the_deadline = joining.an_exact_pin_holds_up_to_the_deadline
test_spans_are_exact_with_overlap_scheduling = joining.spans_are_exact


@pytest.fixture(scope="module")
def starting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = asyncio.run(joining.under_way(tmp_path_factory.mktemp("world"), left=len(joining.SEEDS)))
    try:
        (world.scratch / "memory").touch()
        world.start((), faults(world.scratch), kv_mode="in_place", pin_drain=joining.PIN_DRAIN)
        yield world
    finally:
        world.close()


@pytest.fixture(scope="module")
def world(starting: World) -> World:
    asyncio.run(starting.server.until_ready())
    return starting


async def events(world: World, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of a stream's events, without the last, [DONE]."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(world.server.url + path, json={**body, "stream": True}) as response,
    ):
        assert response.status == 200, await response.text()
        assert response.headers["x-stitch-replica"] == "replica"
        found = [sse.data_of(event) for event in sse.Splitter().feed(await response.read())]
    assert found[-1] == "[DONE]"
    return [json.loads(data) for data in found[:-1] if data]


def whole(report: dict[str, Any], version: int, tokens: int) -> None:
    """The report of ``tokens`` tokens that all are of ``version``."""
    assert report["run"] == RUN
    assert (report["weight_version_start"], report["weight_version_end"]) == (version, version)
    assert report["weight_version"] == str(version)
    assert report["weight_versions"] == [{"version": version, "start": 0, "end": tokens}]
    assert report["kv"] == "uniform"


async def test_too_little_memory_for_images_is_said_and_versions_come_from_disk(world: World) -> None:
    await world.serves(world.publish(5))
    status, now, _ = await world.server.call("GET", "/stitch/status")
    assert status == 200
    assert (now["destination"]["asked"], now["destination"]["uses"]) == ("auto", "disk")
    assert "of memory (" in now["destination"]["why"]
    assert "(1000 bytes) are available" in now["destination"]["why"]
    assert now["last_update"]["destination"] == "disk"
    assert world.server.log.read_text().count("stitch: destination disk: ") == 1


async def test_server_info_keeps_the_engines_fields(world: World) -> None:
    status, info, _ = await world.server.call("GET", "/server_info")
    assert status == 200
    assert info["served_model_name"] == "policy"
    assert info["tp_size"] == 1
    assert info["stitch"]["id"] == "replica"
    assert (await world.server.call("GET", "/health"))[:2] == (200, {"status": "ok", "reason": None})


async def test_new_weights_are_served_and_old_kv_is_not_used(world: World) -> None:
    """C12: one prompt, three versions, of which the third has the first one's weights again."""
    said = []
    for seed in (1, 2, 1):
        number = world.publish(seed)
        await world.serves(number)
        first, second = await world.server.generate(PROMPT), await world.server.generate(PROMPT)
        whole(first["meta_info"], number, 8)
        assert first["meta_info"]["cached_tokens"] == 0
        assert second["meta_info"]["cached_tokens"] > 0
        assert first["output_ids"] == second["output_ids"]
        said.append(first["output_ids"])
    assert said[0] == said[2]
    assert said[0] != said[1]


async def test_a_generation_across_an_activation_says_so(world: World) -> None:
    """C11, and the KV of the prompt keeps its version."""
    before = len(world.seeds) - 1
    (answer,) = await world.across([PROMPT], 3)
    meta, after = answer["meta_info"], before + 1
    spans = meta["weight_versions"]
    assert [span["version"] for span in spans] == [before, after]
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (
        0, spans[1]["start"], meta["completion_tokens"]
    )  # fmt: skip
    assert meta["kv"] == "mixed"
    assert meta["kv_versions"] == [{"version": before, "start": 0, "end": len(PROMPT) - 1}]
    assert meta["weight_version"] == str(before)
    assert (meta["weight_version_start"], meta["weight_version_end"]) == (before, after)


async def test_a_prompt_prefilled_across_an_activation_says_so(world: World) -> None:
    """The tokens are of one version, the prompt's KV of two: chunks before and after the activation."""
    before = len(world.seeds) - 1
    prompts = [[32 + (i * j) % 90 for i in range(3500)] for j in range(1, 5)]
    generations = [asyncio.ensure_future(world.server.generate(prompt, new=4)) for prompt in prompts]
    after = world.publish(4)
    metas = [(await generation)["meta_info"] for generation in generations]
    crossed = [meta for meta in metas if len(meta.get("kv_versions", ())) == 2]
    for meta in crossed:
        old, new = meta["kv_versions"]
        assert (old["version"], new["version"]) == (before, after)
        assert (old["start"], old["end"], new["end"]) == (0, new["start"], 3499)
        assert meta["kv"] == "mixed"
        assert meta["weight_version"] == str(before)
        assert meta["weight_version_start"] == after
    assert crossed, metas
    await world.serves(after)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
async def test_openai_answers_carry_each_choices_versions(world: World, route: str, n: int) -> None:
    version = await world.serves(len(world.seeds) - 1)
    body = {**(CHAT if "chat" in route else COMPLETION), "max_tokens": 6, "n": n, "ignore_eos": True}
    status, answer, headers = await world.server.call("POST", route, body)
    assert status == 200, answer
    assert headers["x-stitch-admitted-version"] == str(version["applied"])
    span = [{"version": version["applied"], "start": 0, "end": 6}]
    assert answer["metadata"]["weight_versions"] == (span if n == 1 else [span] * n)
    assert answer["weight_version_start"] == answer["weight_version_end"] == version["applied"]
    streamed = await events(world, route, body)
    final = [one for one in streamed if any(c["finish_reason"] for c in one["choices"])]
    assert sorted(one["choices"][0]["index"] for one in final) == list(range(n))
    for one in streamed:
        assert ("weight_version" in (one.get("metadata") or {})) == (one in final)
    for one in final:
        assert one["metadata"]["weight_versions"] == span


async def test_generate_streams_batches_and_copies(world: World) -> None:
    version = (await world.serves(len(world.seeds) - 1))["applied"]
    sampling = {"max_new_tokens": 5, "ignore_eos": True}
    streamed = await events(world, "/generate", {"input_ids": PROMPT, "sampling_params": sampling})
    assert all("weight_version" not in one["meta_info"] for one in streamed[:-1])
    whole(streamed[-1]["meta_info"], version, 5)
    batch = {"input_ids": [PROMPT, PROMPT[:4]], "sampling_params": {**sampling, "n": 2}}
    status, answers, _ = await world.server.call("POST", "/generate", batch)
    assert status == 200, answers
    assert len(answers) == 4
    for answer in answers:
        whole(answer["meta_info"], version, 5)


async def test_logprobs_of_a_prompt_alone_have_a_version(world: World) -> None:
    version = (await world.serves(len(world.seeds) - 1))["applied"]
    answer = await world.server.generate(PROMPT, new=0, return_logprob=True, logprob_start_len=0)
    assert len(answer["meta_info"]["input_token_logprobs"]) == len(PROMPT)
    tokens = answer["meta_info"]["completion_tokens"]
    expected = [{"version": version, "start": 0, "end": tokens}] if tokens else []
    assert answer["meta_info"]["weight_versions"] == expected
    assert answer["meta_info"]["weight_version"] == str(version)


async def test_an_abort_before_the_first_token_has_a_version(world: World) -> None:
    busy = [asyncio.ensure_future(world.server.generate(PROMPT, new=120)) for _ in range(32)]
    await world.status_until(lambda status: status["active_requests"] == 32)
    waiting = asyncio.ensure_future(world.server.call(
        "POST", "/generate", {"input_ids": PROMPT, "rid": "late", "sampling_params": {"max_new_tokens": 9}}
    ))  # fmt: skip
    await world.status_until(lambda status: status["active_requests"] == 33)
    await asyncio.sleep(0.5)
    assert (await world.server.call("POST", "/abort_request", {"rid": "late"}))[0] == 200
    status, answer, _ = await waiting
    await asyncio.gather(*busy)
    assert status == 200, answer
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["meta_info"]["id"] == "late"
    assert answer["meta_info"]["weight_versions"] == []
    assert answer["meta_info"]["weight_version"].isdigit()


async def test_an_abort_reaches_every_copy(world: World) -> None:
    body = {
        "input_ids": PROMPT,
        "rid": "many",
        "sampling_params": {"max_new_tokens": 3000, "n": 3, "ignore_eos": True},
    }
    asked = asyncio.ensure_future(world.server.call("POST", "/generate", body))
    await world.status_until(lambda status: status["active_requests"] == 1)
    await asyncio.sleep(1.0)
    assert (await world.server.call("POST", "/abort_request", {"rid": "many"}))[0] == 200
    status, answers, _ = await asked
    assert status == 200, answers
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["abort"] * 3
    assert all(answer["meta_info"]["id"].startswith("many") for answer in answers)


async def test_C82_an_abort_takes_nothing_that_only_begins_so(world: World) -> None:
    """SGLang's scheduler aborts by the beginning of ids."""
    rids = ("q", "q~b", "q-2", "q0", "q~")
    evaluation = {"X-Stitch-Consumer": "eval"}
    sampling = {"temperature": 0, "max_new_tokens": 3000, "ignore_eos": True}

    def ask(rid: str, headers: dict[str, str]) -> asyncio.Future[tuple[int, Any, Any]]:
        body = {"input_ids": PROMPT, "rid": rid, "sampling_params": sampling}
        return asyncio.ensure_future(world.server.call("POST", "/generate", body, headers=headers))

    async def abort(rid: str, headers: dict[str, str]) -> int:
        answer = await world.server.call("POST", "/abort_request", {"rid": rid}, headers=headers)
        assert answer[0] == 200
        return int(answer[1]["requests"])

    asked = {rid: ask(rid, {}) for rid in rids}
    theirs = ask("q", evaluation)
    await world.status_until(lambda status: status["active_requests"] == 6)
    await asyncio.sleep(1.0)
    assert (await abort("q", {}), await abort("q-", {}), await abort("~~q", {})) == (1, 0, 0)
    answer = (await asked.pop("q"))[1]
    assert (answer["meta_info"]["id"], answer["meta_info"]["finish_reason"]["type"]) == ("q", "abort")
    await world.status_until(lambda status: status["active_requests"] == 5)
    await asyncio.sleep(1.0)
    assert not any(one.done() for one in (*asked.values(), theirs))
    assert await abort("q", evaluation) == 1
    assert (await theirs)[1]["meta_info"]["finish_reason"]["type"] == "abort"
    for rid, one in asked.items():
        assert await abort(rid, {}) == 1
        assert (await one)[1]["meta_info"]["id"] == rid


async def test_C83_what_the_engine_has_computed_is_held_up_by_no_client(world: World) -> None:
    """More than fits into the buffers of sockets, for a client that reads nothing until the gate is empty."""
    served = len(world.seeds) - 1
    await world.serves(served)
    body = json.dumps({
        "input_ids": PROMPT, "stream": True, "weight_version": {"exact_version": served, "run": RUN},
        "return_logprob": True, "top_logprobs_num": 20,
        "sampling_params": {"temperature": 0, "max_new_tokens": 250, "ignore_eos": True},
    }).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", world.server.port, limit=1024)
    head = (
        "POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await world.status_until(lambda status: status["active_requests"] == 1)
    await world.status_until(lambda status: status["active_requests"] == 0)
    answer = await reader.read()
    writer.close()
    assert len(answer) > 12 << 20
    final = json.loads(answer.split(b"data: ")[-2].split(b"\n")[0])
    assert final["meta_info"]["weight_versions"] == [{"version": served, "start": 0, "end": 250}]
    assert b"data: [DONE]" in answer[-100:]


@pytest.mark.parametrize(
    "demand",
    [
        5,
        "7",
        [],
        {"min_version": "abc"},
        {"min_version": -1},
        {"min_version": 9, "exact_version": 3},
        {"x": 1},
    ],
    ids=repr,
)
async def test_c13_a_malformed_constraint_is_refused(world: World, demand: Any) -> None:
    body = {"input_ids": PROMPT, "weight_version": demand}
    status, answer, _ = await world.server.call("POST", "/generate", body)
    assert (status, answer["error"]["type"]) == (400, "InvalidRequest")


async def test_a_compressed_body_does_not_slip_past_the_gate(world: World) -> None:
    body = {"input_ids": PROMPT, "weight_version": {"min_version": 1000}}
    packed = gzip.compress(json.dumps(body).encode())
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    async with aiohttp.ClientSession() as session:
        async with session.post(world.server.url + "/generate", data=packed, headers=headers) as response:
            assert response.status == 409, await response.text()
        unknown = {**headers, "content-encoding": "zstd"}
        async with session.post(world.server.url + "/generate", data=packed, headers=unknown) as response:
            assert response.status == 415


async def test_every_other_stock_route_is_refused(world: World) -> None:
    from sglang.srt.entrypoints.http_server import app

    from stitch_core.replica.routes import ROUTES

    served = {*ROUTES, "/freeze_gc"}
    tried = 0
    for route in app.routes:
        path = getattr(route, "path", "").replace("{model:path}", "x").replace("{response_id}", "x")
        for method in sorted(getattr(route, "methods", None) or ()):
            if not path or path in served or method in ("HEAD", "OPTIONS"):
                continue
            status, answer, _ = await world.server.call(method, path, {})
            assert status in (403, 404), (method, path, answer)
            assert answer["error"]["type"] in ("RouteBlocked", "RouteUnknown")
            tried += 1
    assert tried > 60


async def test_c20_a_client_that_leaves_ends_its_generation(world: World) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}
    with pytest.raises(TimeoutError):
        await world.server.call("POST", "/generate", body, timeout=1.5)
    await world.status_until(lambda status: status["active_requests"] == 0, seconds=10)


async def test_a_store_that_is_gone_is_said_and_survived(world: World) -> None:
    away = world.store.with_name("away")
    world.store.rename(away)
    status = await world.status_until(lambda status: status["problem"] is not None)
    assert status["ready"]
    assert status["problem"]["age"] >= 0
    whole((await world.server.generate(PROMPT))["meta_info"], status["applied"], 8)
    away.rename(world.store)
    await world.serves(world.publish(5))
    assert (await world.status_until(lambda status: status["problem"] is None))["ready"]


async def test_a_host_directory_that_cannot_be_written_is_said_and_survived(world: World) -> None:
    served = len(world.seeds) - 1
    (world.host / "fetch").write_text("in the way")
    number = world.publish(6)
    status = await world.status_until(lambda status: status["problem"] is not None)
    assert (status["ready"], status["applied"]) == (True, served)
    (world.host / "fetch").unlink()
    await world.serves(number)


async def test_a_full_disk_is_said_and_survived(world: World) -> None:
    served = len(world.seeds) - 1
    with small_disk(world.host / "fetch"):
        number = world.publish(9)
        status = await world.status_until(lambda s: s["problem"] and "No space" in s["problem"]["message"])
        assert (status["ready"], status["applied"]) == (True, served)
    await world.serves(number)


async def test_a_staging_process_that_is_killed_is_replaced(world: World) -> None:
    """While it stages, here made to last."""
    served = len(world.seeds) - 1
    (worker,) = world.server.children("stage_worker")
    os.kill(worker, signal.SIGSTOP)
    number = world.publish(8)
    await asyncio.sleep(1.0)
    os.kill(worker, signal.SIGKILL)
    assert (await world.server.generate(PROMPT))["meta_info"]["weight_version"] in (str(served), str(number))
    await world.serves(number)
    (replaced,) = world.server.children("stage_worker")
    assert replaced != worker


async def test_a_corrupt_version_is_said_and_the_next_one_served(world: World) -> None:
    """C09 and C14 at the replica: what does not verify is not loaded, whoever wrote it."""
    served = len(world.seeds) - 1
    paused = world.host / "fetch"
    paused.write_text("so that the payload can be changed before it is fetched")
    bad = world.publish(7)
    for payload in world.store.rglob(f"weight_v{bad:06d}/*.safetensors"):
        data = bytearray(payload.read_bytes())
        data[-1] ^= 1
        payload.chmod(0o644)
        payload.write_bytes(data)
    paused.unlink()
    status = await world.status_until(lambda s: s["problem"] and "fetch" not in s["problem"]["message"])
    assert (status["ready"], status["applied"]) == (True, served)


async def test_sigterm_lets_requests_end_and_leaves(world: World) -> None:
    """The last test of this server."""
    record = world.store / "replicas" / "replica.json"
    assert record.exists()
    generation = asyncio.ensure_future(world.server.generate(PROMPT, new=200))
    await world.status_until(lambda status: status["active_requests"] == 1)
    os.kill(world.server.process.pid, signal.SIGTERM)
    await world.status_until(lambda status: not status["ready"], seconds=5)
    status, refusal, _ = await world.server.call("POST", "/generate", {"input_ids": PROMPT})
    assert (status, refusal["error"]["type"]) == (503, "EngineUnavailable")
    assert len((await generation)["output_ids"]) == 200
    await asyncio.to_thread(world.server.process.wait, 60)
    assert world.server.process.returncode == 0
    assert not record.exists()


def test_the_log_names_no_failure(world: World) -> None:
    assert "Traceback" not in Path(world.server.log).read_text()
