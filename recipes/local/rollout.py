"""Rollouts: a fixed number of requests in flight at the gateway, each a GRPO group of a recent version.

The client is what any trainer's is: it demands a version, takes what the response says about versions, and
repeats what may be repeated. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import aiohttp

from . import task
from .settings import Settings
from .trajectory import Trajectory

REQUEST_SECONDS = 60.0
FIRST_BACKOFF, MAX_BACKOFF = 0.1, 2.0
HEADER_REPLICA = "X-Stitch-Replica"

Group = list[Trajectory]


class RequestFailed(Exception):
    """A request was refused for good, or its deadline passed."""


class NoRollouts(Exception):
    """Too few groups came in time to train on; the message says what came instead."""


class GatewayClient:
    """Asks for groups, each until it is there. Use it within ``async with``.

    ``in_flight`` counts requests without an answer, those that are being repeated with them.
    """

    def __init__(
        self, url: str, settings: Settings, head: Callable[[], int], kv_mode_of: Callable[[str], str]
    ) -> None:
        """``head`` is the newest published version, ``kv_mode_of`` the KV mode of a replica by its id."""
        self.in_flight = 0
        self.retries: Counter[str] = Counter()
        self._url = url
        self._settings, self._head, self._kv_mode_of = settings, head, kv_mode_of

    async def __aenter__(self) -> GatewayClient:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def group(self, prompt: list[int], *, control: str | None = None) -> Group:
        """Sample a group. Raises RequestFailed."""
        self.in_flight += 1
        try:
            return await self._ask(prompt, control)
        finally:
            self.in_flight -= 1

    async def _ask(self, prompt: list[int], control: str | None) -> Group:
        deadline = asyncio.get_running_loop().time() + REQUEST_SECONDS
        backoff, reason = FIRST_BACKOFF, ""
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            # The head moves while we wait: what was new enough then may not be now.
            body = self._settings.generate_body(prompt, max(0, self._head() - self._settings.lag))
            try:
                async with self._session.post(
                    f"{self._url}/generate", json=body, timeout=aiohttp.ClientTimeout(total=left)
                ) as response:
                    text = await response.text()
                    if response.status == 200:
                        replica = response.headers.get(HEADER_REPLICA, "")
                        return self._read(prompt, json.loads(text), replica, control)
                    reason = _refusal(response.status, text)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reason = type(error).__name__
            self.retries[reason] += 1
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, MAX_BACKOFF)
        raise RequestFailed(f"no answer in {REQUEST_SECONDS:g} s; the last reason was {reason}")

    async def wake(self) -> None:
        """Tell every replica to look at the store now; best effort."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._session.post(f"{self._url}/wake", timeout=aiohttp.ClientTimeout(total=2)):
                pass

    def _read(self, prompt: list[int], answers: Any, replica: str, control: str | None) -> Group:
        try:
            kv_mode = self._kv_mode_of(replica)
        except KeyError:
            raise RequestFailed(f"an answer of replica {replica!r}, which was never started") from None
        return [Trajectory.of(prompt, a, replica=replica, kv_mode=kv_mode, control=control) for a in answers]


class Rollouts:
    """Keeps ``in_flight`` requests going and hands finished groups to the trainer, oldest first."""

    def __init__(self, client: GatewayClient, settings: Settings, on_group: Callable[[Group], None]) -> None:
        """``on_group`` sees every finished group, trained on or not."""
        self.client = client
        self.finished = 0
        self.dropped = 0
        self.failures: list[str] = []
        self._settings, self._on_group = settings, on_group
        self._rng = random.Random(settings.seed)
        # More than this is stale by the time it is trained on; the oldest make room.
        self._waiting: deque[Group] = deque()
        self._room = 2 * settings.groups
        self._arrived = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as workers:
            for _ in range(self._settings.in_flight):
                workers.create_task(self._keep_asking())

    async def batch(self, *, oldest: int, timeout: float) -> list[Group]:
        """A batch of groups of version ``oldest`` or newer; those with an older token are dropped.

        Raises NoRollouts after ``timeout`` seconds.
        """
        size = self._settings.groups
        try:
            async with asyncio.timeout(timeout):
                while True:
                    fresh = [group for group in self._waiting if min(t.oldest for t in group) >= oldest]
                    self.dropped += len(self._waiting) - len(fresh)
                    self._waiting = deque(fresh)
                    if len(fresh) >= size:
                        return [self._waiting.popleft() for _ in range(size)]
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            seen = f"retried {dict(self.client.retries)}, failed {self.failures[-1:]}"
            raise NoRollouts(
                f"{len(self._waiting)} of {size} groups in {timeout:g} s; requests so far: {seen}"
            ) from None

    async def _keep_asking(self) -> None:
        while True:
            try:
                group = await self.client.group(task.draw_prompt(self._rng))
            except RequestFailed as failure:
                self.failures.append(str(failure))
                await asyncio.sleep(MAX_BACKOFF)
                continue
            self.finished += 1
            self._on_group(group)
            self._waiting.append(group)
            if len(self._waiting) > self._room:
                self._waiting.popleft()
                self.dropped += 1
            self._arrived.set()


def _refusal(status: int, text: str) -> str:
    """The type of a refusal that may be repeated. Raises RequestFailed for any other answer."""
    try:
        error = json.loads(text)["error"]
        kind, retryable = str(error["type"]), bool(error["retryable"])
    except (ValueError, KeyError, TypeError):
        kind, retryable = f"HTTP {status}", status in (502, 503, 504)
    if not retryable:
        raise RequestFailed(f"{status}: {text[:500]}")
    return kind
