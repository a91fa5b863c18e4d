"""Clients that send a byte now and then keep a connection for seconds, not for hours."""

import asyncio
import contextlib
import json

import pytest

from tests.gateway.fleet import Fleet
from tests.gateway.test_wire import PROMPT, connect, post, raw

HEAD = b"POST /generate HTTP/1.1\r\nhost: x\r\n"


async def drip(writer: asyncio.StreamWriter, data: bytes) -> None:
    """A byte every 20 ms."""
    for byte in data:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.02)


async def answered(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """The status line and the rest, to the end of the connection."""
    status, _, rest = (await asyncio.wait_for(reader.read(), 60)).partition(b"\r\n")
    return status, rest


async def test_a_head_has_a_deadline_however_it_drips(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stitch_gateway.connection.HEAD_SECONDS", 0.2)
    await fleet.start("http://127.0.0.1:1", until_ready=0)
    reader, writer = await connect(fleet)
    dripping = asyncio.ensure_future(drip(writer, HEAD + b"x-long: " + b"y" * 1000))
    with contextlib.suppress(ConnectionResetError):  # of a byte that came after the end
        status, rest = await answered(reader)
        assert status == b"HTTP/1.1 408 Request Timeout"
        assert json.loads(rest.partition(b"\r\n\r\n")[2])["error"]["type"] == "RequestTimeout"
    assert not dripping.done()
    dripping.cancel()
    writer.close()


async def test_also_behind_a_whole_request(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stitch_gateway.connection.HEAD_SECONDS", 0.2)
    fleet.add()
    await fleet.start()
    reader, writer = await connect(fleet)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    await reader.readuntil(b"}")
    writer.write(HEAD)
    assert (await answered(reader))[0] == b"HTTP/1.1 408 Request Timeout"
    writer.close()


async def test_the_deadline_of_a_head_is_none_of_its_answer(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stitch_gateway.connection.HEAD_SECONDS", 0.1)
    server = fleet.add()
    server.engine.hang.clear()
    await fleet.start()
    data = post(json.dumps(PROMPT).encode(), "connection: close")
    reader, writer = await connect(fleet)
    writer.write(data[:20])
    await asyncio.sleep(0.03)
    writer.write(data[20:])
    await fleet.until(lambda: server.replica.gate.active == 1)
    await asyncio.sleep(0.2)
    server.engine.hang.set()
    assert (await answered(reader))[0] == b"HTTP/1.1 200 OK"
    writer.close()


@pytest.mark.parametrize(
    "fields",
    [b"x: " + b"y" * 20_000 + b"\r\n", b"".join(b"x-%d: y\r\n" % i for i in range(300))],
    ids=["long", "many"],
)
async def test_large_heads_are_431(fleet: Fleet, fields: bytes) -> None:
    await fleet.start("http://127.0.0.1:1", until_ready=0)
    status, _, body = await raw(fleet, b"GET /health HTTP/1.1\r\nhost: x\r\n" + fields + b"\r\n")
    assert (status, json.loads(body)["error"]["type"]) == (431, "HeadersTooLarge")


async def test_a_target_without_end_is_431_too(fleet: Fleet) -> None:
    await fleet.start("http://127.0.0.1:1", until_ready=0)
    status, _, body = await raw(fleet, b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (status, json.loads(body)["error"]["type"]) == (431, "HeadersTooLarge")


async def test_hundreds_of_halves_hurt_nobody(fleet: Fleet) -> None:
    fleet.add()
    await fleet.start()
    halves = await asyncio.gather(*(connect(fleet) for _ in range(100)))
    for _, writer in halves:
        writer.write(HEAD)
    for _ in range(3):
        assert (await fleet.post(PROMPT))[0] == 200
    for _, writer in halves:
        writer.close()
