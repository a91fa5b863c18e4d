"""The HTTP face: SGLang's shapes, clear refusals, and nothing that a client sends takes the engine down."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

from stitch_core.testing.asgi_client import AsgiClient
from stitch_embedded import __main__ as command
from stitch_embedded.config import ModelConfig
from stitch_embedded.engine import EmbeddedEngine, Options
from stitch_embedded.replay import Replayer, Trajectory
from stitch_embedded.scheduler import Scheduler
from stitch_embedded.selfcheck import SelfCheckError
from stitch_embedded.server import Server
from stitch_embedded.tokenizer import Tokenizer, visible
from tests.embedded.models import config_json, nudged, random_tensors, save

pytestmark = pytest.mark.usefixtures("no_self_check")

CONFIG = ModelConfig.from_dict(config_json())
V0 = random_tensors(CONFIG, 0)
V1 = nudged(V0, 1)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}x{% endif %}"
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    save(root / "v0", config_json(), V0)
    save(root / "v1", config_json(), V1)
    save(root / "text", config_json(), V0)
    save_tokenizer(root / "text")
    return root


def save_tokenizer(directory: Path) -> None:
    """One token a letter; 2 is the end."""
    words = ["<pad>", "<unk>", "<end>", *LETTERS]
    tokenizer = HFTokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<end>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<end>", "bos_token": None}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


async def serving(directory: Path, **options: Any) -> AsyncIterator[AsgiClient]:
    engine = EmbeddedEngine(
        directory,
        Options(**{"max_len": 40, "max_running": 16, "prefill_rows": 16, "seed": 1} | options),
    )
    engine.start()
    yield AsgiClient(Server(engine, Tokenizer.of(directory)))
    await engine.close()


@pytest.fixture
async def client(checkpoints: Path) -> AsyncIterator[AsgiClient]:
    async for one in serving(checkpoints / "v0"):
        yield one


@pytest.fixture
async def slow(checkpoints: Path) -> AsyncIterator[AsgiClient]:
    async for one in serving(checkpoints / "v0", pace=0.02):
        yield one


@pytest.fixture
async def text(checkpoints: Path) -> AsyncIterator[AsgiClient]:
    async for one in serving(checkpoints / "text"):
        yield one


async def running(client: AsgiClient) -> None:
    """Wait until the engine has begun with a request."""
    for _ in range(1000):
        if (await client.get("/v1/loads")).json()["loads"][0]["num_running_reqs"]:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("nothing runs")


def body(**changes: Any) -> dict[str, Any]:
    params = {"max_new_tokens": 10, "ignore_eos": True} | changes.pop("sampling_params", {})
    return {"input_ids": [5, 6, 7], "sampling_params": params} | changes


# ------------------------------------------------------------------------------------------------- generate


async def test_generate(client: AsgiClient) -> None:
    got = (await client.post("/generate", body(return_logprob=True, logprob_start_len=0, rid="me"))).json()
    meta = got["meta_info"]
    assert len(got["output_ids"]) == meta["completion_tokens"] == 10
    assert got["text"] == ""
    assert meta["id"] == "me"
    assert meta["prompt_tokens"] == 3
    assert meta["finish_reason"] == {"type": "length", "length": 10}
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 10}]
    assert meta["kv_versions"] == [{"version": "default", "start": 0, "end": 2}]
    assert meta["kv"] == "uniform"
    assert [t for _, t, _ in meta["output_token_logprobs"]] == got["output_ids"]
    assert [t for _, t, _ in meta["input_token_logprobs"]] == [5, 6, 7]
    assert meta["input_token_logprobs"][0][0] is None


async def test_logprobs_survive_json_and_prove_themselves(client: AsgiClient) -> None:
    got = (await client.post("/generate", body(return_logprob=True))).json()
    values = [v for v, _, _ in got["meta_info"]["output_token_logprobs"]]
    assert all(torch.tensor(v, dtype=torch.float32).item() == v for v in values)
    trajectory = Trajectory.of([5, 6, 7], got["output_ids"], got["meta_info"])
    assert Replayer(CONFIG, 40).replay([("default", V0)], [trajectory]) == [values]


async def test_batches_and_copies(client: AsgiClient) -> None:
    got = (
        await client.post("/generate", body(input_ids=[[5], [6, 7]], rid="g", sampling_params={"n": 3}))
    ).json()
    assert [g["meta_info"]["id"] for g in got] == ["g_0_0", "g_0_1", "g_0_2", "g_1_0", "g_1_1", "g_1_2"]
    assert [g["meta_info"]["prompt_tokens"] for g in got] == [1, 1, 1, 2, 2, 2]
    copies = (
        await client.post("/generate", body(rid="c", sampling_params={"n": 2, "sampling_seed": 4}))
    ).json()
    assert [c["meta_info"]["id"] for c in copies] == ["c_0", "c_1"]
    assert copies[0]["output_ids"] != copies[1]["output_ids"]
    again = (await client.post("/generate", body(sampling_params={"n": 2, "sampling_seed": 4}))).json()
    assert [a["output_ids"] for a in again] == [c["output_ids"] for c in copies]
    lists = (await client.post("/generate", body(input_ids=[[5]], rid=["x"]))).json()
    assert lists[0]["meta_info"]["id"] == "x"


async def test_prompt_scores_only(client: AsgiClient) -> None:
    got = (
        await client.post(
            "/generate", body(return_logprob=True, logprob_start_len=1, sampling_params={"max_new_tokens": 0})
        )
    ).json()
    assert got["output_ids"] == []
    assert got["meta_info"]["weight_versions"] == []
    assert got["meta_info"]["weight_version"] == "default"
    assert [t for _, t, _ in got["meta_info"]["input_token_logprobs"]] == [6, 7]


async def test_streams(client: AsgiClient) -> None:
    call = await client.post("/generate", body(stream=True, return_logprob=True, sampling_params={"n": 2}))
    *events, done = call.events()
    assert call.headers["content-type"].startswith("text/event-stream")
    assert done == "[DONE]"
    for index in (0, 1):
        mine = [e for e in events if e["index"] == index]
        assert [len(e["output_ids"]) for e in mine] == list(range(1, 11))
        for event in mine[:-1]:
            assert event["meta_info"].keys() == {
                "id",
                "finish_reason",
                "prompt_tokens",
                "completion_tokens",
                "cached_tokens",
            }
            assert event["meta_info"]["finish_reason"] is None
        assert mine[-1]["meta_info"]["weight_versions"][-1]["end"] == 10
        assert len(mine[-1]["meta_info"]["output_token_logprobs"]) == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": []}, "non-empty"),
        ({"input_ids": [37]}, "token id 37"),
        ({"input_ids": [-1]}, "token id -1"),
        ({"input_ids": [True]}, "token id True"),
        ({"input_ids": [[1], ["a"]]}, "token id 'a'"),
        ({"input_ids": "abc"}, "non-empty list"),
        ({"input_ids": None}, "either text or input_ids"),
        ({"text": "a"}, "either text or input_ids"),
        ({"input_ids": None, "text": "a"}, "no tokenizer"),
        ({"input_ids": [1] * 41}, "max_len is 40"),
        ({"sampling_params": {"max_new_tokens": 38}}, "make 41"),
        ({"sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"sampling_params": {"max_new_tokens": 1.5}}, "max_new_tokens"),
        ({"sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"top_p": 0}}, "top_p"),
        ({"sampling_params": {"top_k": 0}}, "top_k"),
        ({"sampling_params": {"n": 0}}, "n must be"),
        ({"sampling_params": {"stop": ["x"]}}, "tokenizer"),
        ({"sampling_params": {"stop_token_ids": [99]}}, "token id 99"),
        ({"sampling_params": {"min_new_tokens": 11}}, "min_new_tokens"),
        ({"sampling_params": {"frequency_penalty": 0.5}}, "frequency_penalty is not supported"),
        ({"sampling_params": {"typo": 1}}, "unknown sampling parameter 'typo'"),
        ({"sampling_params": [{}, {}]}, "sampling_params"),
        ({"image_data": "x"}, "image_data"),
        ({"stream": 1}, "stream"),
        ({"rid": 7}, "rid"),
        ({"rid": ["a", "b"]}, "rid"),
        ({"logprob_start_len": "x"}, "logprob_start_len"),
    ],
)
async def test_bad_requests(client: AsgiClient, change: dict[str, Any], message: str) -> None:
    value = body() | change
    if isinstance(change.get("sampling_params"), dict):
        value = body(**change)
    call = await client.post("/generate", value)
    assert (call.status, call.json()["object"]) == (400, "error")
    assert message in call.json()["message"]
    assert (await client.post("/generate", body())).status == 200


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff", b"null"])
async def test_bodies_that_are_no_objects(client: AsgiClient, raw: bytes) -> None:
    for path in ("/generate", "/v1/completions", "/update_weights_from_disk"):
        call = await client.request("POST", path, body=raw)
        assert (call.status, call.json()["object"]) == (400, "error")


async def test_routes_methods_and_encodings(client: AsgiClient) -> None:
    assert (await client.get("/nope")).status == 404
    assert (await client.get("/generate")).status == 405
    assert (
        await client.request("POST", "/generate", body(), headers={"content-encoding": "gzip"})
    ).status == 415


async def test_a_rid_is_in_flight_once(slow: AsgiClient) -> None:
    first = slow.start("POST", "/generate", body(rid="x", stream=True))
    await first.until(lambda c: bool(c.chunks))
    second = await slow.post("/generate", body(rid="x"))
    assert second.status == 400
    assert "in flight" in second.json()["message"]
    await first.finished()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_a_client_that_leaves_ends_its_generation(slow: AsgiClient, path: str, stream: bool) -> None:
    value = (
        body(stream=stream) if path == "/generate" else {"prompt": [5, 6], "max_tokens": 30, "stream": stream}
    )
    call = slow.start("POST", path, value)
    await running(slow)
    call.disconnect()
    await call.finished()
    assert (await slow.get("/v1/loads")).json()["loads"][0]["num_total_reqs"] == 0


# -------------------------------------------------------------------------------------------------- control


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_update_in_a_pause(slow: AsgiClient, checkpoints: Path, mode: str) -> None:
    call = slow.start(
        "POST", "/generate", body(stream=True, return_logprob=True, sampling_params={"max_new_tokens": 20})
    )
    await call.until(lambda c: len(c.chunks) > 4)
    assert (await slow.post("/pause_generation", {"mode": mode})).json()["status"] == "ok"
    assert (await slow.get("/flush_cache")).status == 400
    update = {"model_path": str(checkpoints / "v1"), "weight_version": "7"}
    assert (await slow.post("/update_weights_from_disk", update)).json()["success"] is True
    assert (await slow.post("/continue_generation", {})).status == 200
    final = (await call.finished()).events()[-2]
    meta = final["meta_info"]
    assert [s["version"] for s in meta["weight_versions"]] == ["default", "7"]
    assert meta["weight_version"] == "7"
    assert meta["kv"] == {"in_place": "mixed", "retract": "uniform"}[mode]
    trajectory = Trajectory.of([5, 6, 7], final["output_ids"], meta)
    values = [v for v, _, _ in meta["output_token_logprobs"]]
    assert Replayer(CONFIG, 40).replay([("default", V0), ("7", V1)], [trajectory]) == [values]
    assert (await slow.get("/model_info")).json()["weight_version"] == "7"
    assert (await slow.get("/flush_cache")).status == 200


async def test_update_without_a_pause_and_refused_updates(client: AsgiClient, checkpoints: Path) -> None:
    update = {"model_path": str(checkpoints / "v1"), "weight_version": "7", "flush_cache": True}
    assert (await client.post("/update_weights_from_disk", update)).status == 200
    assert (await client.post("/generate", body())).json()["meta_info"]["weight_version"] == "7"
    call = await client.post("/update_weights_from_disk", update | {"model_path": "/nowhere"})
    assert (call.status, call.json()["success"]) == (400, False)
    call = await client.post("/update_weights_from_disk", {"model_path": str(checkpoints / "v1")})
    assert call.status == 400
    assert "weight_version" in call.json()["message"]
    assert (await client.get("/model_info")).json()["weight_version"] == "7"


async def test_pause_abort_and_abort_request(slow: AsgiClient) -> None:
    for end in ({"path": "/abort_request", "json_body": {"rid": "abc"}},
                {"path": "/abort_request", "json_body": {"abort_all": True}},
                {"path": "/pause_generation", "json_body": {}}):  # fmt: skip
        call = slow.start("POST", "/generate", body(rid="abc", sampling_params={"max_new_tokens": 30}))
        await running(slow)
        assert (await slow.post(**end)).status == 200
        got = (await call.finished()).json()
        assert got["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(got["output_ids"]) < 30
    waiting = slow.start("POST", "/generate", body())
    await asyncio.sleep(0.05)
    assert not waiting.returned
    await slow.post("/continue_generation")
    assert (await waiting.finished()).status == 200
    assert (await slow.post("/abort_request", {})).status == 400
    assert (await slow.post("/pause_generation", {"mode": "later"})).status == 400


async def test_information(client: AsgiClient) -> None:
    for path in (
        "/health",
        "/health_generate",
        "/model_info",
        "/get_model_info",
        "/server_info",
        "/v1/models",
    ):
        assert (await client.get(path)).status == 200
    info = (await client.get("/server_info")).json()
    assert info["max_len"] == 40
    assert info["weight_version"] == "default"
    assert (await client.get("/v1/models")).json()["data"][0]["id"] == "v0"


async def test_a_dead_engine_says_so(slow: AsgiClient, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = slow.start("POST", "/generate", body(sampling_params={"max_new_tokens": 30}))
    stream = slow.start("POST", "/generate", body(stream=True, sampling_params={"max_new_tokens": 30}))
    await stream.until(lambda c: len(c.chunks) > 1)
    monkeypatch.setattr(Scheduler, "step", lambda self: 1 / 0)
    assert (await whole.finished()).status == 503
    assert "division by zero" in whole.json()["message"]
    last = (await stream.finished()).events()[-1]
    assert "division by zero" in last["error"]["message"]
    for path in ("/health", "/health_generate", "/model_info"):
        assert (await slow.get(path)).status == 503
    assert (await slow.post("/generate", body())).status == 503
    assert (await slow.post("/pause_generation", {"mode": "retract"})).status == 503


# --------------------------------------------------------------------------------------------------- OpenAI


async def test_completions_of_token_ids(client: AsgiClient) -> None:
    value = {"prompt": [5, 6, 7], "max_tokens": 4, "logprobs": 2, "ignore_eos": True}
    got = (await client.post("/v1/completions", value)).json()
    choice = got["choices"][0]
    assert (got["object"], choice["finish_reason"], len(choice["token_ids"])) == (
        "text_completion",
        "length",
        4,
    )
    assert got["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert len(choice["logprobs"]["token_logprobs"]) == 4
    assert [len(t) for t in choice["logprobs"]["top_logprobs"]] == [2] * 4
    assert got["metadata"]["weight_versions"] == [{"version": "default", "start": 0, "end": 4}]
    trajectory = Trajectory.of([5, 6, 7], choice["token_ids"], got["metadata"])
    replayed = Replayer(CONFIG, 40).replay([("default", V0)], [trajectory])
    assert replayed == [choice["logprobs"]["token_logprobs"]]


async def test_completions_of_several_choices(client: AsgiClient) -> None:
    value = {"prompt": [[5], [6]], "max_tokens": 4, "n": 2, "ignore_eos": True}
    got = (await client.post("/v1/completions", value)).json()
    assert [c["index"] for c in got["choices"]] == [0, 1, 2, 3]
    assert got["metadata"]["weight_versions"] == [[{"version": "default", "start": 0, "end": 4}]] * 4
    assert got["metadata"]["kv"] == ["uniform"] * 4
    assert got["usage"]["prompt_tokens"] == 2
    stream = await client.post(
        "/v1/completions", value | {"stream": True, "stream_options": {"include_usage": True}}
    )
    *events, usage, done = stream.events()
    assert done == "[DONE]"
    assert usage["usage"]["completion_tokens"] == 16
    final = [e for e in events if e["choices"][0]["finish_reason"]]
    assert sorted(e["choices"][0]["index"] for e in final) == [0, 1, 2, 3]
    assert all(e["metadata"]["weight_versions"][0]["end"] == 4 for e in final)
    assert not any("metadata" in e for e in events if e not in final)


async def test_chat(text: AsgiClient) -> None:
    value = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 8,
        "seed": 3,
        "logprobs": True,
        "top_logprobs": 1,
    }
    got = (await text.post("/v1/chat/completions", value)).json()
    message = got["choices"][0]["message"]
    assert got["object"] == "chat.completion"
    assert got["usage"]["prompt_tokens"] == 6
    assert message["role"] == "assistant"
    assert len(got["choices"][0]["logprobs"]["content"]) == got["usage"]["completion_tokens"]
    stream = await text.post("/v1/chat/completions", value | {"stream": True})
    *events, done = stream.events()
    assert done == "[DONE]"
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(e["choices"][0]["delta"]["content"] for e in events) == message["content"]
    assert events[-1]["metadata"]["weight_versions"]
    for messages, why in (
        ([{"role": "system", "content": "x"}], "no system"),
        ([], "messages"),
        ("x", "messages"),
    ):
        call = await text.post("/v1/chat/completions", {"messages": messages})
        assert call.status == 400
        assert why in call.json()["message"]


async def test_a_chat_of_token_ids_says_what_sglang_says_of_its_tokens(text: AsgiClient) -> None:
    """What the session servers of trainers ask for, who make samples of the answers."""
    chat = {"messages": [{"role": "user", "content": "hello"}], "input_ids": [5, 6, 7], "max_tokens": 8}
    chat |= {"logprobs": True, "return_meta_info": True, "seed": 3, "rid": "me"}
    got = (await text.post("/v1/chat/completions", chat)).json()
    meta = got["choices"][0]["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("me", 3, 8)
    assert meta["weight_versions"] == got["metadata"]["weight_versions"]
    sampling = {"max_new_tokens": 8, "sampling_seed": 3}
    same = {"input_ids": [5, 6, 7], "sampling_params": sampling, "return_logprob": True}
    plain = (await text.post("/generate", same)).json()
    assert meta["output_token_logprobs"] == plain["meta_info"]["output_token_logprobs"]
    for wrong, why in (({"stream": True}, "streams"), ({"input_ids": []}, "non-empty")):
        call = await text.post("/v1/chat/completions", chat | wrong)
        assert call.status == 400
        assert why in call.json()["message"]


async def test_chat_needs_a_tokenizer(client: AsgiClient) -> None:
    call = await client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert call.status == 400
    assert "no tokenizer" in call.json()["message"]


@pytest.mark.parametrize("name", ["echo", "tools", "best_of", "suffix"])
async def test_unsupported_openai_fields(client: AsgiClient, name: str) -> None:
    assert (await client.post("/v1/completions", {"prompt": [5], name: 3})).status == 400


async def test_text_and_stop_strings(text: AsgiClient) -> None:
    params: dict[str, Any] = {"max_new_tokens": 20, "sampling_seed": 2, "ignore_eos": True}
    free = (await text.post("/generate", {"text": "abc", "sampling_params": params})).json()
    assert free["meta_info"]["prompt_tokens"] == 3
    letters = [t for t in free["output_ids"] if 3 <= t < 29]
    assert free["text"].startswith("".join(LETTERS[t - 3] for t in letters[:1]))
    stop = free["text"][3:5]
    params["stop"] = stop
    call = await text.post("/generate", {"text": "abc", "sampling_params": params, "stream": True})
    *events, _ = call.events()
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    expected = free["text"][: free["text"].find(stop)]
    assert events[-1]["text"] == expected
    assert all(expected.startswith(e["text"]) for e in events)


def test_visible_text_is_never_taken_back() -> None:
    assert visible("abc\ufffd", ()) == "abc"
    assert visible("say ST", ("STOP",)) == "say "
    assert visible("say STO", ("STOP", "TOP")) == "say "
    assert visible("done", ("STOP",)) == "done"


# -------------------------------------------------------------------------------------------------- command


def test_command_refuses_in_one_line(
    checkpoints: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert command.main(["--model", str(checkpoints / "v0"), "--port", port]) == 2
        assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    assert command.main(["--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "no checkpoint" in error
    assert error.count("\n") == 1


def test_command_refuses_kernels_that_are_not_exact(
    checkpoints: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SelfCheckError("row 3 differs")

    monkeypatch.setattr("stitch_embedded.engine.self_check", fail)
    assert command.main(["--model", str(checkpoints / "v0")]) == 2
    assert capsys.readouterr().err == "stitch_embedded: row 3 differs\n"


def test_listener_names_its_protocol() -> None:
    """Or asyncio would leave TCP_NODELAY off."""
    with command.listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


@pytest.mark.real
def test_command_serves(checkpoints: Path) -> None:
    arguments = [
        sys.executable,
        "-m",
        "stitch_embedded",
        "--model",
        str(checkpoints / "v0"),
        "--max-len",
        "40",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        data = json.dumps(body()).encode()
        url = f"http://127.0.0.1:{port}/generate"
        request = urllib.request.Request(url, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert len(json.load(answer)["output_ids"]) == 10
        process.terminate()
        assert process.wait(30) in (0, -15)
