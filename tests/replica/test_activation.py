"""Promise 1 in the pause: whatever the engine does, no version is served but by its own weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stitch_core.ports import EngineError, EngineRefused, EngineUncertain
from stitch_core.replica.activation import CannotFollow, ReplicaFailed
from stitch_core.replica.admission import Ticket
from stitch_core.replica.reconciler import Follow
from stitch_core.testing.checkpoints import random_tensors, write_checkpoint
from stitch_core.versions import Refusal, VersionConstraint
from tests.replica.following import Following, Hook
from tests.small_run import FILES, LAYOUT, Trainer, tick

pytestmark = pytest.mark.virtual_time


@pytest.fixture
async def f(tmp_path: Path) -> Following:
    """A replica that serves version 1, while version 2 is there."""
    following = Following(tmp_path)
    await following.publish("a")
    await following.catch_up()
    await following.publish("b")
    return following


@pytest.fixture
async def channel(tmp_path: Path) -> Following:
    """Two runs of one boot checkpoint; the replica serves version 1 of r."""
    following = Following(tmp_path, Follow(channel="latest"))
    await following.publish()
    following.point("r")
    await following.catch_up()
    other = Trainer(following.trainer.root, run="s")
    publisher = other.publisher(following.memory)
    await publisher.claim(other.version0)
    await other.publish(publisher)
    return following


def raising(error: Exception, times: int = 10**6) -> Hook:
    left = [times]

    async def fail() -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise error

    return fail


async def hang() -> None:
    await asyncio.sleep(3600)


async def served_on(f: Following, error: type[Exception], match: str = ".") -> None:
    """A pass fails, the old version is served on as if nothing had been."""
    with pytest.raises(error, match=match):
        await f.reconciler.reconcile()
    f.check(f.versions[1])
    f.gate.release(await f.admit(exact_version=1))


# --------------------------------------------------------------------------------- engines that misbehave


@pytest.mark.parametrize("call", ["identity", "prepare", "pause", "activate"])
async def test_c04_a_refusal_changes_nothing_and_is_tried_again(f: Following, call: str) -> None:
    f.engine.before[call] = raising(EngineRefused("not now"), 1)
    await served_on(f, EngineRefused, "not now")
    assert await f.reconciler.reconcile()
    f.check(f.versions[2])


@pytest.mark.parametrize("call", ["identity", "prepare", "pause"])
@pytest.mark.parametrize(
    "hook",
    [raising(RuntimeError("bug")), raising(EngineError("broken pipe")), hang],
    ids=["bug", "lost", "hang"],
)
async def test_c04_no_answer_before_the_copy_changes_nothing(f: Following, call: str, hook: Hook) -> None:
    f.engine.before[call] = hook
    await served_on(f, Exception)
    f.engine.before.clear()
    await f.catch_up()
    f.check(f.versions[2])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "hook",
    [
        raising(EngineUncertain("half of it")),
        raising(EngineError("connection lost")),
        raising(RuntimeError("bug in an adapter")),
        hang,
    ],
    ids=["uncertain", "lost", "bug", "hang"],
)
async def test_c23_after_an_unclear_copy_the_replica_is_replaced(f: Following, hook: Hook, when: str) -> None:
    getattr(f.engine, when)["activate"] = hook
    with pytest.raises(ReplicaFailed, match="activating r/weight_v000002"):
        await f.reconciler.run()
    assert f.gate.failed is not None
    refusal = await f.gate.admit(VersionConstraint(), "q")
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.retry) == (503, "elsewhere")
    assert f.engine.paused
    assert f.reconciler.status()["state"] == "failed"


async def test_resume_is_tried_three_times(f: Following) -> None:
    f.engine.before["resume"] = raising(EngineError("busy"), 2)
    await f.catch_up()
    f.check(f.versions[2])
    await f.publish()
    f.engine.before["resume"] = raising(EngineError("busy"), 3)
    with pytest.raises(ReplicaFailed, match="the engine stays paused: busy"):
        await f.reconciler.run()
    assert not f.gate.ready


async def test_who_it_is_must_be_known_before_the_pause_ends(f: Following) -> None:
    asked = f.engine.names("identity")

    async def only_in_the_pause() -> None:
        if f.engine.paused:
            raise EngineError("no answer")

    f.engine.before["identity"] = only_in_the_pause
    with pytest.raises(ReplicaFailed, match="stays paused: no answer"):
        await f.reconciler.run()
    assert len(f.engine.names("identity")) > len(asked)


def restarting(f: Following) -> Hook:
    done: list[bool] = []

    async def restart() -> None:
        if not done:
            done.append(True)
            f.engine.restart()

    return restart


MOMENTS = [(when, call) for call in ("identity", "prepare", "pause") for when in ("before", "after")]


@pytest.mark.parametrize(("when", "call"), MOMENTS)
async def test_c22_an_engine_that_restarts_under_a_pass(f: Following, when: str, call: str) -> None:
    """Boot weights are never served, nor mixed with a delta under a version's label."""
    getattr(f.engine, when)[call] = restarting(f)
    ticket = await f.admit()
    for _ in range(6):
        with contextlib.suppress(EngineError):
            await f.reconciler.reconcile()
        if f.gate.ready and f.engine.label != "default":
            f.check(f.versions[2 if f.engine.label.endswith("2") else 1])
    f.check(f.versions[2])
    if call != "identity" or when != "before":
        assert ticket.revoked is not None


async def test_c22_an_engine_that_restarts_and_forgets_to_refuse(f: Following) -> None:
    """It takes the label although it has prepared nothing: found before the pause ends."""

    async def restart() -> None:
        f.engine.restart()
        f.engine.paused, f.engine._prepared = True, {}

    f.engine.before["activate"] = restart
    with pytest.raises(
        ReplicaFailed, match="the engine is not the one that r/weight_v000002 was prepared for"
    ):
        await f.reconciler.run()
    assert f.engine.paused
    assert not f.gate.ready


async def test_c22_a_restarted_replica_at_v5(f: Following) -> None:
    for _ in range(3):
        await f.publish()
    await f.catch_up()
    f.check(f.versions[5])
    running = await f.admit()
    f.engine.restart()
    original = f.engine.prepare

    async def look(*args: Any) -> None:
        assert not f.gate.ready
        assert f.gate.serving is None
        await original(*args)

    f.engine.prepare = look  # type: ignore[method-assign]
    await f.reconciler.reconcile()
    assert running.revoked is not None
    assert running.revoked.status == 503
    f.check(f.versions[5])


def other_weights(f: Following) -> Path:
    """A checkpoint of the same layout as the boot checkpoint."""
    directory = f.root / "other"
    if not directory.exists():
        write_checkpoint(directory, FILES, random_tensors(np.random.default_rng(7), LAYOUT))
    return directory


@pytest.mark.parametrize("at", ["head 0", "version 0 again"])
@pytest.mark.parametrize("label", ["default", "as it was"])
async def test_c76_an_engine_that_comes_back_with_other_weights(tmp_path: Path, at: str, label: str) -> None:
    """It was started on another checkpoint by others: no tensor differs by its word, and all are copied."""
    f = Following(tmp_path, Follow(channel="latest"))
    await f.claim()
    f.point("r")
    await f.catch_up()
    if at != "head 0":
        await f.publish("a")
        await f.catch_up()
        f.point("r", 0)
        await f.catch_up()
    f.check(f.versions[0])
    said = f.engine.label
    f.engine.boot = other_weights(f)
    f.engine.restart()
    f.engine.boot_marks = None
    f.engine.label = "default" if label == "default" else said
    original = f.engine.prepare

    async def closed(*args: Any) -> None:
        assert f.gate.serving is None
        await original(*args)

    f.engine.prepare = closed  # type: ignore[method-assign]
    assert await f.reconciler.reconcile()
    f.check(f.versions[0])
    assert f.engine.names("prepare")[-1] == ["a", "b", "scale"]


async def test_c76_an_engine_that_was_there_before_is_not_taken_at_its_word(tmp_path: Path) -> None:
    """A replica that finds it running, on whatever it was started with: version 0 is copied."""
    f = Following(tmp_path)
    await f.claim()
    f.engine.boot = other_weights(f)
    f.engine.restart()
    f.engine.boot_marks = None
    await f.catch_up()
    f.check(f.versions[0])


async def test_c76_an_engine_in_this_process_is_trusted_at_the_first_look_only(tmp_path: Path) -> None:
    f = Following(tmp_path)
    await f.claim()
    await f.catch_up()
    assert f.engine.names("prepare") == [[]]
    f.engine.restart()
    f.engine.tensors["scale"] = (*f.engine.tensors["scale"][:2], b"\7\7\7\7")
    await f.catch_up()
    f.check(f.versions[0])


def put_back(boot: Path, right: Path) -> None:
    boot.rename(boot.with_name("loaded"))
    right.rename(boot)


def relinked(boot: Path, right: Path) -> None:
    boot.unlink()
    boot.symlink_to(right)


def rewritten(boot: Path, right: Path) -> None:
    for name in FILES.list(right):
        (boot / name).write_bytes((right / name).read_bytes())


@pytest.mark.parametrize("change", [put_back, relinked, rewritten])
async def test_c77_the_boot_checkpoint_changes_between_the_load_and_the_first_hash(
    tmp_path: Path, change: Callable[[Path, Path], None]
) -> None:
    """The hash says version 0, the engine holds what was there before: all is copied, and that is said."""
    f = Following(tmp_path)
    await f.claim()
    boot, right = f.trainer.boot, tmp_path / "right"
    boot.rename(right)
    other = other_weights(f)
    if change is relinked:
        boot.symlink_to(other)
    else:
        other.rename(boot)
    f.engine.restart()
    tick(tmp_path)
    change(boot, right)
    assert f.engine.state != f.versions[0].state
    await f.catch_up()
    f.check(f.versions[0])
    assert f.engine.names("prepare") == [["a", "b", "scale"]]
    (said,) = f.said
    assert any(name in said for name in FILES.list(boot))


async def test_under_a_label_that_nobody_knows_all_is_copied(f: Following) -> None:
    f.engine.label = "somebody else's"
    f.engine.tensors["a"] = (*f.engine.tensors["a"][:2], b"\1" * 48)
    await f.reconciler.reconcile()
    f.check(f.versions[2])
    assert f.engine.names("prepare")[-1] == ["a", "b", "scale"]


@pytest.mark.parametrize("call", ["identity", "prepare", "pause", "activate", "resume"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_doubt_at_any_moment_is_settled_before_anything_is_served(
    f: Following, when: str, call: str
) -> None:
    """A response carried what the engine should not have said: its weights may be anything."""

    async def doubt() -> None:
        getattr(f.engine, when).clear()
        f.engine.tensors["scale"] = (*f.engine.tensors["scale"][:2], b"\7\7\7\7")
        f.reconciler.mismatch("a label that cannot be")

    getattr(f.engine, when)[call] = doubt
    for _ in range(6):
        try:
            await f.reconciler.reconcile()
        except EngineError:
            assert not f.gate.ready
        if f.gate.ready:
            f.check(f.versions[2])
    f.check(f.versions[2])


async def test_a_doubt_wakes_the_loop(f: Following) -> None:
    async with f.running():
        await f.serves(f.versions[2])
        f.reconciler.mismatch("the label is wrong")
        assert not f.gate.ready
        assert "the label is wrong" in (f.gate.why_closed or "")
        await f.serves(f.versions[2])


# --------------------------------------------------------------------------------- what is put off


@pytest.mark.parametrize("how", ["refused", "channel"])
async def test_c32_staged_put_off_staged_again(tmp_path: Path, how: str) -> None:
    """v1 changes a, is put off; v2 changes b: the engine holds both changes."""
    f = Following(tmp_path, Follow(channel="latest"))
    await f.claim()
    f.point("r")
    await f.catch_up()
    await f.publish("a")
    if how == "refused":
        f.engine.before["activate"] = raising(EngineRefused("a pin"), 1)
        with pytest.raises(EngineRefused):
            await f.reconciler.reconcile()
    else:

        async def away() -> None:
            f.point("r", 0)

        f.engine.after["prepare"] = away
        assert not await f.reconciler.reconcile()
        f.engine.after.clear()
        f.point("r")
    f.check(f.versions[0])
    await f.publish("b")
    await f.catch_up()
    f.check(f.versions[2])
    assert f.engine.names("prepare")[-1] == ["a", "b"]


async def test_what_is_staged_is_not_staged_again(f: Following) -> None:
    f.engine.before["activate"] = raising(EngineRefused("not now"), 3)
    for _ in range(3):
        await served_on(f, EngineRefused)
    f.store.calls.clear()
    await f.reconciler.reconcile()
    f.check(f.versions[2])
    assert len(f.engine.names("prepare")) == 2
    assert all(key == "runs/r/head" for _, key in f.store.calls)


# --------------------------------------------------------------------------------- who must make way


async def test_requests_without_a_pin_live_through_an_activation(f: Following) -> None:
    ticket = await f.admit(min_version=1)
    await f.reconciler.reconcile()
    f.check(f.versions[2])
    assert ticket.revoked is None


async def test_c21_a_pin_that_does_not_end(f: Following) -> None:
    """It is aborted at the deadline with an error that says elsewhere; nobody is parked behind it."""
    pinned = await f.admit("pin", exact_version=1)
    pinned.on_revoke = lambda: f.gate.release(pinned)
    passing = asyncio.ensure_future(f.reconciler.reconcile())
    admitted = 0
    while not passing.done() and pinned.revoked is None:
        if f.gate._leaving and f.gate.serving == f.versions[1].version:
            other = await f.gate.admit(VersionConstraint(), "other")
            assert isinstance(other, Ticket)
            f.gate.release(other)
            again = await f.gate.admit(VersionConstraint(exact_version=1), "again")
            assert isinstance(again, Refusal)
            assert (again.type, again.retry) == ("WeightVersionElsewhere", "elsewhere")
            admitted += 1
        await asyncio.sleep(0.005)
    assert await passing
    assert admitted
    f.check(f.versions[2])
    assert pinned.revoked is not None
    assert (pinned.revoked.status, pinned.revoked.retry) == (409, "elsewhere")
    assert f.engine.names("abort") == ["pin"]


async def test_c21_a_pin_that_ends_in_time(f: Following) -> None:
    pinned = await f.admit("pin", exact_version=1)

    async def soon() -> None:
        asyncio.get_running_loop().call_later(0.02, f.gate.release, pinned)

    f.engine.after["prepare"] = soon
    assert await f.reconciler.reconcile()
    assert pinned.revoked is None
    assert f.engine.names("abort") == []
    assert f.reconciler.updates[-1].drain == pytest.approx(0.02)


async def test_c21_a_pin_that_the_engine_cannot_abort_is_left_behind(f: Following) -> None:
    """Its answer is an error already, so it may run on without a promise."""
    f.engine.before["abort"] = raising(EngineError("no such route"))
    pinned = await f.admit("pin", exact_version=1)
    assert await f.reconciler.reconcile()
    assert pinned.revoked is not None
    f.check(f.versions[2])


async def test_drain_all_lets_every_request_end(tmp_path: Path) -> None:
    f = Following(tmp_path)
    await f.publish()
    await f.catch_up()
    object.__setattr__(f.settings, "drain_all", True)
    await f.publish()
    ticket = await f.admit()
    asyncio.get_running_loop().call_later(0.02, f.gate.release, ticket)
    assert await f.reconciler.reconcile()
    assert ticket.revoked is None
    f.check(f.versions[2])


Going = Callable[[Following], None]


@pytest.mark.parametrize(
    "go", [lambda f: f.point("s"), lambda f: f.point("r", 0)], ids=["to another run", "down"]
)
async def test_c03_a_switch_waits_for_every_request(channel: Following, go: Going) -> None:
    """A response that went on would mix runs, or say that its versions went down."""
    f = channel
    go(f)
    ticket = await f.admit()
    asyncio.get_running_loop().call_later(0.02, f.gate.release, ticket)
    before = f.engine.label
    passing = asyncio.ensure_future(f.reconciler.reconcile())
    while f.gate.active:
        assert f.engine.label == before
        await asyncio.sleep(0.001)
    assert await passing
    assert ticket.revoked is None
    assert f.engine.label != before


@pytest.mark.parametrize(
    "go", [lambda f: f.point("s"), lambda f: f.point("r", 0)], ids=["to another run", "down"]
)
async def test_c03_no_switch_over_requests_that_do_not_end(channel: Following, go: Going) -> None:
    """Not at the first try nor at a later one, although they have been given up meanwhile."""
    f = channel
    go(f)
    stuck = await f.admit("stuck")
    for _ in range(3):
        with pytest.raises(CannotFollow, match="1 requests of run r do not end: no switch to"):
            await f.reconciler.reconcile()
        f.check(f.versions[1])
        assert stuck.revoked is not None
    assert f.engine.names("abort") == ["stuck"]
    f.gate.release(stuck)
    assert await f.reconciler.reconcile()
    assert f.gate.ready


async def test_the_pause_is_measured_and_kv_mode_is_passed_on(f: Following) -> None:
    object.__setattr__(f.settings, "kv_mode", "retract")
    await f.reconciler.reconcile()
    assert f.engine.names("pause") == ["in_place", "retract"]
    update = f.reconciler.updates[-1]
    assert 0 <= update.pause < 1
    assert update.tensors == 1
    order = [name for name, _ in f.engine.calls][-7:]
    assert order == ["identity", "prepare", "identity", "pause", "activate", "identity", "resume"]
