"""Bad manners on the wire, of clients and of replicas: an answer in the envelope, and nobody else is hurt."""

import asyncio
import contextlib
import gzip
import io
import json
import logging
import zlib
from typing import Any

import pytest

from tests.gateway.fleet import Fleet, RawReplica, chunked, whole
from tests.gateway.test_gateway import EVENT, FINAL

PROMPT = {"text": "hi"}


async def connect(fleet: Fleet) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(fleet.url.rpartition(":")[2]))


async def raw(fleet: Fleet, data: bytes, *, half_close: bool = False) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and the rest of what comes back until the connection ends; 1xx answers are skipped."""
    reader, writer = await connect(fleet)
    try:
        writer.write(data)
        if half_close:
            writer.write_eof()
        got = await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()
    while got.startswith(b"HTTP/1.1 100"):
        got = got.partition(b"\r\n\r\n")[2]
    head, _, body = got.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    return int(lines[0].split()[1]), dict(line.lower().split(": ", 1) for line in lines[1:]), body


def post(body: bytes, *headers: str, path: str = "/generate", version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "host: x", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
    ids=["tls", "words", "version", "header", "length", "two lengths"],
)
async def test_what_is_no_http_is_refused_in_the_envelope_and_not_logged_as_a_failure(
    fleet: Fleet, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await fleet.start("http://127.0.0.1:1", until_ready=0)
    status, headers, body = await raw(fleet, data)
    error = json.loads(body)["error"]
    assert (status, error["type"], error["retryable"]) == (400, "InvalidRequest", False)
    assert headers["content-type"].startswith("application/json")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    ("encoding", "encode", "status"),
    [
        ("gzip", gzip.compress, 200),
        ("x-gzip", gzip.compress, 200),
        ("GZIP", gzip.compress, 200),
        ("deflate", zlib.compress, 200),
        ("deflate", lambda data: zlib.compress(data)[2:-4], 200),
        ("identity", bytes, 200),
        ("gzip", bytes, 400),
        ("gzip", lambda data: gzip.compress(data)[:-9], 400),
        ("br", bytes, 415),
        ("zstd", bytes, 415),
        ("gzip, gzip", bytes, 415),
        ("gzip", lambda data: gzip.compress(b" " * 300_000 + data), 413),
    ],
)
async def test_encodings_are_those_of_a_replica(
    fleet: Fleet, encoding: str, encode: Any, status: int
) -> None:
    server = fleet.add()
    await fleet.start(max_body=200_000)
    data = encode(json.dumps(PROMPT).encode())
    for base in (fleet.url, server.url):
        if status == 413 and base == server.url:
            continue  # its own limit is larger
        request = fleet.session.post(base + "/generate", data=data, headers={"content-encoding": encoding})
        async with request as answer:
            assert answer.status == status, await answer.text()
            if status >= 400:
                assert (await answer.json())["error"]["retryable"] is False
    assert "content-encoding" not in server.engine.headers


@pytest.mark.parametrize("path", ["//generate", "/generate/", "/x/../generate", "/./generate", "/%67enerate"])
async def test_the_spellings_of_a_path_are_one(fleet: Fleet, path: str) -> None:
    fleet.add()
    await fleet.start()
    status, _, _ = await raw(fleet, post(json.dumps(PROMPT).encode(), "connection: close", path=path))
    assert status == 200


@pytest.mark.parametrize(
    "path", ["//flush_cache", "/x/../flush_cache", "/health/../update_weights_from_disk", "/%66lush_cache/"]
)
async def test_no_spelling_leads_past_the_gate(fleet: Fleet, path: str) -> None:
    server = fleet.add()
    await fleet.start()
    status, _, body = await raw(fleet, post(b"{}", "connection: close", path=path))
    assert (status, json.loads(body)["error"]["type"]) == (403, "RouteBlocked")
    assert server.engine.path == ""


async def test_methods(fleet: Fleet) -> None:
    fleet.add()
    await fleet.start()
    async with fleet.session.options(fleet.url + "/generate") as answer:
        assert (answer.status, answer.headers["allow"]) == (204, "POST, OPTIONS")
    async with fleet.session.head(fleet.url + "/health") as answer:
        assert (answer.status, await answer.read()) == (200, b"")
    async with fleet.session.put(fleet.url + "/health") as answer:
        assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD, OPTIONS")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"5", b"null", b"\xff\xfe", b'{"text": "x"', b"[" * 100_000, b'{"a":' * 50_000,
        b'{"text": "x", "rid": 5}', b'{"text": "x", "rid": ""}', b'{"text": "x", "rid": []}',
        b'{"text": "x", "rid": ["a", "a"]}', b'{"text": "x", "rid": {"a": 1}}',
        b'{"text": "x", "rid": "\\ud800"}',
        b'{"n": ' + b"9" * 5000 + b"}",
        b'{"text": "x", "weight_version": {"min_version": 9}, "weight_version": null}',
        b'{"text": "x", "weight_version": {"min_version": 9, "min_version": 0}}',
        b'{"text": "x", "weight_version": {"min_version": NaN}}',
        b'{"text": "x", "weight_version": {"min_version": 1e999}}',
        b'{"text": "x", "weight_version": {"run": "\\ud800"}}',
    ],
)  # fmt: skip
async def test_malformed_json(fleet: Fleet, body: bytes) -> None:
    server = fleet.add()
    await fleet.start()
    async with fleet.session.post(fleet.url + "/generate", data=body) as answer:
        assert (answer.status, (await answer.json())["error"]["type"]) == (400, "InvalidRequest")
    assert server.engine.path == ""


@pytest.mark.slow
async def test_a_body_of_40_mib(fleet: Fleet) -> None:
    server = fleet.add()
    await fleet.start(hold=30.0)
    body = io.BytesIO(json.dumps({"text": "x" * (40 << 20)}).encode())
    async with fleet.session.post(fleet.url + "/generate", data=body) as answer:
        assert answer.status == 200
    assert len(server.engine.seen["text"]) == 40 << 20


# --------------------------------------------------------------------------- clients that half left


async def test_a_client_that_only_stops_sending_gets_its_answer(fleet: Fleet) -> None:
    server = fleet.add()
    server.engine.hang.clear()
    await fleet.start()
    asking = asyncio.ensure_future(raw(fleet, post(json.dumps(PROMPT).encode()), half_close=True))
    await fleet.until(lambda: server.replica.gate.active == 1)
    await asyncio.sleep(0.1)
    server.engine.hang.set()
    status, _, body = await asking
    assert (status, json.loads(body)["meta_info"]["weight_version"]) == (200, "7")


async def test_and_its_stream(fleet: Fleet) -> None:
    server = fleet.add()
    server.engine.pieces = [EVENT, FINAL]
    server.engine.hang.clear()
    await fleet.start()
    reader, writer = await connect(fleet)
    writer.write(post(json.dumps({**PROMPT, "stream": True}).encode()))
    got = b""
    while b"finish_reason" not in got:
        got += await asyncio.wait_for(reader.readuntil(b"\n"), 60)
    writer.write_eof()
    await asyncio.sleep(0.1)
    assert server.replica.gate.active == 1
    server.engine.hang.set()
    got += await asyncio.wait_for(reader.read(), 60)
    assert b"data: [DONE]" in got
    writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_C20_one_that_left_for_good_is_told_apart(fleet: Fleet, stream: bool) -> None:
    server = fleet.add()
    server.engine.pieces = [EVENT] if stream else None
    server.engine.hang.clear()
    await fleet.start()
    _, writer = await connect(fleet)
    writer.write(post(json.dumps({**PROMPT, "stream": stream}).encode()))
    await fleet.until(lambda: server.replica.gate.active == 1)
    await asyncio.sleep(0.05)
    writer.close()
    await fleet.until(lambda: server.replica.gate.active == 0)
    assert server.engine.disconnected


@pytest.mark.parametrize("data", [post(b"{}")[:-1], post(b"{}")[:30], b""])
async def test_half_a_request_is_no_request(fleet: Fleet, data: bytes) -> None:
    fleet.add()
    await fleet.start()
    reader, writer = await connect(fleet)
    writer.write(data)
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()


async def test_one_that_speaks_http_1_0_is_taken_to_have_left(fleet: Fleet) -> None:
    """It may not be sent what tells a client that left from one that waits."""
    server = fleet.add()
    server.engine.hang.clear()
    await fleet.start()
    reader, writer = await connect(fleet)
    writer.write(post(json.dumps(PROMPT).encode(), version="1.0"))
    await fleet.until(lambda: server.replica.gate.active == 1)
    writer.write_eof()
    await fleet.until(lambda: server.replica.gate.active == 0)
    assert await reader.read() == b""
    writer.close()


async def test_a_client_that_takes_nothing_is_cut_and_its_generation_ends(fleet: Fleet) -> None:
    server = fleet.add()
    server.engine.pieces = [b"data: " + b"x" * (1 << 20) + b"\n\n"] * 40
    server.engine.hang.clear()
    await fleet.start(stall=0.3)
    reader, writer = await connect(fleet)
    writer.write(post(json.dumps({**PROMPT, "stream": True}).encode()))
    await fleet.until(lambda: server.replica.gate.active == 1)
    await fleet.until(lambda: server.replica.gate.active == 0)
    assert (await fleet.get("/status"))[1]["in_flight"] == 0
    assert not fleet.gateway.fleet.evictions
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(41 << 20)
    writer.close()


# ------------------------------------------------------------------------------ replicas' bad manners


def compressed(data: bytes, kind: bytes = b"application/json") -> bytes:
    """An answer in gzip and chunked coding, cut up small, that nobody asked for."""
    packed = gzip.compress(data)
    pieces = [packed[i : i + 7] for i in range(0, len(packed), 7)]
    head = (
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: " + kind + b"\r\ncontent-encoding: gzip\r\n"
    )
    head += b"transfer-encoding: chunked\r\nx-stitch-run: r\r\nx-stitch-admitted-version: 7\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"


async def test_a_gzip_and_chunked_upstream(fleet: Fleet) -> None:
    async with RawReplica(compressed(b'{"text": "plain"}')).running() as replica:
        await fleet.start(replica.url, until_ready=1)
        async with fleet.session.post(fleet.url + "/generate", json=PROMPT) as answer:
            assert "content-encoding" not in answer.headers
            assert await answer.read() == b'{"text": "plain"}'


async def test_a_gzip_stream(fleet: Fleet) -> None:
    async with RawReplica(compressed(EVENT + FINAL, b"text/event-stream")).running() as replica:
        await fleet.start(replica.url, until_ready=1)
        async with fleet.session.post(fleet.url + "/generate", json={**PROMPT, "stream": True}) as answer:
            assert await answer.read() == EVENT + FINAL


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        b"\x00\x01\x02",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 999999 What\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: br\r\nx-stitch-run: r\r\nx-stitch-admitted-version: 7\r\n"
        b"content-length: 3\r\n\r\nxyz",
        whole(gzip.compress(b"{}")[:-5]).replace(b"\r\n", b"\r\ncontent-encoding: gzip\r\n", 1),
        whole(b"{}").replace(b"version: 7", b"version: seven"),
        whole(b"{}").replace(b"run: r", b"run: ../r"),
        whole(b'{"error": 5}', b"503 No"),
        whole(b"[" * 50_000, b"503 No"),
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
    ],
)
async def test_garbage_of_a_replica_costs_the_client_time_only(fleet: Fleet, answer: bytes) -> None:
    async with RawReplica(answer).running() as broken:
        fleet.add()
        await fleet.start(broken.url, until_ready=2, poll=30.0)
        for _ in range(6):
            assert (await fleet.post({**PROMPT, "weight_version": {"min_version": 7}}))[0] == 200
        assert broken.requests <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "status", [b"", b"[]", b"5", b'{"ready": 1}', b'{"ready": true, "active_requests": "x"}', b"[" * 50_000,
               b'{"ready": true, "weight_version": [], "run": {}}', b" " * (2 << 20)],
)  # fmt: skip
async def test_a_status_of_garbage_makes_no_replica_ready(fleet: Fleet, status: bytes) -> None:
    class Liar(RawReplica):
        async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            self.requests += 1
            writer.write(whole(status))
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            writer.close()

    async with Liar(b"").running() as liar:
        fleet.add()
        await fleet.start(liar.url, until_ready=1)
        await fleet.until(lambda: liar.requests > 3)
        for _ in range(3):
            assert (await fleet.post({**PROMPT, "weight_version": {"min_version": 1}}))[0] == 200


async def test_an_event_without_an_end_is_bounded(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stitch_gateway.attempt.MOST_EVENT", 1000)
    async with RawReplica(chunked(EVENT, *([b"x" * 600] * 4))).running() as endless:
        await fleet.start(endless.url, until_ready=1, poll=30.0)
        async with fleet.session.post(fleet.url + "/generate", json={**PROMPT, "stream": True}) as answer:
            body = await answer.read()
        assert body.startswith(EVENT)
        assert b"exceeds 1000 bytes" in body


async def test_a_client_slow_with_its_body_is_told(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stitch_gateway.front.BODY_SECONDS", 0.1)
    fleet.add()
    await fleet.start()

    reader, writer = await connect(fleet)
    writer.write(post(json.dumps(PROMPT).encode())[:-3])
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b'"RequestTimeout"' in await reader.readuntil(b"}}")
    writer.close()
