"""The view of a pool: one that forgets its replicas (case C18, promise 5), and the end of following it."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Collection, Sequence

import aiohttp

from stitch_core.ports import ReplicaAddress
from stitch_gateway.fleet import Fleet
from tests.gateway.fleet import RawReplica, Server


class ForgetfulPool:
    def __init__(self, *replicas: ReplicaAddress) -> None:
        self.found = list(replicas)

    async def replicas(self, doubted: Collection[str] = ()) -> Sequence[ReplicaAddress]:
        return self.found

    async def close(self) -> None:
        return


async def with_view(server: Server, play: Callable[[Fleet, ForgetfulPool], Awaitable[None]]) -> None:
    server.serves(7)
    pool = ForgetfulPool(ReplicaAddress("a", server.url))
    async with aiohttp.ClientSession() as session:
        fleet = Fleet(pool, session, random.Random(0), interval=0.01, refresh=0.01)
        following = asyncio.create_task(fleet.run())
        try:
            async with asyncio.timeout(60):
                while not any(replica.ready for replica in fleet.replicas):
                    await fleet.changed.wait()
                await play(fleet, pool)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await server.close()


async def ids(fleet: Fleet, *expected: str) -> None:
    while {replica.id for replica in fleet.replicas} != set(expected):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_C18_who_answers_stays_until_it_does_not() -> None:
    async def play(fleet: Fleet, pool: ForgetfulPool) -> None:
        pool.found.clear()
        await asyncio.sleep(0.1)
        assert [replica.id for replica in fleet.replicas if replica.ready] == ["a"]
        await server.close()
        await ids(fleet)

    server = Server()
    await with_view(server, play)


async def test_who_comes_back_under_another_name_is_not_there_twice() -> None:
    async def play(fleet: Fleet, pool: ForgetfulPool) -> None:
        pool.found[:] = [ReplicaAddress("b", server.url)]
        await ids(fleet, "b")

    server = Server()
    await with_view(server, play)


async def test_a_probe_that_was_late_as_it_was_cancelled_went_on_for_ever() -> None:
    """After a stall of the machine both were due in one turn, and the cancellation was lost."""
    asked = asyncio.Queue[None]()

    class Silent(RawReplica):
        async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            asked.put_nowait(None)
            await reader.read()
            writer.close()

    async with Silent().running() as silent, aiohttp.ClientSession() as session:
        pool = ForgetfulPool(ReplicaAddress("a", silent.url))
        fleet = Fleet(pool, session, random.Random(0), interval=0.01, timeout=0.3)
        following = asyncio.create_task(fleet.run())
        await asked.get()
        await asyncio.sleep(0.05)
        asyncio.get_running_loop().call_later(0.4, fleet._probes["a"].cancel)
        time.sleep(0.6)  # noqa: ASYNC251
        await asyncio.gather(fleet._probes["a"], return_exceptions=True)
        await asyncio.sleep(0.5)
        assert asked.empty()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
