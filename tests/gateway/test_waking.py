"""A publisher wakes the fleet through its gateway: every replica, at once, and not with more requests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from stitch_core.policy_publisher import PolicyPublisher
from stitch_core.replica.auth import Tokens, parse_tokens
from stitch_core.stores.memory import MemoryStore
from stitch_core.waking import VARIABLE
from stitch_gateway.reach import MOST_WOKEN, Reach
from stitch_gateway.routing import Replica
from tests.gateway.fleet import Fleet, RawReplica
from tests.small_run import Trainer

WAKES, READS = "wakes-0123456789abcdef", "reads-0123456789abcdef"


@contextlib.asynccontextmanager
async def publishing(trainer: Trainer, *urls: str) -> AsyncIterator[PolicyPublisher]:
    made = await asyncio.to_thread(
        lambda: PolicyPublisher(
            MemoryStore, trainer.run, trainer.boot, trainer.root / "work", producer={}, wake=urls
        )
    )
    try:
        yield made
    finally:
        await asyncio.to_thread(made.close)


async def publish(publisher: PolicyPublisher, trainer: Trainer) -> int:
    published = await asyncio.to_thread(lambda: publisher.publish(trainer.learn()).result(60))
    return published.number


async def test_a_new_version_wakes_every_replica(fleet: Fleet, tmp_path: Path) -> None:
    servers, trainer = [fleet.add(7), fleet.add(7), fleet.add(7)], Trainer(tmp_path)
    await fleet.start("http://127.0.0.1:1", until_ready=3)
    async with publishing(trainer, fleet.url) as publisher:
        for number in (1, 2):
            assert await publish(publisher, trainer) == number
            await fleet.until(lambda number=number: all(s.replica.wakes == number for s in servers))  # type: ignore[misc]


@pytest.mark.parametrize("token", [WAKES, READS, None])
async def test_a_gateway_with_tokens_wants_one_of_the_role_generate(
    fleet: Fleet,
    tmp_path: Path,
    token: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server, trainer = fleet.add(7), Trainer(tmp_path)
    grants = parse_tokens(f"generate {WAKES}\nread {READS}", "test")
    await fleet.start(tokens=Tokens(lambda: grants))
    if token is not None:
        monkeypatch.setenv(VARIABLE, token)
    async with publishing(trainer, fleet.url) as publisher:
        assert await publish(publisher, trainer) == 1
        if token == WAKES:
            await fleet.until(lambda: server.replica.wakes == 1)
    assert server.replica.wakes == (token == WAKES)
    assert ("role generate" in caplog.text) == (token != WAKES)


async def test_a_replica_that_hangs_keeps_no_other_from_being_woken(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hangs(RawReplica):
        async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST"):
                self.requests += 1
                return  # and the connection stays
            body = b'{"ready": true, "run": "r", "weight_version": "7", "active_requests": 0}'
            answer = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: application/json\r\n"
            writer.write(answer + b"content-length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
            writer.close()

    servers, trainer = [fleet.add(7), fleet.add(7)], Trainer(tmp_path)
    async with Hangs().running() as hung:
        await fleet.start(hung.url, until_ready=3)
        async with publishing(trainer, fleet.url) as publisher:
            assert await publish(publisher, trainer) == 1
            await fleet.until(lambda: all(s.replica.wakes == 1 for s in servers) and hung.requests == 1)


async def test_who_asks_while_a_round_is_under_way_shares_the_next() -> None:
    begun, go, woken = asyncio.Event(), asyncio.Event(), []

    class Slow(Reach):
        async def one(self, url: str, *_: Any, **__: Any) -> bool:
            woken.append(url)
            begun.set()
            await go.wait()
            return True

    replica = Replica("a", "http://a", {})
    replica.alive = True
    async with aiohttp.ClientSession() as session:
        reach = Slow(SimpleNamespace(replicas=[replica]), session, 5.0)  # type: ignore[arg-type]
        first = [asyncio.ensure_future(reach.wake_all()) for _ in range(20)]
        await begun.wait()
        later = [asyncio.ensure_future(reach.wake_all()) for _ in range(20)]
        await asyncio.sleep(0)
        later[0].cancel()  # its client has left
        go.set()
        assert await asyncio.gather(*first, *later[1:]) == [1] * 39
        assert len(woken) == 2
        assert await reach.wake_all() == 1
        await reach.close()


async def test_no_more_than_so_many_at_once() -> None:
    replicas = [Replica(str(i), f"http://{i}", {}) for i in range(3 * MOST_WOKEN)]
    for number, replica in enumerate(replicas):
        replica.alive = number >= MOST_WOKEN // 2
    running = most = 0
    woken = []

    class Counting(Reach):
        async def one(self, url: str, *_: Any, **__: Any) -> bool:
            nonlocal most, running
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            woken.append(url)
            return True

    async with aiohttp.ClientSession() as session:
        reach = Counting(SimpleNamespace(replicas=replicas), session, 5.0)  # type: ignore[arg-type]
        assert await reach.wake_all() == 3 * MOST_WOKEN - MOST_WOKEN // 2
        await reach.close()
    assert most == MOST_WOKEN
    assert len(set(woken)) == len(woken)
