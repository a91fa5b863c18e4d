"""Promise 3: with the head at v and the store reachable a replica reaches it; and says what is wrong."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stitch_core.head import Head, channel_key, head_key
from stitch_core.ports import NotFound, Unavailable
from stitch_core.replica.activation import CannotFollow
from stitch_core.replica.reconciler import Follow, Reconciler
from stitch_core.replica.staging import WrongBase
from stitch_core.versions import Refusal, VersionConstraint
from tests.replica.following import Following
from tests.small_run import Trainer
from tests.virtual_time import LoopClock

pytestmark = pytest.mark.virtual_time

LATEST = Follow(channel="latest")


@pytest.fixture
def f(tmp_path: Path) -> Following:
    return Following(tmp_path)


@pytest.fixture
def channel(tmp_path: Path) -> Following:
    return Following(tmp_path, LATEST)


async def test_follows_a_run(f: Following) -> None:
    await f.claim()
    await f.catch_up()
    f.check(f.versions[0])
    assert f.engine.names("prepare") == [[]], "the boot version is there already: it is only named"
    for number in range(1, 4):
        manifest = await f.publish()
        assert await f.reconciler.reconcile()
        f.check(manifest)
        assert not await f.reconciler.reconcile()
        assert f.engine.names("activate")[-1] == f"r/weight_v{number:06d}"
    status = f.reconciler.status()
    assert (status["state"], status["applied"], status["run"]) == ("serving", 3, "r")
    assert (status["ready"], status["target"], status["problem"]) == (True, "r/weight_v000003", None)
    update = status["updates"][-1]
    assert (update["version"], update["bytes"]) == ("r/weight_v000003", f.versions[3].representation.bytes)
    record = f.reconciler.record("id", "http://here", 15.0)
    assert (record["applied"], record["fetching"], record["status"]) == (3, [], "serving")
    assert record["expires"] == record["time"] + 15.0


async def test_skips_versions_and_copies_only_what_differs(f: Following) -> None:
    await f.claim()
    await f.catch_up()
    for name in ("a", "b", "a"):
        await f.publish(name)
    await f.catch_up()
    f.check(f.versions[3])
    assert f.engine.names("prepare") == [[], ["a", "b"]]
    assert [update.version for update in f.reconciler.updates] == ["r/weight_v000000", "r/weight_v000003"]


async def test_a_version_of_equal_weights_only_relabels(f: Following) -> None:
    await f.publish()
    await f.catch_up()
    f.trainer.learn = lambda *_: f.trainer.tensors  # type: ignore[method-assign]
    same = await f.publish()
    assert same.state == f.versions[1].state
    await f.catch_up()
    f.check(same)
    assert f.engine.names("prepare")[-1] == []


async def test_a_restarted_replica_goes_on_from_its_host_checkpoint(f: Following) -> None:
    for _ in range(3):
        await f.publish()
    await f.catch_up()
    f.host.close()
    newest = await f.publish()
    f.store.calls.clear()
    f.start()
    await f.catch_up()
    f.check(newest)
    read = {key for name, key in f.store.calls if name == "read"}
    assert read == {newest.file_key(file.name) for file in newest.representation.files}


# ------------------------------------------------------------------------------- what cannot be followed


@pytest.mark.parametrize(
    ("follows", "why"), [("channel", "channel latest is not there"), ("f", "run r has no head yet")]
)
async def test_a_store_where_nothing_is_yet(request: pytest.FixtureRequest, follows: str, why: str) -> None:
    """Waits and says why, once; then follows."""
    waiting: Following = request.getfixturevalue(follows)
    async with waiting.running():
        await waiting.until(lambda: waiting.said != [])
        waiting.reconciler.wake()
        await asyncio.sleep(0.02)
        assert len(waiting.said) == 1
        assert why in waiting.said[0]
        status = waiting.reconciler.status()
        assert (status["state"], status["ready"]) == ("booting", False)
        assert why in status["why_not_ready"]
        assert why in status["problem"]["message"]
        waiting.point("r")
        manifest = await waiting.publish()
        waiting.reconciler.wake()
        await waiting.serves(manifest)
        await waiting.until(lambda: waiting.problem() == "")
    assert "all is well again" in waiting.said[-1]


async def test_c02_a_pointer_that_cannot_be_read(f: Following) -> None:
    await f.publish()
    await f.catch_up()
    key = head_key("r")
    good = f.memory.state.objects[key]
    head = Head.decode(good)
    missing = replace(head, number=9, key="manifests/000009.e0001.json").encode()
    other = replace(head, digest="sha256:" + "0" * 64).encode()
    async with f.running():
        for bad in (b"", good[:30], b"\xff\xfe", good + b"x", b"r/weight_v000009", missing, other):
            f.memory.state.objects[key] = bad
            f.reconciler.wake()
            await f.until(lambda: f.problem() != "")
            f.check(f.versions[1])
            f.memory.state.objects[key] = good
            await f.until(lambda: f.problem() == "")
        del f.memory.state.objects[key]
        f.reconciler.wake()
        await f.until(lambda: "no head" in f.problem())
        f.check(f.versions[1])
        f.memory.state.objects[key] = good
        newest = await f.publish()
        f.reconciler.wake()
        await f.serves(newest)


async def test_c02_a_channel_that_cannot_be_read(channel: Following) -> None:
    f = channel
    f.point("r")
    await f.publish()
    await f.catch_up()
    for bad in (b"", b"r", b'{"run":"r"}', b"\xff"):
        f.memory.state.objects[channel_key("latest")] = bad
        with pytest.raises(ValueError, match="channels/latest"):
            await f.reconciler.reconcile()
        f.check(f.versions[1])
    f.point("r", 9)
    with pytest.raises(CannotFollow, match="names version 9 of r: there is none"):
        await f.reconciler.reconcile()
    f.check(f.versions[1])


async def test_a_head_that_went_down_or_a_run_id_that_was_used_again(f: Following, tmp_path: Path) -> None:
    await f.publish()
    old = f.memory.state.objects[head_key("r")]
    await f.publish()
    await f.catch_up()
    f.memory.state.objects[head_key("r")] = old
    with pytest.raises(CannotFollow, match="behind version 2, which is served"):
        await f.reconciler.reconcile()
    f.check(f.versions[2])
    f.memory.state.objects.clear()
    f.publisher = None
    f.trainer.resume(f.trainer.state)
    await f.publish()
    await f.publish()
    with pytest.raises(CannotFollow, match="is not what is served by that name: the run id was used again"):
        await f.reconciler.reconcile()
    f.check(f.versions[2])


async def test_a_base_that_is_not_version_0(f: Following, tmp_path: Path) -> None:
    """It can never serve this run: an error and the end, before anything is copied."""
    other = Trainer(tmp_path / "other", seed=5)
    publisher = other.publisher(f.memory)
    await publisher.claim(other.version0)
    with pytest.raises(
        WrongBase, match=r"the base checkpoint .*boot is not version 0 of run r: its state is"
    ):
        await f.reconciler.run()
    assert not f.gate.ready
    assert "not version 0" in (f.gate.why_closed or "")
    assert f.host.holding is None
    assert f.engine.label == "default"


async def test_a_switch_to_a_run_of_another_base_is_not_followed(channel: Following, tmp_path: Path) -> None:
    f = channel
    f.point("r")
    await f.publish()
    other = Trainer(tmp_path / "other", run="s", seed=5)
    await other.publisher(f.memory).claim(other.version0)
    async with f.running():
        await f.serves(f.versions[1])
        f.point("s")
        f.reconciler.wake()
        await f.until(lambda: "not version 0 of run s" in f.problem())
        f.check(f.versions[1])
        f.point("r")
        newest = await f.publish()
        f.reconciler.wake()
        await f.serves(newest)


def test_follow_one_thing() -> None:
    for wrong in (lambda: Follow(), lambda: Follow("r", "latest")):
        with pytest.raises(ValueError, match="either a run or a channel"):
            wrong()


# -------------------------------------------------------------------------------------------- when to look


async def test_c17_every_wake_is_lost(tmp_path: Path) -> None:
    f = Following(tmp_path, poll=0.005)
    await f.claim()
    async with f.running():
        for _ in range(3):
            await f.serves(await f.publish())


async def test_c17_a_wake_at_each_step_of_a_pass(f: Following) -> None:
    """A version is published, and the replica woken, at each call that a pass makes: it is not waited for."""
    await f.publish()
    async with f.running():
        await f.serves(f.versions[1])
        await f.until(lambda: f.reconciler.status()["activity"] == "idle")
        step = 0
        while await publish_in_pass(f, step):
            await f.serves(f.versions[-1])
            step += 1
    assert step > 10


async def publish_in_pass(f: Following, step: int) -> bool:
    """Publish and wake around the ``step``-th call of what a version starts; False: there are fewer."""
    count = 0

    async def here() -> None:
        nonlocal count
        count += 1
        if count == step + 1:
            await f.publish()
            f.reconciler.wake()

    async def counted(name: str, key: str, call: Any) -> Any:
        await here()
        answer = await type(f.store)._do(f.store, name, key, call)
        await here()
        return answer

    await f.publish()
    f.store._do = counted  # type: ignore[method-assign]
    f.engine.before = dict.fromkeys(("identity", "prepare", "pause", "activate", "resume"), here)
    first = f.versions[-1]
    f.reconciler.wake()
    await f.until(lambda: count > step or f.gate.serving == first.version)
    await asyncio.sleep(0.02)
    f.engine.before = {}
    del f.store._do
    return count > step


async def test_c24_publishing_is_faster_than_staging(f: Following) -> None:
    """A newer version at every turn starves nobody: what is staged is activated, and versions are skipped."""
    await f.publish()
    await f.catch_up()

    async def publish() -> None:
        await f.publish()

    f.engine.before = {"prepare": publish, "pause": publish}
    await f.publish()
    served = []
    for _ in range(5):
        assert await f.reconciler.reconcile()
        assert f.gate.serving is not None
        served.append(f.gate.serving.number)
    assert served == [2, 4, 6, 8, 10]
    f.engine.before = {}
    await f.catch_up()
    f.check(f.versions[-1])


async def test_c18_the_store_is_unreadable(f: Following) -> None:
    await f.publish()
    async with f.running():
        await f.serves(f.versions[1])
        await f.until(lambda: f.reconciler.status()["last_success_age"] is not None)
        f.store.fail = lambda *_: "before"
        f.reconciler.wake()
        await f.until(lambda: "no answer" in f.problem())
        await f.until(lambda: f.reconciler.status()["problem"]["age"] > 0.05)
        status = f.reconciler.status()
        assert status["ready"]
        assert status["last_success_age"] > 0.05
        ticket = await f.admit(min_version=1)
        f.gate.release(ticket)
        newest = await f.publish()
        f.store.fail = lambda *_: None
        await f.serves(newest)
        await f.until(lambda: f.problem() == "")


class Jumping(LoopClock):
    off = 0.0

    def time(self) -> float:
        return super().time() + self.off


async def test_ages_do_not_jump_with_the_wall_clock(f: Following) -> None:
    """A clock that was set back made the age of the last success negative, one set forward paged somebody."""
    clock = f.reconciler.clock = Jumping()
    await f.publish()
    async with f.running():
        await f.serves(f.versions[1])
        await f.until(lambda: f.reconciler.status()["last_success_age"] is not None)
        f.store.fail = lambda *_: "before"
        f.reconciler.wake()
        await f.until(lambda: "no answer" in f.problem())
        for clock.off in (-7200.0, 7200.0):
            status = f.reconciler.status()
            assert 0 <= status["last_success_age"] < 60
            assert 0 <= status["problem"]["age"] < 60
            assert set(status["problem"]) == {"message", "since", "last", "count", "age"}


async def test_refused_requests_do_not_storm_a_store_that_is_down(tmp_path: Path) -> None:
    f = Following(tmp_path, first_backoff=0.1, max_backoff=0.1)
    await f.publish()
    async with f.running():
        await f.serves(f.versions[1])
        f.store.fail = lambda *_: "before"
        f.store.calls.clear()
        for _ in range(150):
            refusal = await f.gate.admit(VersionConstraint(min_version=9), "q")
            assert isinstance(refusal, Refusal)
            await asyncio.sleep(0.002)
        assert 1 <= len(f.store.calls) < 15


async def test_an_error_that_nobody_thought_of_is_shown_and_tried_again(f: Following) -> None:
    await f.publish()

    async def bug() -> None:
        raise RuntimeError("a bug in an adapter")

    f.engine.before["prepare"] = bug
    async with f.running():
        await f.until(lambda: "a bug in an adapter" in f.problem())
        await f.until(lambda: f.reconciler.status()["problem"]["count"] > 2)
        assert f.said == ["a bug in an adapter"]
        f.engine.before.clear()
        await f.serves(f.versions[1])


# ---------------------------------------------------------------------------------- joining and switching


async def test_c19_a_joiner_gets_no_traffic_before_it_has_caught_up(f: Following) -> None:
    for _ in range(3):
        await f.publish()
    seen = []

    async def look() -> None:
        refusal = await f.gate.admit(VersionConstraint(), "early")
        assert isinstance(refusal, Refusal)
        seen.append((refusal.status, refusal.retry, f.gate.ready))
        assert f.reconciler.status()["state"] in ("booting", "catching_up")

    f.engine.before = dict.fromkeys(("identity", "prepare", "pause", "activate", "resume"), look)
    await f.reconciler.reconcile()
    f.check(f.versions[3])
    assert set(seen) == {(503, "elsewhere", False)}


async def test_c36_a_request_for_the_new_run_before_the_switch_is_seen(
    channel: Following, tmp_path: Path
) -> None:
    """Told to wait, not never; and "elsewhere" only after a look at the channel that began later."""
    f = channel
    f.point("r")
    await f.publish()
    await f.catch_up()
    wanted = VersionConstraint(run="s", min_version=0)
    refusal = await f.gate.admit(wanted, "early")
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.type, refusal.retry) == (409, "WeightVersionNotReady", "here")
    await asyncio.sleep(0.001)
    await f.reconciler.reconcile()
    refusal = await f.gate.admit(wanted, "late")
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.type, refusal.retry) == (409, "WeightVersionElsewhere", "elsewhere")
    same = Trainer(tmp_path / "train", run="s")
    publisher = same.publisher(f.memory)
    await publisher.claim(same.version0)
    manifest = await same.publish(publisher)
    f.point("s")
    await f.catch_up()
    f.check(manifest)
    f.gate.release(await f.admit(run="s", min_version=1))


async def test_the_channel_turns_back_while_the_other_run_is_staged(
    channel: Following, tmp_path: Path
) -> None:
    """What is staged for a run that is no longer wanted is not activated, and the next look comes at once."""
    f = channel
    f.point("r")
    await f.publish()
    same = Trainer(tmp_path / "train", run="s")
    publisher = same.publisher(f.memory)
    await publisher.claim(same.version0)
    await same.publish(publisher)
    async with f.running():
        await f.serves(f.versions[1])

        async def turn_back() -> None:
            f.engine.after.clear()
            f.point("r")
            await f.publish()

        f.engine.after["prepare"] = turn_back
        f.point("s")
        f.reconciler.wake()
        await f.until(lambda: len(f.versions) == 3)
        await f.serves(f.versions[2])
    assert "s/weight_v000001" not in f.engine.names("activate")


async def test_an_exact_channel_and_back(channel: Following) -> None:
    f = channel
    for _ in range(4):
        await f.publish()
    f.point("r")
    await f.catch_up()
    for exact in (2, 0, 3, None):
        f.point("r", exact)
        await f.catch_up()
        f.check(f.versions[4 if exact is None else exact])


async def test_the_host_checkpoint_is_in_use(f: Following) -> None:
    await f.publish()
    twin = Following(f.root, poll=0.01)
    twin.memory = f.memory
    await f.catch_up()
    twin.store.store = f.memory
    async with twin.running():
        await twin.until(lambda: "is in use by another process" in twin.problem())
        f.host.close()
        await twin.serves(f.versions[1])


async def test_any_call_of_a_pass_may_fail(f: Following) -> None:
    """The old version is served on, and the next pass arrives."""
    await f.publish()
    await f.catch_up()
    for k in range(20):
        await f.publish()
        start = len(f.store.calls)
        f.store.fail = lambda index, name, key, at=start + k: (  # type: ignore[misc]
            None if index < at else Unavailable("gone") if name == "load" else NotFound("gone")
        )
        serving = f.gate.serving
        try:
            assert await f.reconciler.reconcile()
        except (Unavailable, NotFound):
            assert f.gate.serving == serving
            f.store.fail = lambda *_: None
            await f.catch_up()
        else:
            break
        f.check(f.versions[-1])
    assert 3 < k < 19


def test_reconciler_needs_somewhere_to_stage(f: Following) -> None:
    with pytest.raises(AssertionError):
        Reconciler(
            f.store, f.engine, f.gate, None, Follow("r"), f.trainer.boot, f.reconciler.files,
            f.reconciler.clock, f.reconciler.rng, f.reconciler.run_blocking,
        )  # fmt: skip


async def test_what_a_rollback_passed_over_is_not_activated(f: Following) -> None:
    """It was staged before the rollback; what merely is no longer the newest is activated all the same."""
    await f.publish()
    await f.catch_up()
    await f.publish()

    async def rolled_back() -> None:
        f.engine.after.clear()
        operator = f.trainer.publisher(f.memory)
        await operator.take_back(1)
        f.trainer.resume(f.versions[1].state)
        f.versions.append(await f.trainer.publish(operator))

    f.engine.after["prepare"] = rolled_back
    assert not await f.reconciler.reconcile()
    f.check(f.versions[1])
    assert await f.reconciler.reconcile()
    f.check(f.versions[3])
    assert f.engine.names("activate")[-2:] == ["r/weight_v000001", "r/weight_v000003"]


async def test_what_is_given_up_is_served_until_the_rollback_is_there(f: Following) -> None:
    """A rollback that died after its claim leaves a head that replicas still reach."""
    await f.publish()
    await f.publish()
    await f.trainer.publisher(f.memory).take_back(1)
    await f.catch_up()
    f.check(f.versions[2])
