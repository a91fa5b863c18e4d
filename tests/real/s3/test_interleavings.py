"""Two trainers, two readers and a collector on a real server, each behind a network with faults of its own.

No acknowledged version is lost, and no head that a reader sees names bytes that are not there.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from stitch_core.chain import ChainBroken, ChainReader, NoHead
from stitch_core.gathering import all_of
from stitch_core.manifest import Manifest
from stitch_core.ports import NotFound, Store, SystemClock, Unavailable
from stitch_core.publisher import PublishError
from stitch_core.retention import Collector
from stitch_core.retry import Retry
from stitch_core.stores.transfer import verify
from stitch_s3.testing.proxy import FaultProxy, Request, ignore_conditions, random_faults
from stitch_s3.testing.server import ACCESS_KEY, SECRET_KEY, SeaweedServer
from tests.real.s3.publishing import BOOT, check_whole, payload, publisher

pytestmark = pytest.mark.real

QUICK = Retry(attempts=4, first=0.01, cap=0.05)
WORLDS = 10
"""With each rate of faults."""


class World:
    """What happened in one of them."""

    def __init__(self, run: str, scratch: Path) -> None:
        self.run = run
        self.rng = random.Random(run)
        self.scratch = scratch
        self.acknowledged: set[str] = set()
        self.over = False

    async def trainer(self, store: Store, name: str) -> None:
        """Publishes three times, claiming again whenever it has lost the run."""
        writer = publisher(store, self.run, retry=QUICK, deadline=2.0)
        claimed = False
        for number in range(3):
            await asyncio.sleep(self.rng.uniform(0, 0.05))
            try:
                if not claimed:
                    await writer.claim(BOOT)
                    claimed = True
                full = self.rng.random() < 0.5
                made = payload(
                    self.scratch,
                    writer,
                    f"{name} {number}",
                    full=full,
                    sizes=(10, self.rng.choice((0, 5000))),
                )
                self.acknowledged.add((await writer.publish(made)).digest())
            except (PublishError, Unavailable):
                claimed = False

    async def reader(self, store: Store) -> None:
        """What the head names is there, or the head has moved on far enough for the collector meanwhile."""
        seen = -1
        while not self.over:
            await asyncio.sleep(self.rng.uniform(0, 0.4))
            with contextlib.suppress(Unavailable, NoHead):
                newest = await self._newest(store)
                assert newest.number >= seen, "the head went down"
                seen = newest.number
                try:
                    for file in newest.representation.files:
                        key = newest.file_key(file.name)
                        await verify(store, key, file.size, file.sha256, policy=QUICK)
                except NotFound:
                    now = await self._newest(store)
                    assert now.floor is not None or now.representation.kind == "full"
                    assert now.number > newest.number, f"the head names {newest.key}, whose files are gone"

    async def _newest(self, store: Store) -> Manifest:
        chain = ChainReader(store)
        head, _ = await chain.head(self.run)
        return await chain.manifest(self.run, head)

    async def collector(self, store: Store) -> None:
        clock = SystemClock()
        while not self.over:
            await asyncio.sleep(self.rng.uniform(0.2, 0.8))
            with contextlib.suppress(Unavailable, NoHead):
                await Collector(store, self.run, clock=clock, rng=self.rng, grace=0.2, policy=QUICK).collect()


async def interleave(world: World, stores: list[Store], proxies: list[FaultProxy]) -> None:
    watching = [asyncio.ensure_future(world.reader(store)) for store in stores[2:4]]
    watching.append(asyncio.ensure_future(world.collector(stores[4])))
    try:
        trainers = zip(stores, "ab", strict=False)
        await all_of([functools.partial(world.trainer, store, name) for store, name in trainers], 2)
        await asyncio.gather(*(proxy.landed() for proxy in proxies))
        world.over = True
        await asyncio.gather(*watching)
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


async def check(world: World, store: Store) -> None:
    try:
        head = (await check_whole(store, world.run, lowest=10**9))[0]
    except NoHead:
        assert not world.acknowledged
        return
    # Below its floor a collector may have been; from there on all must be whole.
    chain = await check_whole(store, world.run, head.floor.number if head.floor else head.number)
    missing = world.acknowledged - {manifest.digest() for manifest in chain}
    assert not missing, f"{world.run}: acknowledged and lost"


async def run_worlds(
    server: SeaweedServer,
    prefix: str,
    scratch: Path,
    rate: float,
    change: Callable[[Request], None] = lambda request: None,
) -> tuple[int, int]:
    """Versions acknowledged and faults met by ten worlds at a time, a run each.

    All at once because contended writers wait for a second on this server.
    """
    async with contextlib.AsyncExitStack() as stack:
        proxies, stores = [], []
        for number in range(5):
            plan = random_faults(random.Random(f"{rate} {number}"), rate)
            proxy = FaultProxy(server.endpoint, plan, change=change, late=0.1)
            proxies.append(await stack.enter_async_context(proxy))
            stores.append(server.store(prefix, proxies[-1].endpoint))
            stack.push_async_callback(stores[-1].close)
        worlds = [World(f"run-{rate}-{number}", scratch) for number in range(WORLDS)]
        await all_of([functools.partial(interleave, world, stores, proxies) for world in worlds], WORLDS)
        store = server.store(prefix)
        stack.push_async_callback(store.close)
        await asyncio.gather(*(check(world, store) for world in worlds))
        return sum(len(world.acknowledged) for world in worlds), sum(
            proxy.faults.total() for proxy in proxies
        )


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.25])
async def test_interleavings(server: SeaweedServer, prefix: str, tmp_path: Path, rate: float) -> None:
    acknowledged, faults = await run_worlds(server, prefix, tmp_path, rate)
    assert acknowledged > WORLDS
    assert faults > 1000 * rate


async def test_a_server_that_ignores_conditions_is_seen(
    server: SeaweedServer, prefix: str, tmp_path: Path
) -> None:
    """The worlds above would notice what they are there for."""
    with pytest.raises((AssertionError, ChainBroken)):
        await run_worlds(server, prefix, tmp_path, 0.02, ignore_conditions(ACCESS_KEY, SECRET_KEY))
