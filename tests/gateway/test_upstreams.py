"""What replicas may answer: passed on as it is, refused, or tried elsewhere, and never believed."""

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from stitch_core.provenance import SUFFIX
from tests.gateway.fleet import Fleet, RawReplica, chunked, whole
from tests.gateway.test_gateway import EVENT
from tests.gateway.test_wire import PROMPT, connect

MEBIBYTE = 1 << 20
DEEP = 50_000
ODD = {
    "NaN": b'{"text": "x", "meta_info": {"logprob": NaN, "most": Infinity}}',
    "half a surrogate pair": b'{"text": "\\ud800"}',
    "no UTF-8": b'{"text": "\xff"}',
    "a name twice": b'{"text": "a", "text": "b", "meta_info": {}, "meta_info": {"weight_version_start": 7}}',
    "deep": b"[" * DEEP + b"]" * DEEP,
    "deep meta_info": b'{"meta_info": {"weight_version_start": ' + b"[" * DEEP + b"]" * DEEP + b"}}",
    "not JSON": b"weight_version_start",
    "nothing": b"",
}


@pytest.mark.parametrize("name", ODD)
async def test_an_answer_is_passed_on_to_the_byte(fleet: Fleet, tmp_path: Path, name: str) -> None:
    """The gateway does not read answers; what logs their versions afterwards must bear them."""
    async with RawReplica(whole(ODD[name])).running() as replica:
        await fleet.start(replica.url, until_ready=1, provenance=tmp_path)
        async with fleet.session.post(fleet.url + "/generate", json=PROMPT) as answer:
            assert (answer.status, await answer.read()) == (200, ODD[name])
        event = b"data: " + ODD[name] + b"\n\n"
        replica.answers = [chunked(event) + b"0\r\n\r\n"]
        async with fleet.session.post(fleet.url + "/generate", json={**PROMPT, "stream": True}) as answer:
            assert (answer.status, await answer.read()) == (200, event)
        log = fleet.gateway.dispatcher.attempt.log
        assert log is not None
        await fleet.until(lambda: log.written == 2)
        assert log.dropped == 0
    lines = [
        json.loads(line) for file in tmp_path.glob(f"*{SUFFIX}") for line in file.read_text().splitlines()
    ]
    assert len(lines) >= 2


@pytest.mark.parametrize("status", [b"301 Moved", b"302 Found", b"307 Temporary Redirect", b"308 Permanent"])
async def test_nobody_is_sent_where_an_answer_points_to(fleet: Fleet, status: bytes) -> None:
    """Redirects were followed: a prompt, and the request's headers, went to wherever a replica said."""
    async with RawReplica(whole(b'{"stolen": true}')).running() as elsewhere:
        location = b"\r\nlocation: " + elsewhere.url.encode() + b"/generate\r\n"
        answer = whole(b"", status).replace(b"\r\n", location, 1)
        async with RawReplica(answer).running() as broken:
            fleet.add()
            await fleet.start(broken.url, until_ready=2, poll=30.0)
            for _ in range(6):
                assert (await fleet.post({**PROMPT, "weight_version": {"min_version": 7}}))[0] == 200
            assert broken.requests <= 1
        assert elsewhere.requests == 0


class Listing(RawReplica):
    """Answers ``/v1/models`` with the first of its answers; ready all the same."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"GET /v1/models"):
            await super()._serve(_again(head), writer)
            return
        self.requests += 1
        writer.write(self.answers[0])
        writer.close()


def _again(head: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(head)
    reader.feed_eof()
    return reader


@pytest.mark.parametrize(
    "models",
    [b"", whole(b" " * (2 << 20)), whole(b"{}", b"302 Found").replace(b"\r\n", b"\r\nlocation: /x\r\n", 1),
     whole(b"{}", b"500 No"), whole(b"x").replace(b"\r\n", b"\r\ncontent-encoding: gzip\r\n", 1)],
    ids=["nothing", "endless", "moved", "error", "garbled"],
)  # fmt: skip
async def test_models_are_told_by_one_that_can(fleet: Fleet, models: bytes) -> None:
    async with Listing(models).running() as broken:
        server = fleet.add()
        server.engine.body = {"object": "list", "data": []}
        await fleet.start(broken.url, until_ready=2)
        for replica in fleet.gateway.fleet.replicas:
            replica.others = 0 if replica.url == broken.url else 5  # the broken one is asked first
        assert await fleet.get("/v1/models") == (200, {"object": "list", "data": []})


async def test_a_cookie_of_a_replica_is_nobodys(fleet: Fleet) -> None:
    seen: list[bytes] = []

    class Baker(RawReplica):
        async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            seen.append(head)
            await super()._serve(_again(head), writer)

    answer = whole(b"{}").replace(b"\r\n", b"\r\nset-cookie: who=one; path=/\r\n", 1)
    async with Baker(answer).running() as baker:
        await fleet.start(baker.url.replace("127.0.0.1", "localhost"), until_ready=1)
        for _ in range(2):
            async with fleet.session.post(fleet.url + "/generate", json=PROMPT) as got:
                assert "set-cookie" not in got.headers
    assert not [head for head in seen if b"cookie" in head.lower()]


def squeezed(size: int, kind: bytes) -> bytes:
    data = gzip.compress(b" " * size)
    head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-encoding: gzip\r\ncontent-type: " + kind
    head += b"\r\nx-stitch-run: r\r\nx-stitch-admitted-version: 7\r\ncontent-length: %d\r\n\r\n" % len(data)
    return head + data


async def test_a_few_bytes_that_stand_for_very_many_are_not_unpacked(fleet: Fleet) -> None:
    async with RawReplica(squeezed(64 * MEBIBYTE, b"application/json")).running() as replica:
        await fleet.start(replica.url, until_ready=1, max_response=MEBIBYTE)
        status, value = await fleet.post(PROMPT)
        assert (status, value["error"]["type"]) == (502, "ResponseTooLarge")


async def test_nor_in_a_stream(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stitch_gateway.attempt.MOST_EVENT", 4 * MEBIBYTE)
    async with RawReplica(squeezed(64 * MEBIBYTE, b"text/event-stream")).running() as replica:
        fleet.add()
        await fleet.start(replica.url, until_ready=2, poll=30.0)
        for _ in range(4):
            status, _ = await fleet.post(PROMPT)
            assert status == 200


@pytest.mark.slow
async def test_an_answer_of_100_mb(fleet: Fleet) -> None:
    data = b'{"text": "' + b"x" * (100 * MEBIBYTE) + b'"}'
    async with RawReplica(whole(data)).running() as replica:
        await fleet.start(replica.url, until_ready=1)
        async with fleet.session.post(fleet.url + "/generate", json=PROMPT) as answer:
            assert answer.status == 200
            assert await answer.read() == data


@pytest.mark.slow
@pytest.mark.parametrize("length", [True, False])
async def test_a_request_of_100_mb_is_refused_before_it_has_come(fleet: Fleet, length: bool) -> None:
    server = fleet.add()
    await fleet.start()
    reader, writer = await connect(fleet)
    how = b"content-length: %d" % (100 * MEBIBYTE) if length else b"transfer-encoding: chunked"
    writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\n" + how + b"\r\n\r\n")
    piece = b"x" * MEBIBYTE if length else b"%x\r\n%s\r\n" % (MEBIBYTE, b"x" * MEBIBYTE)

    async def send() -> int:
        for sent in range(100):
            writer.write(piece)
            try:
                await writer.drain()
            except ConnectionError:
                return sent
        return 100

    sending = asyncio.ensure_future(send())
    status = await asyncio.wait_for(reader.readline(), 30)
    assert status == b"HTTP/1.1 413 Request Entity Too Large\r\n"
    writer.close()
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    assert server.engine.path == ""
    assert (await fleet.post(PROMPT))[0] == 200


@pytest.mark.parametrize("cut", [b"", b"data: {", b"da", b"data: {}\n", b": \n"])
async def test_a_stream_that_is_cut_anywhere_says_so_in_an_event_of_its_own(fleet: Fleet, cut: bytes) -> None:
    async with RawReplica(chunked(EVENT + cut)).running() as replica:
        await fleet.start(replica.url, until_ready=1, poll=30.0)
        async with fleet.session.post(fleet.url + "/generate", json={**PROMPT, "stream": True}) as answer:
            body = await answer.read()
    events = [event for event in body.split(b"\n\n") if event]
    assert events[0] + b"\n\n" == EVENT
    error: Any = json.loads(events[-1].removeprefix(b"data: "))["error"]
    assert (error["type"], len(events)) == ("EngineUnavailable", 2)
