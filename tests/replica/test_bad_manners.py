"""Slow clients, and engines that answer what is no answer: an error that says so, and nothing else."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from stitch_core.replica.server import listen, serve
from stitch_core.replica.sse import data_of
from tests.replica.scripted import Replica, generated, span

PROMPT = {"text": "hi"}
DEEP = 100_000

pytestmark = pytest.mark.usefixtures("quick_ends")


def body(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer).encode()


NO_ANSWERS = {
    "empty": b"",
    "garbage": b"\x00\xff\xfe",
    "half": body(generated(span(7, 0, 3)))[:-9],
    "deep list": b"[" * DEEP,
    "deep objects": b'{"a":' * DEEP,
    "deep and whole": b"[" * DEEP + b"]" * DEEP,
    "deep inside": b'{"text": "x", "meta_info": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "a number": b"7",
    "endless number": b'{"text": "x", "meta_info": {"id": ' + b"9" * 5000 + b"}}",
    "two": body(generated(span(7, 0, 3))) * 2,
}


@pytest.mark.parametrize("name", NO_ANSWERS)
async def test_what_is_no_answer_is_a_502_and_the_engine_is_kept(replica: Replica, name: str) -> None:
    """An answer that nested deeper than Python goes ended the request with a 503 and a traceback."""
    replica.engine.body = NO_ANSWERS[name]
    answer = await replica.client.post("/generate", PROMPT)
    assert answer.status == 502, answer.body
    assert answer.json()["error"]["type"] == "VersionUnreported"
    assert replica.mismatches == []
    assert replica.gate.active == 0


@pytest.mark.parametrize("name", NO_ANSWERS)
async def test_what_is_no_event_ends_a_stream_with_an_error(replica: Replica, name: str) -> None:
    replica.engine.pieces = [b"data: " + NO_ANSWERS[name].replace(b"\n", b" ") + b"\n\n"]
    answer = await replica.client.post("/generate", {**PROMPT, "stream": True})
    if answer.status == 200:
        last = [event for event in answer.body.split(b"\n\n") if event][-1]
        error = json.loads(str(data_of(last)))["error"]
    else:
        error = answer.json()["error"]
    assert error["type"] in ("VersionUnreported", "EngineUnavailable")
    assert b"[DONE]" not in answer.body
    assert replica.gate.active == 0


async def test_odd_but_readable_answers_come_through_labelled(replica: Replica) -> None:
    """NaN, half a surrogate pair and a field that comes twice, as engines of every make write them."""
    whole = body(generated(span(7, 0, 3), logprob=float("nan")))
    whole = whole.replace(b'"text": "xxx"', b'"text": "never", "text": "\\ud800xx"')
    replica.engine.body = whole
    answer = await replica.client.post("/generate", PROMPT)
    assert answer.status == 200
    assert answer.body.count(b'"text"') == 1
    value = answer.json()
    assert value["text"] == "\ud800xx"
    assert value["meta_info"]["weight_version"] == "7"


@pytest.mark.parametrize(
    "twice",
    [
        b'"weight_versions": [{"version": "r/weight_v000008", "start": 0, "end": 3}], "weight_versions": ',
        b'"weight_version": "r/weight_v000008", "weight_version": ',
    ],
)
async def test_a_label_that_comes_twice_is_handed_out_once(replica: Replica, twice: bytes) -> None:
    """What is checked is what goes out: no client reads the first of two where we read the last."""
    name = twice.rpartition(b", ")[2]
    replica.engine.body = body(generated(span(7, 0, 3))).replace(name, twice)
    answer = await replica.client.post("/generate", PROMPT)
    assert answer.status == 200
    assert b"000008" not in answer.body
    assert answer.json()["meta_info"]["weight_versions"] == [{"version": 7, "start": 0, "end": 3}]


async def test_a_body_that_does_not_come_is_not_waited_for(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's server waits for ever, and each such request would keep a connection."""
    monkeypatch.setattr("stitch_core.replica.asgi.BODY_SECONDS", 0.05)
    sent: list[Any] = []
    parts = [{"type": "http.request", "body": b'{"text"', "more_body": True}]

    async def receive() -> Any:
        if not parts:
            await asyncio.Event().wait()
        return parts.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/generate", "raw_path": b"/generate", "query_string": b"",
        "headers": [],
    }  # fmt: skip
    await asyncio.wait_for(replica.app(scope, receive, send), 60)
    assert sent[0]["status"] == 408
    assert json.loads(sent[1]["body"])["error"]["type"] == "RequestTimeout"
    assert replica.engine.path == ""


# ---------------------------------------------------------------------------------- on a real connection


@pytest.fixture
async def port(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """Of a replica that has little patience."""
    monkeypatch.setattr("stitch_core.replica.server.HEAD_SECONDS", 0.2)
    listener, end = listen("127.0.0.1", 0), asyncio.Event()
    serving = asyncio.ensure_future(serve(replica.app, listener, end, grace=5))
    yield listener.getsockname()[1]
    replica.engine.hang.set()
    end.set()
    await serving
    listener.close()


HEAD = b"POST /generate HTTP/1.1\r\nhost: x\r\n"
ASKED = b"content-length: 14\r\n\r\n" + b'{"text": "hi"}'


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"])
async def test_a_head_that_drips_has_a_deadline(port: int, before: bytes) -> None:
    """uvicorn kept such a connection for as long as the client liked."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(before)
    if before:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readuntil(b"}")

    async def drip() -> None:
        for byte in HEAD + b"x: " + b"y" * 5000:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)

    dripping = asyncio.ensure_future(drip())
    with contextlib.suppress(ConnectionResetError):  # of a byte that came after the end
        assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert not dripping.done()
    dripping.cancel()
    writer.close()


async def test_a_connection_that_says_nothing_ends(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = await asyncio.wait_for(reader.read(), 60)
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "RequestTimeout"
    writer.close()


async def test_the_deadline_is_none_of_a_generation(port: int, replica: Replica) -> None:
    replica.engine.hang.clear()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):
        writer.write(HEAD)
        await asyncio.sleep(0.05)
        writer.write(ASKED)
        await asyncio.sleep(0.4)
        replica.engine.hang.set()
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
        await reader.readuntil(b"}}")
        replica.engine.hang.clear()
    writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nno colon\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n",
    ],
    ids=["words", "tls", "header", "no host", "length", "two lengths"],
)
async def test_what_is_no_http_is_refused_in_the_envelope(port: int, data: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 60)
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert (error["type"], error["retryable"]) == ("InvalidRequest", False)
    writer.close()


async def test_garbage_behind_a_request_does_not_end_up_in_its_answer(port: int, replica: Replica) -> None:
    replica.engine.pieces = [b"data: {}\n\n"]
    replica.engine.hang.clear()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + ASKED)
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"\x00garbage\r\n\r\n")
    await asyncio.sleep(0.05)
    replica.engine.hang.set()
    rest = await asyncio.wait_for(reader.read(), 60)
    answer, _, second = rest.partition(b"\r\n0\r\n\r\n")
    assert b"HTTP/1.1" not in answer
    assert second.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    writer.close()
