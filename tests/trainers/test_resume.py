"""C06, C33, C35 on resume: what the next delta builds on is proven, whatever the floor and the record say."""

from __future__ import annotations

import asyncio
import errno
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stitch_core.checkpoint import Checkpoint
from stitch_core.host_checkpoint import HostCheckpoint
from stitch_core.manifest import Manifest
from stitch_core.payload import Boot, Payload
from stitch_core.ports import SystemClock
from stitch_core.publisher import Publisher
from stitch_core.safetensors import Tensor
from stitch_core.state import state_digest
from stitch_core.testing.checkpoints import table_of, write_checkpoint
from stitch_core.trainers import hooks
from stitch_core.trainers.group import RanksFailed, Solo
from stitch_core.trainers.own_delta import OwnDelta, check_policy
from stitch_core.trainers.record import RunRecord, loaded_record, save_record
from tests.small_run import FILES, inline
from tests.trainers.ranks import ThreadGroup, World, on_ranks, same
from tests.trainers.test_hooks import StockUpdater, updater
from tests.trainers.test_publication import plain, publish_own, rebuilt, versions


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(hooks, "_TRAINER", None)
    return World(tmp_path)


def publisher(world: World) -> Publisher:
    return Publisher(
        world.store(), "r", files=FILES, clock=SystemClock(), rng=random.Random(0), nonce=lambda: "operator",
        run_blocking=inline,
    )  # fmt: skip


def boot(world: World) -> Boot:
    return Boot("boot", state_digest(table_of(world.history[0])))


def publish_full(world: World, tensors: dict[str, Tensor]) -> Manifest:
    """As an operator does with ``stitch publish``: the floor rises."""
    directory = world.root / f"full-{len(versions(world))}"
    write_checkpoint(directory, FILES, tensors)

    async def run() -> Manifest:
        writer = publisher(world)
        await writer.claim(boot(world))
        state = state_digest(table_of(tensors))
        return await writer.publish(Payload("full", state, directory, tuple(FILES.list(directory))))

    return asyncio.run(run())


def save(world: World, rollout: int, version: int, run: str = "r") -> None:
    save_record(world.root / "ckpt", RunRecord(rollout, run, version, 1), FILES)
    (world.root / "ckpt/latest_checkpointed_iteration.txt").write_text(f"{rollout}\n")


def resumed(world: World, name: str, **args: Any) -> StockUpdater:
    made = updater(world, name)
    made.args.load = str(world.root / "ckpt")
    for key, value in args.items():
        setattr(made.args, key, value)
    return made


# ------------------------------------------------------------------------------- which checkpoint was loaded


@pytest.mark.parametrize(
    ("args", "rollout"),
    [
        ({}, 3),
        ({"start_rollout_id": 6}, 5),
        ({"start_rollout_id": 0}, None),
        ({"ckpt_step": 5}, 5),
        ({"start_rollout_id": None, "ckpt_step": None}, 3),
        ({"load": None}, None),
    ],
)
def test_the_record_of_the_checkpoint_that_was_loaded(
    world: World, args: dict[str, Any], rollout: int | None
) -> None:
    save(world, 5, 50)
    save(world, 3, 30)
    found = loaded_record(SimpleNamespace(**({"load": str(world.root / "ckpt")} | args)), FILES)
    assert (None if found is None else found.rollout_id) == rollout


def test_a_first_start_has_none(world: World) -> None:
    assert loaded_record(None, FILES) is None
    assert loaded_record(SimpleNamespace(load=str(world.root / "nothing")), FILES) is None
    save(world, 3, 30)
    (world.root / "ckpt/latest_checkpointed_iteration.txt").write_text("release")
    assert loaded_record(SimpleNamespace(load=str(world.root / "ckpt")), FILES) is None


# ------------------------------------------------------------------------------------ above a raised floor


def test_a_stock_trainer_resumes_above_a_raised_floor(world: World) -> None:
    """Its delta was always made from version 0, which a run whose floor has risen refuses."""
    first = updater(world, "first")
    first.update_weights()
    for _ in range(2):
        first.tensors = world.learn()
        first.update_weights()
    saved = world.learn()
    anchor = publish_full(world, saved)
    again = resumed(world, "second")
    again.tensors = saved
    given = again.args.hf_checkpoint
    again.update_weights()
    assert again.weight_version == 5
    assert again.args.hf_checkpoint == given, "only the snapshot comes from elsewhere"
    chain = versions(world)
    assert chain[5].representation.base == anchor.state == chain[5].state
    assert chain[5].representation.changed == {}
    again.tensors = world.learn()
    again.update_weights()
    assert [m.number for m in versions(world)] == [0, 1, 2, 3, 4, 5, 6]
    assert rebuilt(world, 6) == plain(world.tensors)
    assert not [name for name in FILES.list(world.root / "work") if "base-" in name]


@pytest.mark.parametrize(("saved_at", "base"), [(2, 3), (3, 3), (4, 3), (5, 6), (6, 6), (None, 3)])
def test_it_builds_on_the_floor_or_the_head_whichever_is_nearer(
    world: World, saved_at: int | None, base: int
) -> None:
    publish_own(world, 1, 2)
    publish_full(world, world.learn())
    publish_own_more(world, 3)
    if saved_at is not None:
        save(world, 7, saved_at)
    again = resumed(world, "again")
    again.tensors = world.learn()
    again.update_weights()
    chain = versions(world)
    assert [m.number for m in chain] == list(range(8))
    assert chain[7].representation.base == chain[base].state
    assert rebuilt(world, 7) == plain(world.tensors)


def publish_own_more(world: World, steps: int) -> None:
    delta = claimed(world, Solo())
    for _ in range(steps):
        delta.publish(world.learn())


def claimed(world: World, group: Any) -> OwnDelta:
    made = world.publisher(group)
    made.claim()
    return OwnDelta(made, FILES)


def test_our_own_encoder_resumes_above_a_raised_floor_on_several_ranks(world: World) -> None:
    publish_own(world, 2, 2)
    publish_full(world, world.learn())
    after = world.learn()

    def train(group: ThreadGroup) -> int | None:
        return claimed(world, group).publish(world.share(after, group.rank, 3))

    assert same(on_ranks(3, train)) == 4
    chain = versions(world)
    assert chain[4].representation.base == chain[3].state
    assert rebuilt(world, 4) == plain(after)
    assert not [name for name in FILES.list(world.root / "work") if "base-" in name]


def test_a_checkout_that_a_trainer_left_is_proven_before_it_is_used(world: World) -> None:
    publish_own(world, 1, 1)
    anchor = publish_full(world, world.learn())
    left = world.publisher(Solo())
    left.claim()  # and dies
    shard = next(path for path in left.base.iterdir() if path.suffix == ".safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    for damaged in (bytes(data), b"no checkpoint"):
        shard.write_bytes(damaged)
        again = world.publisher(Solo())
        again.claim()
        assert again.base == left.base
        assert Checkpoint.open(again.base, FILES).state() == anchor.state


def test_an_updater_that_hides_where_its_snapshot_is_from_is_refused(world: World) -> None:
    made = updater(world, "updates")
    made.args = None
    with pytest.raises(RanksFailed, match=r"has no args.hf_checkpoint to take its snapshot from"):
        made.update_weights()


def test_c33_a_snapshot_is_taken_from_the_boot_checkpoint_that_was_proven(world: World) -> None:
    """``stitch_boot`` may differ from the framework's own checkpoint, from which the delta was made then."""
    other = world.root / "other"
    write_checkpoint(other, FILES, world.learn())
    made = updater(world, "updates")
    made.args.hf_checkpoint = str(other)
    made.update_weights()
    assert rebuilt(world, 1) == plain(world.history[0])
    made.tensors = world.learn()
    made.update_weights()
    assert rebuilt(world, 2) == plain(world.tensors)


# --------------------------------------------------------------------------------------------- rollbacks


def rolled_back(world: World) -> None:
    """Versions 1 to 4, and a rollback to 2 that made version 5."""
    publish_own(world, 1, 4)

    async def run() -> None:
        writer = publisher(world)
        await writer.take_back(2)
        directory = world.root / "rollback"
        write_checkpoint(directory, FILES, world.history[2])
        state = state_digest(table_of(world.history[2]))
        await writer.publish(Payload("full", state, directory, tuple(FILES.list(directory))))

    asyncio.run(run())


def test_c35_a_supervisor_does_not_undo_a_rollback(world: World) -> None:
    rolled_back(world)
    save(world, 9, 3)
    again = resumed(world, "again")
    with pytest.raises(RanksFailed, match=r"a rollback to 2 gave up the versions 3 to 4"):
        again.update_weights()
    assert [m.epoch for m in versions(world)][-1] == 2, "nobody was fenced"
    save(world, 9, 2)
    again = resumed(world, "good")
    again.tensors = world.history[2]
    again.update_weights()
    assert again.weight_version == 6
    assert versions(world)[6].state == versions(world)[2].state


def test_c35_unless_it_is_told_to(world: World) -> None:
    rolled_back(world)
    save(world, 9, 3)
    again = resumed(world, "again")
    hooks.trainer().settings = world.settings(override=True)
    again.tensors = world.history[3]
    again.update_weights()
    assert again.weight_version == 6
    assert rebuilt(world, 6) == plain(world.history[3])


def test_a_record_of_another_run_is_refused_before_anybody_is_fenced(world: World) -> None:
    publish_own(world, 1, 1)
    save(world, 2, 1, run="other")
    again = resumed(world, "again")
    with pytest.raises(RanksFailed, match="belongs to run other, stitch_run says r"):
        again.update_weights()
    save(world, 2, 9)
    with pytest.raises(RanksFailed, match=r"saved at version 9: is this the same store\?"):
        resumed(world, "more").update_weights()


# ------------------------------------------------------------------------------------------ C38 at the start


def test_c38_a_base_that_cannot_be_checked_out_fences_nobody(world: World) -> None:
    """The floor's payload is gone: a restarted trainer fenced the one that was publishing, and failed."""
    publish_own(world, 1, 1)
    publish_full(world, world.learn())
    live = claimed(world, Solo())
    live.publish(world.learn())
    epoch = versions(world)[-1].epoch
    for path in (world.root / "store/runs/r").glob("e*/weight_v000002/*"):
        path.unlink()
    with pytest.raises(RanksFailed, match="checking out version 2 of run r"):
        claimed(world, Solo())
    live.publish(world.learn())
    assert versions(world)[-1].epoch == epoch


def test_c38_no_room_for_the_proven_copy_fences_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    live = claimed(world, Solo())
    live.publish(world.learn())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(HostCheckpoint, "seed", full)
        with pytest.raises(RanksFailed, match="no space left"):
            world.publisher(Solo(), prove=True).claim()
    live.publish(world.learn())


def test_c38_a_channel_that_cannot_be_read_is_moved_by_the_claim(world: World) -> None:
    """It failed after the claim, once and at every start; to point it anew is how it is repaired."""
    claimed(world, Solo())
    channel = world.root / "store/channels/latest"
    channel.parent.mkdir()
    channel.write_text("{")
    world.publisher(Solo(), channel="latest").claim()
    assert '"run":"r"' in channel.read_text()


def test_c38_a_policy_that_does_not_fit_is_found_before_the_claim(world: World) -> None:
    tensors = world.learn()
    check_policy(Solo(), world.boot, FILES, tensors)
    wrong: dict[str, dict[str, Tensor]] = {
        "extra": {**tensors, "model.extra": Tensor("F32", (1,), bytes(4))},
        "missing": {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"},
        "scale": {**tensors, "scale": Tensor("F32", (1,), bytes(4))},
    }
    for word, given in wrong.items():
        with pytest.raises(RanksFailed, match=word):
            check_policy(Solo(), world.boot, FILES, given)

    def on_rank(group: ThreadGroup) -> None:
        check_policy(group, world.boot, FILES, world.share(tensors, group.rank, 3))

    same(on_ranks(3, on_rank))
