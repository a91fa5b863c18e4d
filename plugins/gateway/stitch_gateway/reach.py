"""What a gateway tells replicas, and other gateways, beside the requests that it routes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp

from stitch_core.ports import Pool
from stitch_core.versions import VersionConstraint

from .attempt import FAILURES
from .fleet import Fleet
from .routing import Replica, behind

# On what one gateway passes to another, which passes it no further.
HEADER_FORWARDED = "x-stitch-forwarded"
# Replicas are woken for requests that wait at most this often (seconds), so many of them at once: each then
# reads the store.
WAKE_EVERY, MOST_WOKEN = 1.0, 100
# Seconds that a replica gets to take a wake: a publisher waits twice as long for the gateway.
WAKE_SECONDS = 1.0


class Reach:
    """Posts, best effort; owned by one event loop."""

    def __init__(
        self, fleet: Fleet, session: aiohttp.ClientSession, timeout: float, peers: Pool | None = None
    ) -> None:
        """``timeout``: seconds of one post. ``peers``: the other gateways; this one may be among them."""
        self._fleet = fleet
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._peers = peers
        self._wanted: set[VersionConstraint] = set()
        self._waking: asyncio.Task[None] | None = None
        self._round: asyncio.Task[int] | None = None
        self._next_round: asyncio.Task[int] | None = None

    async def close(self) -> None:
        """Ends what is under way."""
        tasks = [task for task in (self._waking, self._round, self._next_round) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def everyone(self, path: str, body: dict[str, Any]) -> int:
        """POST to every replica; how many took it. Those that are gone have nothing to abort."""
        posts = [self.one(replica.url, path, body, replica.headers) for replica in self._fleet.replicas]
        return sum(await asyncio.gather(*posts))

    async def wake_all(self) -> int:
        """Tell every replica that lives to look at the store now; how many took it.

        Whoever asks while that is under way shares the next round with all who do: each costs a request for
        every replica, and the store one.
        """
        if self._next_round is None:
            self._next_round = asyncio.ensure_future(self._wake_round(self._round))
        return await asyncio.shield(self._next_round)  # whoever asked may have left

    async def _wake_round(self, before: asyncio.Task[int] | None) -> int:
        if before is not None:
            await asyncio.wait([before])
        self._round, self._next_round = self._next_round, None
        limit = asyncio.Semaphore(MOST_WOKEN)

        async def post(replica: Replica) -> bool:
            async with limit:
                return await self.one(replica.url, "/wake", {}, replica.headers, WAKE_SECONDS)

        return sum(await asyncio.gather(*(post(each) for each in self._fleet.replicas if each.alive)))

    async def one(
        self,
        url: str,
        path: str,
        body: dict[str, Any],
        headers: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> bool:
        """POST, for ``seconds`` where that is given; whether it was taken."""
        timeout = self._timeout if seconds is None else aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._session.post(
                url + path, json=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                return answer.status < 300
        except FAILURES:
            return False

    async def other_gateways(self, path: str, body: dict[str, Any], headers: Mapping[str, str]) -> int:
        """POST to every other gateway; how many took it."""
        if self._peers is None or HEADER_FORWARDED in headers:
            return 0
        try:
            async with asyncio.timeout(self._timeout.total):
                found = await self._peers.replicas()
        except Exception:  # a pool that fails must not take the abort down
            return 0
        passed = {HEADER_FORWARDED: "1"}
        if "authorization" in headers:
            passed["authorization"] = headers["authorization"]
        posts = (self.one(peer.url, path, body, {**passed, **peer.headers}) for peer in found)
        return sum(await asyncio.gather(*posts))

    def wake(self, constraint: VersionConstraint) -> None:
        """A request waits for this: tell the replicas that may get there to look at the store now."""
        self._wanted.add(constraint)
        if self._waking is None or self._waking.done():
            self._waking = asyncio.ensure_future(self._wake())

    async def _wake(self) -> None:
        while self._wanted:
            wanted, self._wanted = self._wanted, set()
            late = [r for r in self._fleet.replicas if r.alive and any(behind(r, each) for each in wanted)]
            for first in range(0, max(1, len(late)), MOST_WOKEN):
                some = late[first : first + MOST_WOKEN]
                await asyncio.gather(*(self.one(each.url, "/wake", {}, each.headers) for each in some))
                await asyncio.sleep(WAKE_EVERY)
