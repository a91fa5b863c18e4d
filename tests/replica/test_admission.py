"""The gate alone: who may run now, who waits, who is told what."""

import asyncio
from typing import Any

import pytest

from stitch_core.replica.admission import Gate, Ticket
from stitch_core.versions import PolicyVersion, Refusal, VersionConstraint
from tests.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time


class Clock:
    """Monotonic time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


def gate(*, serving: int | None = 7, hold: float = 0.05, **options: Any) -> Gate:
    made = Gate(LoopClock(), hold=hold, **options)
    if serving is not None:
        made.open(PolicyVersion("r", serving))
    return made


async def admit(gate: Gate, **demands: Any) -> Ticket | Refusal:
    return await gate.admit(VersionConstraint(**demands), "id")


async def ticket(gate: Gate, **demands: Any) -> Ticket:
    admitted = await admit(gate, **demands)
    assert isinstance(admitted, Ticket)
    return admitted


async def refusal(gate: Gate, **demands: Any) -> Refusal:
    refused = await admit(gate, **demands)
    assert isinstance(refused, Refusal)
    return refused


@pytest.mark.parametrize(
    ("demands", "kind"),
    [
        ({}, None),
        ({"min_version": 7}, None),
        ({"exact_version": 7}, None),
        ({"run": "r"}, None),
        ({"min_version": 8}, "WeightVersionNotReady"),
        ({"exact_version": 8}, "WeightVersionNotReady"),
        ({"exact_version": 6}, "WeightVersionElsewhere"),
        ({"min_version": 6, "exact_version": 6}, "WeightVersionElsewhere"),
    ],
)
async def test_judgement(demands: dict[str, Any], kind: str | None) -> None:
    answer = await admit(gate(), **demands)
    assert (answer.type if isinstance(answer, Refusal) else None) == kind


async def test_C19_joiner_gets_no_traffic_before_it_has_caught_up() -> None:
    joiner = gate(serving=None)
    assert not joiner.ready
    for demands in ({}, {"min_version": 0}, {"exact_version": 0}):
        refused = await refusal(joiner, **demands)
        assert (refused.status, refused.type, refused.retry) == (503, "EngineUnavailable", "elsewhere")
    assert joiner.failed is None  # slow is not broken
    joiner.open(PolicyVersion("r", 3))
    assert (await ticket(joiner)).admitted == PolicyVersion("r", 3)


async def test_short_pause_is_waited_out() -> None:
    held = gate(hold=5)
    held.close("version 8 is being activated")
    waiting = asyncio.ensure_future(admit(held, min_version=8))
    await asyncio.sleep(0)
    assert not waiting.done()
    held.open(PolicyVersion("r", 8))
    admitted = await waiting
    assert isinstance(admitted, Ticket)
    assert admitted.admitted.number == 8


async def test_long_pause_is_a_refusal_with_its_reason() -> None:
    held = gate()
    held.close("version 8 is being activated")
    assert (await refusal(held)).message == "version 8 is being activated"


async def test_C21_only_new_pins_on_the_outgoing_version_are_refused_while_it_drains() -> None:
    draining = gate()
    pinned = await ticket(draining, exact_version=7)
    flowing = await ticket(draining)
    draining.leave_version()
    assert (await refusal(draining, exact_version=7)).type == "WeightVersionElsewhere"
    assert isinstance(await admit(draining), Ticket)
    assert isinstance(await admit(draining, min_version=7), Ticket)
    done = asyncio.ensure_future(draining.drain(LoopClock().monotonic() + 5, pins_only=True))
    await asyncio.sleep(0)
    assert not done.done()
    draining.release(pinned)
    assert await done == []
    assert flowing.revoked is None
    draining.open(PolicyVersion("r", 8))
    assert (await refusal(draining, exact_version=7)).type == "WeightVersionElsewhere"


async def test_C21_pin_that_outlives_the_deadline_is_revoked_once_and_told() -> None:
    draining = gate()
    pinned, flowing = await ticket(draining, exact_version=7), await ticket(draining)
    told = []
    pinned.on_revoke = lambda: told.append(pinned.revoked)
    draining.leave_version()
    assert await draining.drain(LoopClock().monotonic() + 0.02, pins_only=True) == [pinned]
    assert pinned.revoked is not None
    assert (pinned.revoked.type, pinned.revoked.retry) == ("WeightVersionElsewhere", "elsewhere")
    assert told == [pinned.revoked]
    assert flowing.revoked is None
    # A newer target does not wait for it again.
    assert await draining.drain(LoopClock().monotonic() + 5, pins_only=True) == []


async def test_C03_run_switch_drains_everything() -> None:
    switching = gate()
    flowing = await ticket(switching)
    switching.close("moving to s/weight_v000001")
    left = await switching.drain(LoopClock().monotonic() + 0.02, pins_only=False)
    assert left == [flowing]
    assert not await switching.wait_gone(left, 0.02)
    switching.release(flowing)
    assert await switching.wait_gone(left, 0.02)


async def test_C03_number_without_a_run_is_ambiguous_after_a_switch() -> None:
    switched = gate()
    switched.open(PolicyVersion("s", 1))
    assert (await refusal(switched, min_version=1)).status == 400
    assert isinstance(await admit(switched, min_version=1, run="s"), Ticket)
    assert isinstance(await admit(switched), Ticket)


async def test_C36_run_that_this_replica_has_not_seen_yet_is_worth_waiting_for() -> None:
    clock = Clock()
    replica = Gate(clock, hold=0)
    replica.open(PolicyVersion("r", 7))
    replica.saw_channel("r", clock.monotonic())
    clock.now += 1
    assert (await refusal(replica, run="s")).type == "WeightVersionNotReady"
    # A look at the channel that began before the question proves nothing.
    replica.saw_channel("r", 100.5)
    assert (await refusal(replica, run="s")).type == "WeightVersionNotReady"
    clock.now += 1
    replica.saw_channel("r", clock.monotonic())
    assert (await refusal(replica, run="s")).type == "WeightVersionElsewhere"


async def test_C36_run_that_the_channel_names_is_waited_for() -> None:
    clock = Clock()
    replica = Gate(clock, hold=0)
    replica.open(PolicyVersion("r", 7))
    replica.saw_channel("s", clock.monotonic())
    assert (await refusal(replica, run="s", min_version=1)).type == "WeightVersionNotReady"
    replica.open(PolicyVersion("s", 1))
    assert isinstance(await admit(replica, run="s", min_version=1), Ticket)
    replica.saw_channel("s", clock.monotonic())
    clock.now += 1
    replica.saw_channel("s", clock.monotonic())
    assert (await refusal(replica, run="r")).type in ("WeightVersionNotReady", "WeightVersionElsewhere")


async def test_every_run_that_is_asked_for_is_answered_in_the_end() -> None:
    """Runs that nobody will ever serve do not push each other out of memory for ever."""
    clock = Clock()
    replica = Gate(clock, hold=0)
    replica.open(PolicyVersion("r", 7))
    for _ in range(2):
        for i in range(100):
            await refusal(replica, run=f"x{i}")
        clock.now += 1
        replica.saw_channel("r", clock.monotonic())
        clock.now += 1
    assert (await refusal(replica, run="x99")).type == "WeightVersionElsewhere"


async def test_forget_gives_up_what_runs_and_closes() -> None:
    lost = gate()
    running = await ticket(lost)
    lost.forget("the engine was restarted")
    assert running.revoked is not None
    assert running.revoked.type == "EngineUnavailable"
    assert (await refusal(lost)).status == 503
    lost.open(PolicyVersion("r", 8))
    assert lost.ready


async def test_fail_and_stop() -> None:
    waiting_gate = gate(hold=5)
    waiting_gate.close("pausing")
    waiting = asyncio.ensure_future(admit(waiting_gate))
    await asyncio.sleep(0)
    waiting_gate.fail("weights are uncertain")
    refused = await waiting
    assert isinstance(refused, Refusal)
    assert refused.message == waiting_gate.why_closed == "weights are uncertain"

    stopping = gate()
    running = await ticket(stopping)
    stopping.stop()
    assert not stopping.ready
    assert (await refusal(stopping)).retry == "elsewhere"
    assert running.revoked is None
    assert stopping.active == 1


async def test_refusal_asks_for_a_look_at_the_store() -> None:
    looks: list[int] = []
    asking = gate(on_refused=lambda: looks.append(1))
    await admit(asking, min_version=8)
    await admit(asking)
    assert looks == [1]


async def test_many_waiters_are_all_woken() -> None:
    held = gate(hold=5)
    held.close("pausing")
    waiting = [asyncio.ensure_future(admit(held)) for _ in range(20)]
    await asyncio.sleep(0)
    held.open(PolicyVersion("r", 8))
    assert all(isinstance(answer, Ticket) for answer in await asyncio.gather(*waiting))
