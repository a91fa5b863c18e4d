"""Clients that read answers slowly, or not at all: the gate waits for the engine, never for them (C83)."""

import asyncio
import contextlib
import json
from typing import Any

import pytest

from stitch_core.ports import SystemClock
from stitch_core.replica import server
from stitch_core.replica.admission import Gate
from stitch_core.replica.middleware import StitchMiddleware
from stitch_core.replica.outbox import PIECE, STALL_SECONDS, Kept, Outbox
from stitch_core.versions import PolicyVersion
from tests.replica.scripted import Replica, ScriptedEngine, generated, span

PROMPT = {"text": "hi", "stream": True}
PINNED = {**PROMPT, "weight_version": {"exact_version": 7}}
LEAVE = {"pins_only": True}
SWITCH = {"pins_only": False}


def event(value: Any) -> bytes:
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()


def partial(text: str = "x") -> bytes:
    return event({"text": text, "meta_info": {"id": "e", "finish_reason": None, "completion_tokens": 1}})


END = event(generated(span(7, 0, 3))) + event("[DONE]")


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.virtual_time
@pytest.mark.parametrize(("body", "how"), [(PINNED, LEAVE), (PROMPT, SWITCH)], ids=["pin", "switch"])
async def test_C83_a_drain_waits_for_the_engine_and_not_for_its_client(
    body: dict[str, Any], how: dict[str, bool]
) -> None:
    replica = Replica()
    replica.engine.pieces = [partial("a"), partial("ab"), END]
    replica.engine.hang.clear()
    call = replica.client.start("POST", "/generate", body)
    call.stop_reading()
    await replica.engine.called.wait()
    loop = asyncio.get_running_loop()
    draining = asyncio.ensure_future(replica.gate.drain(loop.time() + 600, **how))
    await asyncio.sleep(10)
    assert not draining.done()  # the engine computes
    replica.engine.hang.set()
    began = loop.time()
    assert await draining == []
    assert (loop.time(), replica.gate.active) == (began, 0)
    # What was computed is the client's all the same.
    await asyncio.sleep(STALL_SECONDS / 2)
    assert call.body == b""
    call.read_on()
    await call.finished()
    assert [one if one == "[DONE]" else one["text"] for one in call.events()] == ["a", "ab", "xxx", "[DONE]"]
    assert not replica.aborted


@pytest.mark.virtual_time
async def test_C83_a_generation_whose_client_takes_nothing_is_given_up() -> None:
    """However long the engine would go on, and without a word from the client's host."""
    replica = Replica()
    replica.engine.pieces = [partial()]
    replica.engine.hang.clear()
    replica.engine.deaf = True
    call = replica.client.start("POST", "/generate", {**PINNED, "rid": "q"})
    call.stop_reading()
    await replica.engine.called.wait()
    loop = asyncio.get_running_loop()
    assert await replica.gate.drain(loop.time() + 600, pins_only=True) == []
    assert loop.time() < STALL_SECONDS + 10
    assert replica.aborted == ["~~q~"]
    await call.finished()
    assert not call.complete


@pytest.mark.virtual_time
async def test_what_is_kept_is_bounded_and_then_the_engine_waits() -> None:
    replica = Replica()
    replica.app._kept.most = 5000
    replica.engine.pieces = [partial("x" * 1000)] * 20 + [END]
    calls = [replica.client.start("POST", "/generate", PROMPT) for _ in range(2)]
    for call in calls:
        call.stop_reading()
    await settle()
    assert replica.gate.active == 2
    assert 5000 < replica.app._kept.bytes < 8000
    calls[0].read_on()
    await calls[0].finished()
    assert len(calls[0].events()) == 22
    await calls[1].finished(2 * STALL_SECONDS)  # for this one the engine does not wait for ever
    assert not calls[1].complete
    assert (replica.gate.active, replica.app._kept.bytes) == (0, 0)


@pytest.mark.virtual_time
async def test_who_reads_slowly_gets_all_of_it() -> None:
    replica = Replica()
    replica.engine.pieces = [partial(str(number)) for number in range(500)] + [END]
    call = replica.client.start("POST", "/generate", PROMPT)
    while not call.complete:
        call.stop_reading()
        await asyncio.sleep(STALL_SECONDS * 0.9)
        call.read_on()
        await settle()
    assert [one["text"] for one in call.events()[:-2]] == [str(number) for number in range(500)]


@pytest.mark.virtual_time
async def test_a_replica_that_ends_waits_for_clients_up_to_its_deadline() -> None:
    replica = Replica()
    loop = asyncio.get_running_loop()
    for reads in (True, False):
        call = replica.client.start("POST", "/generate", {"text": "hi"})
        call.stop_reading()
        await settle()
        assert replica.gate.active == 0
        leaving = asyncio.ensure_future(replica.gate.empty(began := loop.time() + 30))
        await asyncio.sleep(10)
        assert not leaving.done()
        if reads:
            call.read_on()
        await leaving
        assert (loop.time() < began) == reads
        assert call.complete == reads
        call.disconnect()
        await call.finished()


@pytest.mark.virtual_time
async def test_pieces_are_joined_and_stay_in_order() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    kept = Kept()
    outbox = Outbox(send, kept)
    await outbox.put({"type": "http.response.start", "status": 200})
    parts = [bytes([number]) * (PIECE // 3) for number in range(7)]
    for part in parts:
        await outbox.put({"type": "http.response.body", "body": part, "more_body": True})
    await outbox.put({"type": "http.response.body", "body": b"", "more_body": False})
    outbox.close()
    assert kept.bytes == 7 * (PIECE // 3)
    await outbox.run()
    assert kept.bytes == 0
    assert b"".join(message.get("body", b"") for message in sent) == b"".join(parts)
    assert [message.get("more_body") for message in sent] == [None, True, False]
    await outbox.put({"type": "http.response.body", "body": b"late", "more_body": False})
    await outbox.wait()
    assert (kept.bytes, len(sent)) == (0, 3)


class Held:
    """A transport that holds this many bytes, at one look after the other."""

    def __init__(self, *sizes: int) -> None:
        self._sizes = iter(sizes)

    def get_write_buffer_size(self) -> int:
        return next(self._sizes)


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("sizes", "after"), [((9, 9), 60), ((300, 200, 100, 99, 99), 240), ((9, 10), 60), ((9, 8, 7), None)]
)
async def test_a_connection_is_cut_for_taking_nothing_and_not_for_being_slow(
    sizes: tuple[int, ...], after: int | None
) -> None:
    loop, cut = asyncio.get_running_loop(), asyncio.Event()
    watch = server.StallWatch(60, cut.set)
    watch.start(Held(*sizes))  # type: ignore[arg-type]
    if after is None:
        await asyncio.sleep(150)
        watch.stop()
        await asyncio.sleep(1000)
        assert not cut.is_set()
    else:
        await cut.wait()
        assert loop.time() == after


# --------------------------------------------------------------------------------------- real sockets


class Served:
    """The middleware on a socket. Buffers are small, so that a few MiB do not fit into them."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine()
        self.engine.pieces = [partial("x" * 100_000)] * 200 + [END]
        self.gate = Gate(SystemClock())
        self.gate.open(PolicyVersion("r", 7))
        app = StitchMiddleware(
            self.engine,
            self.gate,
            status=dict,
            wake=lambda: None,
            mismatch=self.gate.forget,
            abort=self._abort,
        )
        self.aborted: list[str] = []
        self.listener = server.listen("127.0.0.1", 0)
        self._end = asyncio.Event()
        self._serving = asyncio.ensure_future(server.serve(app, self.listener, self._end, grace=1))

    async def _abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def ask(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A client that has read nothing of its stream yet."""
        port = self.listener.getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        body = json.dumps(PINNED).encode()
        head = (
            f"POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        async with asyncio.timeout(60):
            await self.engine.called.wait()
        return reader, writer

    async def close(self) -> None:
        self._end.set()
        await self._serving
        self.listener.close()


@pytest.fixture
async def served() -> Any:
    made = Served()
    yield made
    await made.close()


async def test_C83_on_a_socket_whose_client_reads_nothing(served: Served) -> None:
    reader, writer = await served.ask()
    async with asyncio.timeout(60):
        assert await served.gate.drain(SystemClock().monotonic() + 3600, pins_only=True) == []
        whole = await reader.read()
    assert whole.count(b'"finish_reason"') == 201
    assert whole.rstrip().endswith(b"0")
    assert b"data: [DONE]" in whole[-100:]
    writer.close()


async def test_a_socket_whose_client_takes_nothing_is_closed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection too, not only the request: it would last as long as the client's host."""
    monkeypatch.setattr(server, "STALL_SECONDS", 0.2)
    served.engine.hang.clear()
    reader, writer = await served.ask()
    async with asyncio.timeout(60):
        assert await served.gate.drain(SystemClock().monotonic() + 3600, pins_only=True) == []
        with contextlib.suppress(ConnectionError):
            assert b"[DONE]" not in await reader.read()
    assert served.engine.disconnected
    writer.close()
