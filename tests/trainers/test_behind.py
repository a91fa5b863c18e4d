"""Publishing behind the step, on several ranks: a queue of one, one outcome, a base that follows the head."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stitch_core.ports import Store, StoreError
from stitch_core.trainers import hooks
from stitch_core.trainers.group import RanksFailed, Solo, together
from stitch_core.trainers.own_delta import OwnDelta
from stitch_core.trainers.publication import FleetLate, GroupPublisher
from stitch_core.trainers.settings import TrainerSettings
from tests.small_run import FILES
from tests.test_policy_publisher import Gated, refuse
from tests.trainers.ranks import ThreadGroup, World, on_ranks, own, same
from tests.trainers.test_publication import plain, rebuilt, versions
from tests.woken import Woken


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def behind(world: World, group: Any, store: Callable[[], Store] | None = None, **more: Any) -> OwnDelta:
    """It has published what the trainer starts with, version 1, which is waited for."""
    settings = world.settings(async_=True, **more)
    publisher = GroupPublisher(settings, group, files=FILES, store=store or world.store)
    publisher.claim()
    delta = OwnDelta(publisher, FILES)
    assert delta.publish(world.share(world.history[0], group.rank, group.size)) == 1
    assert publisher.number == 1
    return delta


def test_every_step_is_published_in_order(world: World) -> None:
    todo = [world.learn() for _ in range(5)]

    def train(group: ThreadGroup) -> list[int]:
        delta = behind(world, group)
        done = [delta.publish(world.share(t, group.rank, 3), step=i) for i, t in enumerate(todo)]
        delta.flush()
        return done

    assert same(on_ranks(3, train)) == [2, 3, 4, 5, 6]
    steps = [(0, None), (1, None), *((i + 2, i) for i in range(5))]
    assert [(m.number, m.step) for m in versions(world)] == steps
    assert rebuilt(world, 6) == plain(world.tensors)
    assert not world.left()


def test_the_trainer_goes_on_meanwhile_then_waits(world: World) -> None:
    store = Gated(world.store())
    delta = behind(world, Solo(), lambda: store)
    store.hold = "weight_v000002"
    began = time.monotonic()
    assert delta.publish(world.learn()) == 2
    assert delta.publish(world.learn()) == 3
    assert store.held.wait(10)
    assert [m.number for m in versions(world)] == [0, 1]
    assert not any("v000003" in key for _, key in store.calls), "the one that waits uploads nothing"
    threading.Timer(0.2, store.go.set).start()
    assert delta.publish(world.learn()) == 4  # waits for the first
    assert time.monotonic() - began > 0.15
    delta.flush()
    assert [m.number for m in versions(world)] == [0, 1, 2, 3, 4]


def test_c04_a_failure_is_everybodys_at_the_next_step_and_then_repaired(world: World) -> None:
    todo = [world.learn() for _ in range(4)]

    def train(group: ThreadGroup) -> list[str | int | None]:
        store = Gated(world.store())
        if group.rank == 1:
            store.fail = refuse("v000003/model-rank00001")
        delta = behind(world, group, lambda: store)
        done: list[str | int | None] = []
        for tensors in todo[:3]:
            try:
                done.append(delta.publish(world.share(tensors, group.rank, 2)))
            except RanksFailed as error:
                done.append(str(error))
        # Which step is told depends on time; what the base is does not.
        try:
            delta.flush()
        except RanksFailed as error:
            done.append(str(error))
        store.fail = lambda *_: None
        done.append(delta.publish(world.share(todo[3], group.rank, 2)))
        delta.flush()
        return done

    done = same(on_ranks(2, train))
    assert done[:2] == [2, 3]
    failures = [text for text in done if isinstance(text, str)]
    assert len(failures) == 1, failures
    assert "publishing weight_v000003 of run r (uploading) failed on 1 of 2 ranks; rank 1: " in failures[0]
    assert "disk full" in failures[0]
    numbers = [m.number for m in versions(world)]
    assert numbers[:3] == [0, 1, 2]
    assert 3 not in numbers
    assert numbers[-1] == done[-1]
    assert rebuilt(world, numbers[-1]) == plain(world.tensors)
    assert not world.left()


def test_an_encode_that_fails_takes_back_itself_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Gated(world.store())
    delta = behind(world, Solo(), lambda: store)
    store.hold = "weight_v000002"
    assert delta.publish(world.learn()) == 2
    with monkeypatch.context() as patch:
        patch.setattr(delta, "_index", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
        threading.Timer(0.1, store.go.set).start()
        with pytest.raises(RanksFailed, match=r"encoding weight_v000003.*no space left"):
            delta.publish(world.learn())
    assert delta.publish(world.learn()) == 3  # never used: nothing was uploaded under it
    delta.flush()
    assert [m.number for m in versions(world)] == [0, 1, 2, 3]
    assert rebuilt(world, 3) == plain(world.tensors)


def test_a_rank_that_dies_behind_the_step_stops_the_others(world: World) -> None:
    todo = [world.learn() for _ in range(3)]

    def train(group: ThreadGroup) -> None:
        delta = behind(world, group)
        for tensors in todo:
            delta.publish(world.share(tensors, group.rank, 2))
            if group.rank == 1:
                group.die()
        delta.flush()

    results = on_ranks(2, train)
    assert isinstance(results[0], RanksFailed)
    assert "a process of this trainer is gone" in str(results[0])


def test_the_last_step_is_published_when_it_returns(world: World) -> None:
    delta = behind(world, Solo())
    assert delta.publish(world.learn(), wait=True) == 2
    assert [m.number for m in versions(world)] == [0, 1, 2]
    trainer = hooks.Trainer(world.settings(), Solo(), "test", type("Args", (), {"num_rollout": 3})())
    assert not trainer.ends
    trainer.step = 1
    assert not trainer.ends
    trainer.step = 2
    assert trainer.ends


def test_who_knows_no_last_step_cannot_publish_behind_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_TRAINER", None)
    args = SimpleNamespace(
        stitch_run="r", stitch_store=f"file:{world.root}/store", stitch_async=True, hf_checkpoint="/boot"
    )
    with pytest.raises(
        RanksFailed, match=r"set --custom-megatron-before-train-step-hook-path stitch_miles.hoo"
    ):
        hooks.set_up(args, Solo(), "miles", lambda: None)
    args.custom_megatron_before_train_step_hook_path = "stitch_miles.hooks.before_train_step"
    assert hooks.set_up(args, Solo(), "miles", lambda: None).settings.async_


def test_c07_one_that_was_fenced_says_so_at_the_next_step(world: World) -> None:
    old = behind(world, Solo())
    old.publish(world.learn())
    old.flush()
    own(world, Solo())
    old.publish(world.learn())
    with pytest.raises(RanksFailed, match="another writer has claimed run r"):
        old.flush()
    with pytest.raises(RanksFailed, match="another writer has claimed run r"):
        old.publish(world.learn())
    assert [m.number for m in versions(world)] == [0, 1, 2]


def test_a_stock_encoder_cannot_be_behind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_TRAINER", hooks.Trainer(world.settings(async_=True), Solo(), "test"))
    with pytest.raises(RanksFailed, match=r"stitch_async: .*take it out"):
        hooks.start_through_stitch(type("Updater", (), {}), lambda _: None)


# ------------------------------------------------------------------------------------ waiting for replicas


def announce(world: World, applied: int) -> None:
    (world.root / "store/replicas").mkdir(exist_ok=True)
    record = {"run": "r", "applied": applied, "target": None, "expires": time.time() + 60}
    (world.root / "store/replicas/a.json").write_text(json.dumps(record))


@pytest.mark.parametrize("async_", [False, True])
def test_too_few_replicas_stop_the_trainer_if_it_says_so_and_the_base_stays(
    world: World, async_: bool
) -> None:
    todo = [world.learn(), world.learn()]
    settings: dict[str, Any] = {
        "wait_replicas": 1.0, "wait_replicas_timeout": 0.2, "wait_replicas_then": "stop", "async_": async_,
    }  # fmt: skip

    def train(group: ThreadGroup) -> list[Any]:
        publisher = GroupPublisher(world.settings(**settings), group, files=FILES, store=world.store)
        publisher.claim()
        delta = OwnDelta(publisher, FILES)
        together(group, "test", lambda: announce(world, 0) if group.rank else None)
        try:
            delta.publish(world.share(todo[0], group.rank, 2))
            delta.flush()
        except FleetLate as error:
            done: list[Any] = [str(error)]
        together(group, "test", lambda: announce(world, 9) if group.rank else None)
        done.append(delta.publish(world.share(todo[1], group.rank, 2)))
        delta.flush()
        return done

    late, number = same(on_ranks(2, train))
    assert late.endswith("is published, but after 0.2 s 0 of 1 live replicas serve it, 100% were asked for")
    assert number == 2
    chain = versions(world)
    assert chain[2].representation.base == chain[1].state
    assert rebuilt(world, 2) == plain(world.tensors)


def test_too_few_replicas_are_only_said_by_default(world: World, caplog: pytest.LogCaptureFixture) -> None:
    publisher = world.publisher(Solo(), wait_replicas=3, wait_replicas_timeout=0.0)
    publisher.claim()
    delta = OwnDelta(publisher, FILES)
    assert delta.publish(world.learn()) == 1
    assert "0 of 0 live replicas serve it, 3 were asked for" in caplog.text


def test_an_unreadable_store_does_not_fail_what_is_published(world: World) -> None:
    store = Gated(world.store())
    settings: TrainerSettings = world.settings(wait_replicas=1, wait_replicas_timeout=0.2)
    publisher = GroupPublisher(settings, Solo(), files=FILES, store=lambda: store)
    publisher.claim()
    store.fail = lambda i, name, key: StoreError("denied") if name == "list" else None
    assert OwnDelta(publisher, FILES).publish(world.learn()) == 1


# ------------------------------------------------------------------------------------------------ waking


@pytest.mark.parametrize("async_", [False, True])
def test_one_rank_wakes_and_a_server_that_is_gone_is_in_nobodys_way(
    world: World, async_: bool, caplog: pytest.LogCaptureFixture
) -> None:
    todo = [world.learn(), world.learn()]

    def train(group: ThreadGroup) -> list[int]:
        settings = world.settings(wake=("http://127.0.0.1:1", server.url), async_=async_)
        publisher = GroupPublisher(settings, group, files=FILES, store=world.store)
        publisher.claim()
        delta = OwnDelta(publisher, FILES)
        done = []
        for tensors in todo:
            done.append(delta.publish(world.share(tensors, group.rank, 2)))
            delta.flush()
            if group.rank == 0:
                server.until(lambda: len(server.calls) == len(done))
        return done

    with Woken().running() as server:
        assert same(on_ranks(2, train)) == [1, 2]
    assert len(server.calls) == 2
    assert "http://127.0.0.1:1 is not woken by new versions" in caplog.text


def test_a_token_to_wake_with_that_cannot_be_one_stops_the_start(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STITCH_WAKE_TOKEN", "short")
    with pytest.raises(RanksFailed, match=r"STITCH_WAKE_TOKEN: a token is at least 16"):
        world.publisher(Solo(), wake=("http://127.0.0.1:1",)).claim()
    assert not (world.root / "store/runs").exists()
