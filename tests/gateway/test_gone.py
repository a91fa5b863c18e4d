"""An exact version that every replica has passed is 410 at once; what nobody knows is waited for."""

import asyncio

import pytest

from stitch_core.versions import PolicyVersion, VersionConstraint
from stitch_gateway.routing import Replica, gone_for_good
from tests.gateway.fleet import Fleet

HOUR = 3600.0


def exact(number: int, run: str | None = None) -> dict[str, object]:
    return {"text": "hi", "weight_version": {"exact_version": number, "run": run}}


def replica(number: int | None, run: str = "r", *, alive: bool = True, target: str | None = None) -> Replica:
    serving = None if number is None else PolicyVersion(run, number)
    goal = None if target is None else PolicyVersion.parse(target)
    return Replica("id", "http://x", alive=alive, ready=alive, serving=serving, target=goal)


@pytest.mark.parametrize(
    ("replicas", "run", "expected"),
    [
        ([replica(8), replica(9)], None, True),
        ([replica(8), replica(9)], "r", True),
        ([replica(8, target="r/weight_v000009")], "r", True),
        ([replica(8), replica(7)], None, False),  # one serves it
        ([replica(8), replica(6)], None, False),  # one is on its way through it
        ([replica(8), replica(None)], None, False),  # one has yet to begin
        ([replica(8), replica(9, alive=False)], None, False),  # one says nothing
        ([replica(8), replica(9, "s")], None, False),  # whose 7?
        ([replica(8), replica(9, "s")], "r", False),  # it may come over
        ([replica(8)], "s", False),
        ([replica(8), replica(9, target="r/weight_v000007")], "r", False),  # a channel was set back to it
        ([replica(8), replica(9, target="s/weight_v000001")], "r", False),
        ([], None, False),
    ],
)
def test_what_every_replica_must_say(replicas: list[Replica], run: str | None, expected: bool) -> None:
    assert gone_for_good(VersionConstraint(None, 7, run), replicas) is expected


def test_only_an_exact_version_can_be_gone() -> None:
    assert not gone_for_good(VersionConstraint(min_version=7), [replica(8)])


async def test_410_does_not_wait_for_the_end_of_the_hold(fleet: Fleet) -> None:
    fleet.add(7), fleet.add(8)
    await fleet.start(hold=HOUR)
    status, value = await asyncio.wait_for(fleet.post(exact(6)), 60)
    error = value["error"]
    assert (status, error["type"], error["retry"]) == (410, "WeightVersionGone", "never")
    assert error["demands"] == {"exact_version": 6}


async def test_a_held_request_is_told_as_soon_as_its_version_was_passed_over(fleet: Fleet) -> None:
    server = fleet.add(7)
    await fleet.start(hold=HOUR)
    held = asyncio.ensure_future(fleet.post(exact(8)))
    other = asyncio.ensure_future(fleet.post(exact(10)))
    await fleet.until(lambda: len(fleet.gateway.dispatcher.held) == 2)
    server.serves(9)
    status, _ = await asyncio.wait_for(held, 60)
    assert status == 410
    assert not other.done()
    server.serves(10)
    assert (await other)[0] == 200


async def test_a_replica_that_says_nothing_keeps_hope_alive(fleet: Fleet) -> None:
    fleet.add(8)
    joiner = fleet.add(7)
    joiner.replica.gate.forget("it has just started")
    await fleet.start(hold=HOUR, until_ready=1)
    held = asyncio.ensure_future(fleet.post(exact(7)))
    await fleet.until(lambda: len(fleet.gateway.dispatcher.held) == 1)
    joiner.serves(7)
    assert (await held)[0] == 200


async def test_a_channel_that_was_set_back_is_waited_for(fleet: Fleet) -> None:
    server = fleet.add(9)
    server.replica.app._status = lambda: {"target": "r/weight_v000007"}
    await fleet.start(hold=HOUR)
    held = asyncio.ensure_future(fleet.post(exact(7)))
    await fleet.until(lambda: len(fleet.gateway.dispatcher.held) == 1)
    server.serves(7)
    assert (await held)[0] == 200
