"""What is held for a version is dealt out to the replicas that take it, and not all sent to the first."""

import asyncio
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

from stitch_core.versions import PolicyVersion, VersionConstraint
from stitch_gateway.call import Call
from stitch_gateway.consumers import Scope
from stitch_gateway.dispatch import Dispatcher
from stitch_gateway.routing import SLACK, Replica, may_come

NEXT = VersionConstraint(8, None, "r")


class Held:
    """A dispatcher with ``count`` requests that wait for version 8, and replicas that serve 7."""

    def __init__(self, replicas: int, count: int, spread: float = 60.0) -> None:
        self.replicas = [Replica(str(number), f"http://{number}:1") for number in range(replicas)]
        for replica in self.replicas:
            self.set(replica, 7)
        self.went: Counter[str] = Counter()
        fleet: Any = SimpleNamespace(replicas=self.replicas)
        self.dispatcher = Dispatcher(fleet, self, random.Random(1), spread=spread)  # type: ignore[arg-type]
        self.tasks = [asyncio.ensure_future(self._ask(number)) for number in range(count)]

    async def _ask(self, number: int) -> None:
        deadline = asyncio.get_running_loop().time() + 60
        call = Call("/generate", {}, b"", NEXT, (str(number),), Scope("r", "rollout"), deadline)
        await self.dispatcher.run(None, call)  # type: ignore[arg-type]

    async def run(self, request: Any, call: Call, replica: Replica) -> str:
        """In the place of ``Attempt``."""
        self.went[replica.id] += 1
        await asyncio.sleep(3600)
        return "answered"

    def set(self, replica: Replica, number: int) -> None:
        replica.alive = replica.ready = True
        replica.serving = PolicyVersion("r", number)

    async def takes(self, index: int) -> None:
        """A replica serves the version now."""
        self.set(self.replicas[index], 8)
        self.dispatcher.fleet.on_change(self.replicas[index])
        await asyncio.sleep(0.01)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_the_first_replica_of_many_does_not_get_all_that_was_held() -> None:
    held = Held(replicas=20, count=400)
    await asyncio.sleep(0.05)
    await held.takes(0)
    assert 0 < held.went["0"] <= 1.25 * 400 / 20 + SLACK + 1
    for index in range(1, 20):
        await held.takes(index)
    assert held.went.total() == 400
    assert max(held.went.values()) <= 3 * 400 / 20
    await held.close()


async def test_who_was_left_does_not_wait_for_replicas_that_do_not_come() -> None:
    held = Held(replicas=20, count=400, spread=0.1)
    await asyncio.sleep(0.05)
    await held.takes(0)
    await held.takes(1)
    assert held.went.total() < 400
    await asyncio.sleep(0.3)
    assert held.went.total() == 400
    assert not held.dispatcher.spreading
    await held.close()


async def test_few_and_the_last_replicas_get_all_at_once() -> None:
    held = Held(replicas=20, count=SLACK)
    await asyncio.sleep(0.05)
    await held.takes(0)
    assert held.went == {"0": SLACK}
    await held.close()
    alone = Held(replicas=3, count=100)
    alone.replicas[1].alive = False
    alone.replicas[2].serving = PolicyVersion("r", 9)
    alone.replicas[2].ready = False
    await asyncio.sleep(0.05)
    await alone.takes(0)
    assert alone.went == {"0": 100}
    await alone.close()


def test_who_may_come() -> None:
    replica = Replica("a", "http://a:1")
    assert may_come(replica, NEXT)
    for version, wanted in ((("r", 7), True), (("r", 8), False), (("s", 9), True)):
        replica.serving = PolicyVersion(*version)
        assert may_come(replica, NEXT) == wanted
