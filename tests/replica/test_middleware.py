"""Promise 1, truth, at the door: what is admitted, what reaches the engine, what may pass as an answer."""

import asyncio
import gzip
import json
import zlib
from typing import Any

import pytest

from stitch_core.ports import EngineError, EngineReplaced
from stitch_core.replica.asgi import Receive, Scope, Send
from stitch_core.replica.outbox import STALL_SECONDS
from stitch_core.testing.asgi_client import Call
from stitch_core.versions import PolicyVersion, unavailable
from tests.replica.scripted import Replica, generated, label, span

pytestmark = pytest.mark.virtual_time

PROMPT = {"text": "hi"}


async def generate(replica: Replica, body: dict[str, Any] | None = None, **options: Any) -> Call:
    return await replica.client.post("/generate", {**PROMPT, **(body or {})}, **options)


# ------------------------------------------------------------------------------------------- admission


async def test_constraint_is_taken_out_and_an_id_is_put_in(replica: Replica) -> None:
    call = await generate(
        replica, {"weight_version": {"min_version": 5}}, headers={"accept-encoding": "gzip"}
    )
    assert call.status == 200
    assert "weight_version" not in replica.engine.seen
    assert replica.engine.seen["text"] == "hi"
    assert len(replica.engine.seen["rid"].strip("~")) == 32
    assert "accept-encoding" not in replica.engine.headers
    assert call.headers["x-stitch-admitted-version"] == "7"
    assert call.headers["x-stitch-run"] == "r"
    assert int(call.headers["content-length"]) == len(call.body)
    assert replica.gate.active == 0


@pytest.mark.parametrize(
    "field",
    [
        5, "7", [], True, {"min_version": "abc"}, {"min_version": -1}, {"min_version": 9, "exact_version": 3},
        {"min_version": 7.0}, {"min_version": True}, {"newest": 1}, {"run": "../x"}, {"run": 5},
        {"min_version": 2**63}, {"exact_version": 2**63}, {"min_version": "7" * 5000},
    ],
)  # fmt: skip
async def test_C13_malformed_constraint_is_400_with_the_reason(replica: Replica, field: Any) -> None:
    call = await generate(replica, {"weight_version": field})
    assert call.status == 400
    error = call.json()["error"]
    assert (error["type"], error["retryable"], error["retry"]) == ("InvalidRequest", False, "never")
    assert "version" in error["message"] or "run id" in error["message"]
    assert replica.engine.path == ""


@pytest.mark.parametrize(
    "headers",
    [{"x-stitch-min-version": "abc"}, {"x-stitch-min-version": "-1"}, {"x-stitch-exact-version": ""},
     {"x-stitch-run": ".x"}, {"x-stitch-min-version": "7, 7"}, {"x-stitch-min-version": str(2**63)},
     {"x-stitch-exact-version": "7" * 5000}],
)  # fmt: skip
async def test_C13_malformed_header(replica: Replica, headers: dict[str, str]) -> None:
    assert (await generate(replica, headers=headers)).status == 400


@pytest.mark.parametrize("field", [None, {}, {"min_version": None}])
async def test_C13_null_and_absent_mean_no_constraint(replica: Replica, field: Any) -> None:
    assert (await generate(replica, {"weight_version": field})).status == 200


async def test_headers_and_body_must_agree(replica: Replica) -> None:
    body = {"weight_version": {"min_version": 5}}
    assert (await generate(replica, body, headers={"x-stitch-min-version": "5"})).status == 200
    assert "x-stitch-min-version" not in replica.engine.headers
    assert (await generate(replica, body, headers={"x-stitch-min-version": "6"})).status == 400


async def test_refusals_use_the_envelope(replica: Replica) -> None:
    ahead = await generate(replica, {"weight_version": {"min_version": 9}})
    assert (ahead.status, ahead.json()["error"]["type"]) == (409, "WeightVersionNotReady")
    assert ahead.headers["retry-after"] == "1"
    assert {"target_version": 9, "applied": 7, "run": "r"}.items() <= ahead.json()["error"].items()
    behind = await generate(replica, {"weight_version": {"exact_version": 3}})
    assert (behind.status, behind.json()["error"]["retry"]) == (409, "elsewhere")


async def test_C12_request_of_another_run_is_never_served(replica: Replica) -> None:
    call = await generate(replica, {"weight_version": {"run": "other", "min_version": 0}})
    assert call.status == 409
    assert replica.engine.path == ""


TWICE = b'{"text": "x", "weight_version": {"min_version": 9}, "weight_version": null}'


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b"\xff", b"null", b'{"a":' * 9000, TWICE])
async def test_unreadable_body_is_400(replica: Replica, body: bytes) -> None:
    call = await replica.client.post("/generate", body=body)
    assert (call.status, call.json()["error"]["type"]) == (400, "InvalidRequest")


@pytest.mark.parametrize("rid", ["", 5, [], ["a", "a"], ["a", ""], {}])
async def test_unusable_rid_is_400(replica: Replica, rid: Any) -> None:
    assert (await generate(replica, {"rid": rid})).status == 400


def deflate_raw(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("deflate", deflate_raw)]
)
async def test_compressed_body_is_read(replica: Replica, encoding: str, pack: Any) -> None:
    body = pack(json.dumps({**PROMPT, "weight_version": {"min_version": 9}}).encode())
    call = await replica.client.post("/generate", body=body, headers={"content-encoding": encoding})
    assert call.status == 409


async def test_body_limits() -> None:
    replica = Replica(max_body=1000)
    bomb = gzip.compress(b"a" * 10_000_000)
    send = replica.client.post
    assert (await send("/generate", body=bomb[:900], headers={"content-encoding": "gzip"})).status == 413
    assert (await send("/generate", body=b" " * 1001)).status == 413
    assert (await send("/generate", body=b" " * 1001, headers={"content-length": "1"})).status == 413
    assert (await send("/generate", body=b"{}", headers={"content-encoding": "br"})).status == 415
    assert (await send("/generate", body=b"{}", headers={"content-encoding": "gzip"})).status == 400


# ---------------------------------------------------------------------------------------------- report


async def test_report_of_one_version(replica: Replica) -> None:
    meta = (await generate(replica)).json()["meta_info"]
    assert meta["run"] == "r"
    assert meta["weight_version"] == "7"
    assert (meta["weight_version_start"], meta["weight_version_end"]) == (7, 7)
    assert meta["weight_versions"] == [{"version": 7, "start": 0, "end": 3}]
    assert meta["kv"] == "uniform"


async def test_C11_response_over_an_activation_carries_both_versions(replica: Replica) -> None:
    replica.engine.body = generated(
        span(7, 0, 2), span(8, 2, 5), weight_version=label(8), kv="mixed", kv_versions=[span(7, 0, 4)],
        kv_passes=[{"first_token": 0, "kv_versions": [span(7, 0, 6), span(8, 6, 9)]}],
    )  # fmt: skip
    meta = (await generate(replica)).json()["meta_info"]
    assert meta["weight_version"] == "7"
    assert (meta["weight_version_start"], meta["weight_version_end"]) == (7, 8)
    assert [s["version"] for s in meta["weight_versions"]] == [7, 8]
    assert meta["kv"] == "mixed"
    assert meta["kv_versions"] == [{"version": 7, "start": 0, "end": 4}]
    assert meta["kv_passes"][0]["kv_versions"][1] == {"version": 8, "start": 6, "end": 9}


async def test_C11_prompt_under_an_older_version_counts_as_the_oldest(replica: Replica) -> None:
    replica.engine.body = generated(span(8, 0, 2), kv="mixed", kv_versions=[span(7, 0, 4)])
    meta = (await generate(replica)).json()["meta_info"]
    assert (meta["weight_version"], meta["weight_version_start"]) == ("7", 8)


async def test_no_tokens_have_the_current_version(replica: Replica) -> None:
    for answer in (
        generated(weight_version=label(8)),
        generated(span(8, 0, 0)),
        {
            "text": "",
            "meta_info": {"id": "e", "finish_reason": {"type": "abort"}, "weight_version": label(8)},
        },
    ):
        replica.engine.body = answer
        meta = (await generate(replica)).json()["meta_info"]
        assert (meta["weight_version"], meta["weight_version_start"], meta["weight_version_end"]) == (
            "8",
            8,
            8,
        )
        assert meta["weight_versions"] == []


WRONG = {
    "boot label": generated(span("default", 0, 3)),
    "bare number": generated(span("7", 0, 3)),
    "no text": generated({"version": 7, "start": 0, "end": 3}),
    "older": generated(span(6, 0, 3)),
    "other run": generated(span(label(7, "q"), 0, 3)),
    "run switch": generated(span(7, 0, 2), span(label(8, "s"), 2, 3)),
    "backwards": generated(span(8, 0, 2), span(7, 2, 3)),
    "gap": generated(span(7, 0, 1), span(7, 2, 3)),
    "late start": generated(span(7, 1, 3)),
    "too few": generated(span(7, 0, 3), completion_tokens=4),
    "too many": generated(span(7, 0, 3), completion_tokens=2),
    "no spans but a wrong label": generated(weight_version="default"),
    "kv older": generated(span(7, 0, 3), kv_versions=[span(6, 0, 2)]),
    "kv of another run": generated(span(7, 0, 3), kv_versions=[span(label(7, "q"), 0, 2)]),
    "one of a batch": [generated(span(7, 0, 3)), generated(span(6, 0, 3))],
}


@pytest.mark.parametrize("name", WRONG)
async def test_C22_wrong_label_is_never_handed_out(replica: Replica, name: str) -> None:
    replica.engine.body = WRONG[name]
    call = await generate(replica)
    assert (call.status, call.json()["error"]["type"]) == (503, "EngineUnavailable")
    assert len(replica.mismatches) == 1
    assert replica.gate.active == 0


async def test_label_outside_the_constraint_is_never_handed_out(replica: Replica) -> None:
    replica.engine.body = generated(span(8, 0, 3))
    assert (await generate(replica, {"weight_version": {"exact_version": 7}})).status == 503
    assert replica.mismatches


@pytest.mark.parametrize(
    "body", [b"oops", {}, 5, {"text": "x"}, {"text": "x", "meta_info": {"completion_tokens": 3}}]
)
async def test_unlabelled_answer_is_no_proof_against_the_engine(replica: Replica, body: Any) -> None:
    replica.engine.body = body
    call = await generate(replica)
    assert (call.status, call.json()["error"]["type"]) == (502, "VersionUnreported")
    assert not replica.mismatches


@pytest.mark.parametrize(
    ("status", "body"), [(500, b"Internal Server Error"), (400, {"error": "bad"}), (429, b"")]
)
async def test_engine_errors_pass_untouched(replica: Replica, status: int, body: Any) -> None:
    replica.engine.status, replica.engine.body = status, body
    call = await generate(replica)
    assert call.status == status
    assert bytes(call.body) == body if isinstance(body, bytes) else call.json() == body
    assert "x-stitch-admitted-version" not in call.headers


async def test_batch_is_reported_item_by_item(replica: Replica) -> None:
    replica.engine.body = [generated(span(7, 0, 3)), generated(span(7, 0, 1), span(8, 1, 2))]
    first, second = (await generate(replica, {"text": ["a", "b"]})).json()
    assert first["meta_info"]["weight_version_end"] == 7
    assert second["meta_info"]["weight_version_end"] == 8


def completed(metadata: dict[str, Any], tokens: int, choices: int = 1) -> dict[str, Any]:
    listed = [{"index": i, "text": "x", "finish_reason": "stop"} for i in range(choices)]
    return {"id": "e", "choices": listed, "usage": {"completion_tokens": tokens}, "metadata": metadata}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_openai_report(replica: Replica, path: str) -> None:
    spans = [span(7, 0, 2), span(8, 2, 3)]
    replica.engine.body = completed({"weight_version": label(8), "weight_versions": spans, "more": 1}, 3)
    value = (await replica.client.post(path, {"prompt": "x"})).json()
    assert value["metadata"]["weight_version"] == "7"
    assert value["metadata"]["weight_versions"][1] == {"version": 8, "start": 2, "end": 3}
    assert value["metadata"]["more"] == 1
    assert (value["run"], value["weight_version_start"], value["weight_version_end"]) == ("r", 7, 8)


async def test_openai_report_of_several_choices(replica: Replica) -> None:
    spans = [[span(7, 0, 2)], [span(7, 0, 1), span(8, 1, 3)]]
    replica.engine.body = completed({"weight_version": label(8), "weight_versions": spans}, 5, 2)
    value = (await replica.client.post("/v1/completions", {"prompt": "x", "n": 2})).json()
    assert value["metadata"]["weight_versions"][0] == [{"version": 7, "start": 0, "end": 2}]
    assert (value["metadata"]["weight_version"], value["weight_version_end"]) == ("7", 8)


async def test_the_engines_labels_in_a_choices_meta_info_become_its_report(replica: Replica) -> None:
    """SGLang's return_meta_info: Miles reads an agent's oldest version there, and took no label for none."""
    spans = [[span(7, 0, 2)], [span(7, 0, 1), span(8, 1, 3)]]
    body = completed({"weight_version": label(8), "weight_versions": spans}, 5, 2)
    for choice in body["choices"]:
        choice["meta_info"] = {"id": "e", "weight_version": label(8), "weight_versions": spans[0], "own": 1}
    replica.engine.body = body
    chat = {"messages": [], "n": 2, "return_meta_info": True, "rid": "me"}
    value = (await replica.client.post("/v1/chat/completions", chat)).json()
    first, second = (choice["meta_info"] for choice in value["choices"])
    assert (first["weight_version"], first["weight_version_end"], first["run"]) == ("7", 7, "r")
    assert (second["weight_version"], second["weight_version_end"], second["own"]) == ("7", 8, 1)
    assert second["weight_versions"] == value["metadata"]["weight_versions"][1]
    assert first["id"] == value["id"] == "e"


async def test_labels_in_a_choices_meta_info_of_a_stream_are_taken_out(replica: Replica) -> None:
    choice = {"index": 0, "finish_reason": "stop", "meta_info": {"weight_version": label(8), "own": 1}}
    chunk = {"id": "e", "choices": [choice], "metadata": {"weight_versions": [span(7, 0, 2)]}}
    replica.engine.pieces = [f"data: {json.dumps(chunk)}\n\n".encode(), b"data: [DONE]\n\n"]
    call = await replica.client.post("/v1/chat/completions", {"messages": [], "stream": True})
    event, done = call.events()
    assert done == "[DONE]"
    assert event["choices"][0]["meta_info"] == {"own": 1}
    assert event["metadata"]["weight_version"] == "7"


@pytest.mark.parametrize(
    "answer",
    [
        completed({"weight_version": label(7), "weight_versions": [span(7, 0, 2)]}, 4, 2),
        completed({"weight_version": label(7), "weight_versions": [[span(7, 0, 2)], []]}, 4, 2),
        completed({}, 4),
    ],
)
async def test_versions_of_one_choice_only_are_not_enough(replica: Replica, answer: dict[str, Any]) -> None:
    replica.engine.body = answer
    call = await replica.client.post("/v1/completions", {"prompt": "x", "n": 2})
    assert call.json()["error"]["type"] == "VersionUnreported"


# ------------------------------------------------------------------------------------------------- ids


async def test_own_id_comes_back_and_is_no_prefix_of_another(replica: Replica) -> None:
    seen = []
    for own in ("req-1", "req-10"):
        replica.engine.body = generated(span(7, 0, 3), id="x")
        await generate(replica, {"rid": own})
        seen.append(replica.engine.seen["rid"])
        replica.engine.body = generated(span(7, 0, 3), id=seen[-1] + "_0")
        assert (await generate(replica, {"rid": own})).json()["meta_info"]["id"] == own + "_0"
    assert not seen[1].startswith(seen[0])


async def test_abort_request_needs_one_id(replica: Replica) -> None:
    for body in ({}, {"rid": ""}, {"rid": "a", "abort_all": True}, {"abort_all": True}, {"rid": None}):
        call = await replica.client.post("/abort_request", body)
        assert (call.status, call.json()["error"]["type"]) == (403, "RouteBlocked")
    assert replica.engine.path == ""
    assert (await replica.client.post("/abort_request", {"rid": "run~eval~"})).status == 200
    assert replica.engine.path == ""  # it has nothing of that name to begin with
    assert replica.aborted == []


async def test_abort_of_a_live_request_reaches_exactly_it(replica: Replica) -> None:
    replica.engine.hang.clear()
    running = replica.client.start("POST", "/generate", {**PROMPT, "rid": "req-1"})
    await running_in(replica)
    engine_id = replica.engine.seen["rid"]
    await replica.client.post("/abort_request", {"rid": "req-1"})
    assert replica.aborted == [engine_id]
    await running.finished()


async def running_in(replica: Replica) -> None:
    async with asyncio.timeout(60):
        await replica.engine.called.wait()


# ------------------------------------------------------------------------------- disconnect, revocation


async def test_C20_disconnect_reaches_the_engine(replica: Replica) -> None:
    replica.engine.hang.clear()
    call = replica.client.start("POST", "/generate", PROMPT)
    await running_in(replica)
    assert replica.gate.active == 1
    call.disconnect()
    await call.finished()
    assert replica.engine.disconnected
    assert not replica.aborted
    assert replica.gate.active == 0


async def test_C20_engine_that_does_not_notice_is_told(replica: Replica) -> None:
    replica.engine.hang.clear()
    replica.engine.deaf = True
    call = replica.client.start("POST", "/generate", {**PROMPT, "rid": ["a", "b"]})
    await running_in(replica)
    call.disconnect()
    await call.finished()
    assert replica.aborted == ["~~a~", "~~b~"]
    assert replica.gate.active == 0


async def test_C20_engine_that_never_ends_is_left(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica.engine.hang, "set", lambda: None)
    replica.engine.hang.clear()
    replica.engine.deaf = True
    call = replica.client.start("POST", "/generate", PROMPT)
    await running_in(replica)
    call.disconnect()
    await call.finished()
    assert replica.gate.active == 0


async def revoke_all(replica: Replica) -> None:
    replica.gate.fail("the engine is broken")


async def test_C03_revoked_request_gets_the_refusal(replica: Replica) -> None:
    replica.engine.hang.clear()
    call = replica.client.start("POST", "/generate", PROMPT)
    await running_in(replica)
    await revoke_all(replica)
    await call.finished()
    assert (call.status, call.json()["error"]["type"]) == (503, "EngineUnavailable")
    assert replica.engine.disconnected


async def test_C03_success_that_comes_after_the_revocation_is_dropped(replica: Replica) -> None:
    replica.engine.hang.clear()
    call = replica.client.start("POST", "/generate", PROMPT)
    await running_in(replica)
    await revoke_all(replica)
    replica.engine.hang.set()
    await call.finished()
    assert call.status == 503


async def test_C03_revoked_idle_stream_ends_with_an_error_event(replica: Replica) -> None:
    replica.engine.pieces = [b'data: {"text": "a", "meta_info": {"finish_reason": null}}\n\n']
    replica.engine.hang.clear()
    call = replica.client.start("POST", "/generate", {**PROMPT, "stream": True})
    await call.until(lambda c: bool(c.body))
    await revoke_all(replica)
    await call.finished()
    assert call.complete
    assert call.events()[-1] == unavailable("the engine is broken").body()
    assert "[DONE]" not in call.events()


async def test_client_that_does_not_read_does_not_hold_its_ticket(replica: Replica) -> None:
    async def stuck(message: Any) -> None:
        await asyncio.Event().wait()

    messages = iter([{"type": "http.request", "body": json.dumps(PROMPT).encode()}])

    async def receive() -> Any:
        return next(messages, None) or await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
    stuck_call = asyncio.ensure_future(replica.app(scope, receive, stuck))
    await running_in(replica)
    await asyncio.sleep(0.01)
    assert replica.gate.active == 0  # the engine is done; only the client is not
    stuck_call.cancel()

    replica.engine.pieces = [b'data: {"text": "a", "meta_info": {"finish_reason": null}}\n\n']
    replica.engine.called.clear()
    replica.engine.hang.clear()
    messages = iter([{"type": "http.request", "body": json.dumps(PROMPT).encode()}])
    stuck_stream = asyncio.ensure_future(replica.app(scope, receive, stuck))
    await running_in(replica)
    await asyncio.sleep(0.01)
    assert replica.gate.active == 1
    await revoke_all(replica)
    await asyncio.sleep(0.01)
    assert replica.gate.active == 0
    assert not stuck_stream.done()  # what is left is between it and its server
    async with asyncio.timeout(2 * STALL_SECONDS):
        await stuck_stream


async def test_engine_that_raises_or_says_nothing(replica: Replica) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("broken")

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        return

    replica.app._app = broken
    call = replica.client.start("POST", "/generate", PROMPT)
    with pytest.raises(RuntimeError):
        await call.finished()
    assert call.status == 503
    replica.app._app = silent
    assert (await generate(replica)).status == 503
    assert replica.gate.active == 0


# ---------------------------------------------------------------------------------------------- streams


def sse(*values: Any, end: bytes = b"\n\n") -> bytes:
    return b"".join(b"data: " + (v if isinstance(v, bytes) else json.dumps(v).encode()) + end for v in values)


def partial(text: str, **more: Any) -> dict[str, Any]:
    meta = {"id": "e", "finish_reason": None, "weight_version": label(7), "weight_versions": [span(7, 0, 1)]}
    return {"text": text, "meta_info": meta, **more}


GENERATE_STREAM = b": keep-alive\n\n" + sse(
    partial("x"), partial("xx"), generated(span(7, 0, 2), span(8, 2, 3)), b"[DONE]"
)
CHAT_STREAM = sse(
    {"id": "e", "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]},
    {
        "id": "e",
        "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
        "metadata": {"weight_version": label(8), "weight_versions": [span(7, 0, 2), span(8, 2, 3)]},
    },
    b"[DONE]",
    end=b"\r\n\r\n",
)


@pytest.mark.parametrize(
    ("path", "stream"), [("/generate", GENERATE_STREAM), ("/v1/chat/completions", CHAT_STREAM)]
)
async def test_stream_split_at_every_byte(replica: Replica, path: str, stream: bytes) -> None:
    replica.engine.pieces = [stream]
    whole = await replica.client.post(path, {**PROMPT, "stream": True})
    assert whole.status == 200
    assert whole.headers["x-stitch-admitted-version"] == "7"
    *before, final, done = whole.events()
    assert done == "[DONE]"
    report = final["meta_info"] if path == "/generate" else final["metadata"]
    assert (report["weight_version_start"], report["weight_version_end"], report["weight_version"]) == (
        7,
        8,
        "7",
    )
    assert b"weight_version" not in json.dumps(before).encode()
    for cut in range(1, len(stream)):
        replica.engine.pieces = [stream[:cut], stream[cut:]]
        assert (await replica.client.post(path, {**PROMPT, "stream": True})).body == whole.body
    replica.engine.pieces = [stream[i : i + 1] for i in range(len(stream))]
    assert (await replica.client.post(path, {**PROMPT, "stream": True})).body == whole.body


async def test_stream_passes_events_as_they_come(replica: Replica) -> None:
    replica.engine.pieces = [GENERATE_STREAM[:60], sse(partial("x"))]
    replica.engine.hang.clear()
    call = replica.client.start("POST", "/generate", {**PROMPT, "stream": True})
    await call.until(lambda c: b"keep-alive" in c.body)
    call.disconnect()
    await call.finished()


async def test_C22_wrong_label_in_a_stream_ends_it_with_an_error(replica: Replica) -> None:
    replica.engine.pieces = [sse(partial("x")), sse(generated(span("default", 0, 3)), b"[DONE]")]
    call = await replica.client.post("/generate", {**PROMPT, "stream": True})
    assert call.events()[-1]["error"]["type"] == "EngineUnavailable"
    assert "[DONE]" not in call.events()
    assert replica.mismatches
    assert call.complete


async def test_wrong_label_in_the_first_event_is_a_whole_refusal(replica: Replica) -> None:
    replica.engine.pieces = [sse(generated(span("default", 0, 3)))]
    call = await replica.client.post("/generate", {**PROMPT, "stream": True})
    assert (call.status, call.json()["error"]["type"]) == (503, "EngineUnavailable")


@pytest.mark.parametrize("end", [b"", sse(b"[DONE]"), b'data: {"text": "xy'])
async def test_stream_without_its_final_event_is_no_success(replica: Replica, end: bytes) -> None:
    replica.engine.pieces = [sse(partial("x")), end]
    call = await replica.client.post("/generate", {**PROMPT, "stream": True})
    last = call.body.decode().rstrip().rsplit("\n\n", 1)[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "VersionUnreported"
    assert b"[DONE]" not in call.body


async def test_error_event_of_the_engine_passes(replica: Replica) -> None:
    replica.engine.pieces = [sse({"error": {"message": "no"}}, b"[DONE]")]
    call = await replica.client.post("/generate", {**PROMPT, "stream": True})
    assert call.events() == [{"error": {"message": "no"}}, "[DONE]"]


async def test_every_choice_of_a_stream_is_reported(replica: Replica) -> None:
    both = [
        sse(partial("x", index=0)),
        sse(partial("y", index=1)),
        sse({**generated(span(7, 0, 1)), "index": 1}),
    ]
    replica.engine.pieces = [*both, sse(b"[DONE]")]
    call = await replica.client.post("/generate", {**PROMPT, "stream": True})
    assert call.events()[-1]["error"]["type"] == "VersionUnreported"
    replica.engine.pieces = [*both, sse({**generated(span(7, 0, 1)), "index": 0}, b"[DONE]")]
    call = await replica.client.post("/generate", {**PROMPT, "stream": True})
    assert call.events()[-1] == "[DONE]"


def ends(index: int, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "text": "x", "finish_reason": "stop"}], **more}


ONE = {"weight_version": label(8), "weight_versions": [span(7, 0, 1), span(8, 1, 2)]}
BOTH = {"weight_version": label(8), "weight_versions": [[span(7, 0, 1)], [span(8, 0, 1)]]}


@pytest.mark.parametrize(
    "chunks",
    [
        [ends(0), ends(1), {"choices": [], "metadata": BOTH}],
        [ends(0), ends(1, metadata=BOTH)],
        [ends(0, metadata=ONE), ends(1, metadata=ONE)],
        [ends(0), {"choices": [], "metadata": ONE}],
        [ends(0, metadata={**BOTH, "weight_versions": [ONE["weight_versions"]]})],
    ],
)
async def test_openai_stream_may_report_in_several_places(replica: Replica, chunks: list[Any]) -> None:
    replica.engine.pieces = [sse(*chunks, b"[DONE]")]
    call = await replica.client.post("/v1/completions", {"prompt": "x", "stream": True})
    *_, final, done = call.events()
    assert done == "[DONE]"
    assert (final["weight_version_start"], final["weight_version_end"]) == (7, 8)
    assert final["metadata"]["weight_version"] == "7"


async def test_openai_stream_must_report_each_choice(replica: Replica) -> None:
    replica.engine.pieces = [sse(ends(0), ends(1, metadata=ONE), b"[DONE]")]
    call = await replica.client.post("/v1/completions", {"prompt": "x", "stream": True})
    assert call.events()[-1]["error"]["type"] == "VersionUnreported"


# ----------------------------------------------------------------------------------------------- routes


@pytest.mark.parametrize(
    "path",
    [
        "/pause_generation", "/update_weights_from_disk", "/flush_cache", "/pull_weights", "/v1/embeddings",
        "//flush_cache", "/v1/../flush_cache", "/flush_cache/", "/./flush_cache",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "PUT"])
async def test_control_routes_are_blocked(replica: Replica, path: str, method: str) -> None:
    call = await replica.client.request(method, path)
    assert (call.status, call.json()["error"]["type"]) == (403, "RouteBlocked")
    assert replica.engine.path == ""


@pytest.mark.parametrize(
    "path", ["/", "/new_route", "/%67enerate", "/generate/x", "/GENERATE", "/generate;x", "/..", "/a\nb"]
)
async def test_unknown_routes_are_refused(replica: Replica, path: str) -> None:
    call = await replica.client.post(path, PROMPT)
    assert (call.status, call.json()["error"]["type"]) == (404, "RouteUnknown")
    assert replica.engine.path == ""


@pytest.mark.parametrize("path", ["//generate", "/generate/", "/v1/../generate", "/x//../generate"])
async def test_other_spellings_are_gated_alike(replica: Replica, path: str) -> None:
    call = await replica.client.post(path, {**PROMPT, "weight_version": {"min_version": 9}})
    assert call.status == 409
    assert (await replica.client.post(path, PROMPT)).status == 200
    assert replica.engine.path == "/generate"


async def test_methods(replica: Replica) -> None:
    put = await replica.client.request("PUT", "/generate", PROMPT)
    assert (put.status, put.headers["allow"]) == (405, "POST, OPTIONS")
    assert (await replica.client.request("HEAD", "/generate")).status == 405
    options = await replica.client.request("OPTIONS", "/health")
    assert (options.status, options.headers["allow"]) == (204, "GET, HEAD, OPTIONS")
    head = await replica.client.request("HEAD", "/health")
    assert (head.status, bytes(head.body)) == (200, b"")
    assert replica.engine.path == ""


async def test_health_ready_wake(replica: Replica) -> None:
    assert (await replica.client.get("/health")).json()["status"] == "ok"
    ready = (await replica.client.get("/ready")).json()
    assert ready["state"] == "serving"
    assert {"ready": True, "run": "r", "weight_version": "7", "active_requests": 0}.items() <= ready.items()
    assert (await replica.client.post("/wake")).status == 202
    assert replica.wakes == 1
    replica.gate.close("pausing")
    assert (await replica.client.get("/ready")).status == 503
    assert (await replica.client.get("/health")).status == 200
    replica.gate.fail("uncertain weights")
    failed = await replica.client.get("/health")
    assert (failed.status, failed.json()["reason"]) == (503, "uncertain weights")


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info", "/model_info", "/get_model_info"])
async def test_info_keeps_the_engines_fields(replica: Replica, path: str) -> None:
    replica.engine.body = {"model_path": "/m", "weight_version": label(7)}
    info = (await replica.client.get(path)).json()
    assert (info["model_path"], info["weight_version"], info["run"], info["ready"]) == ("/m", "7", "r", True)
    assert info["stitch"]["state"] == "serving"


async def test_info_without_an_engine(replica: Replica) -> None:
    replica.engine.status, replica.engine.body = 500, b"no"
    info = (await replica.client.get("/server_info")).json()
    assert info["engine_error"]["status"] == 500
    assert info["ready"] is True


async def test_read_only_routes_pass(replica: Replica) -> None:
    for path in ("/metrics", "/v1/models", "/health_generate", "/v1/loads", "/get_load"):
        replica.engine.body = b"x"
        assert bytes((await replica.client.get(path)).body) == b"x"
        assert replica.engine.path == path


async def test_websocket_is_refused_and_lifespan_passes(replica: Replica) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    await replica.app({"type": "websocket", "path": "/v1/realtime"}, receive, send)
    await replica.app({"type": "lifespan"}, receive, send)
    assert [m["type"] for m in sent] == ["websocket.close", "lifespan.startup.complete"]


async def test_C12_cache_key_separates_versions_and_runs() -> None:
    replica = Replica(cache_key=True)
    await generate(replica, {"extra_key": "u"})
    assert replica.engine.seen["extra_key"] == f"{label(7)};u"
    replica.gate.open(PolicyVersion("r", 8))
    replica.engine.body = generated(span(8, 0, 1))
    await generate(replica, {"text": ["a", "b"], "extra_key": ["u", "v"]})
    assert replica.engine.seen["extra_key"] == [f"{label(8)};u", f"{label(8)};v"]


async def test_an_id_that_is_no_text_is_refused(replica: Replica) -> None:
    call = await generate(replica, {"rid": "\ud800"})
    assert call.status == 400
    assert "surrogate" in call.json()["error"]["message"]


# ------------------------------------------------------------------------------- which instance answers


@pytest.mark.parametrize("pieces", [None, [b'data: {"text": "x"}\n\n']])
@pytest.mark.parametrize("error", [EngineReplaced("another"), EngineError("it does not say")])
async def test_C76_what_an_unknown_instance_answers_is_not_handed_out(
    pieces: list[bytes] | None, error: EngineError
) -> None:
    async def vouch() -> None:
        raise error

    replica = Replica(vouch=vouch)
    replica.engine.pieces = pieces
    call = await generate(replica)
    assert (call.status, call.json()["error"]["type"]) == (503, "EngineUnavailable")
    assert replica.mismatches == (["another"] if isinstance(error, EngineReplaced) else [])
    assert replica.gate.active == 0


async def test_C78_an_answer_in_an_encoding_is_refused(replica: Replica) -> None:
    """It was not asked for, and cannot be read."""

    async def packed(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-encoding", b"br")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"\x0b\x02\x80{}\x03"})

    replica.app._app = packed
    call = await generate(replica)
    assert (call.status, call.json()["error"]["type"]) == (502, "VersionUnreported")
    assert "content-encoding" not in call.headers
