"""The hooks that both frameworks call: when they publish, when they must not, and when they claim."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from stitch_core import logs
from stitch_core.safetensors import Tensor
from stitch_core.trainers import hooks
from stitch_core.trainers.group import RanksFailed, Solo
from stitch_miles.hooks import _repair_zero_dim as repair_miles
from stitch_miles.hooks import check_flags as check_miles
from stitch_slime.hooks import _repair_zero_dim as repair_slime
from stitch_slime.hooks import check_flags as check_slime
from tests.trainers.ranks import Stock, World
from tests.trainers.test_publication import plain, rebuilt, versions


class Shaped:
    """As much of a tensor as the repairs look at."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def dim(self) -> int:
        return len(self.shape)

    def reshape(self, *shape: int) -> Shaped:
        return Shaped(shape)


class StockUpdater:
    """A stock delta updater: the first call only takes a snapshot, later ones write, and call the hook."""

    def __init__(self, stock: Stock, args: Any) -> None:
        self.args = args
        self._stock, self._baseline_captured, self.weight_version = stock, False, 0
        self.tensors: dict[str, Tensor] = stock.world.history[0]

    def update_weights(self) -> None:
        if not self._baseline_captured:
            hooks.post_write(None, str(self._stock.root), [])
            self._stock.snapshot(Path(self.args.hf_checkpoint))
            self._baseline_captured = True
            return
        self.weight_version += 1
        self._stock.number = self.weight_version - 1
        hooks.post_write(None, str(self._stock.write(self.tensors)), [])

    def _iter_hf_tensors(self) -> Iterator[tuple[str, Any]]:
        yield from (("scale", Shaped(())), ("weight", Shaped((2, 3))))

    def _for_each_hf_bucket(self, bucket_func: Any) -> None:
        bucket_func(list(StockUpdater._iter_hf_tensors(self)), "bar")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(hooks, "_TRAINER", None)
    return World(tmp_path)


def _raise(error: Exception) -> NoReturn:
    raise error


def updater(world: World, name: str) -> StockUpdater:
    """A new process of a trainer with the stock updater, set up through the hooks."""
    args = SimpleNamespace(
        stitch_run="r", stitch_store=f"file:{world.root}/store", hf_checkpoint=str(world.boot),
        stitch_work=str(world.root / "work"),
    )  # fmt: skip
    hooks.set_up(args, Solo(), "test", lambda: None)
    fresh = type("Updater", (StockUpdater,), {})
    hooks.start_through_stitch(fresh, lambda _: None)
    hooks.start_through_stitch(fresh, lambda _: None)  # a second actor in the process wraps nothing twice
    made: StockUpdater = fresh(Stock(world, world.root / name), args)
    return made


def test_c27_the_hooks_first_call_publishes_nothing(world: World) -> None:
    trainer = updater(world, "updates")
    calls: list[str] = []
    post_write = hooks.post_write

    def noted(args: Any, version_dir: str, engines: Any) -> None:
        post_write(args, version_dir, engines)
        calls.append(f"{Path(version_dir).name}: {versions(world)[-1].number}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "post_write", noted)
        trainer.update_weights()
    assert calls == ["updates: 0", "weight_v000001: 1"]
    for step in range(2):
        hooks.before_train_step(None, step, 0, None, None, None)
        trainer.tensors = world.learn()
        trainer.update_weights()
    assert [(m.number, m.step) for m in versions(world)] == [(0, None), (1, None), (2, 0), (3, 1)]
    assert rebuilt(world, 3) == plain(world.tensors)


def test_c79_a_new_run_begins_with_the_trainers_own_weights(world: World) -> None:
    """It has loaded a checkpoint of its own, at step 500 say: rollouts began on the boot checkpoint's."""
    trainer = updater(world, "updates")
    trainer.tensors = world.learn()
    trainer.update_weights()
    assert trainer.weight_version == 1
    chain = versions(world)
    assert [m.number for m in chain] == [0, 1]
    assert chain[1].representation.base == chain[0].state
    assert rebuilt(world, 1) == plain(world.tensors)


def test_c79_weights_that_are_the_boot_checkpoints_are_a_version_without_payload(world: World) -> None:
    trainer = updater(world, "updates")
    trainer.update_weights()
    chain = versions(world)
    assert [m.number for m in chain] == [0, 1]
    assert chain[1].state == chain[0].state
    assert chain[1].representation.changed == {}


def test_c06_a_resumed_stock_trainer_publishes_its_own_weights_first(world: World) -> None:
    first = updater(world, "first")
    first.update_weights()
    for _ in range(3):
        first.tensors = world.learn()
        first.update_weights()
    resumed = updater(world, "second")
    resumed.tensors = world.history[2]  # what it saved; version 4 came later
    resumed.update_weights()
    assert resumed.weight_version == 5
    chain = versions(world)
    assert chain[5].state == chain[3].state
    assert chain[5].representation.base == chain[0].state
    resumed.tensors = world.learn()
    resumed.update_weights()
    assert [m.number for m in versions(world)] == [0, 1, 2, 3, 4, 5, 6]
    assert rebuilt(world, 6) == plain(world.tensors)


def test_c04_after_a_failed_publish_a_stock_trainer_stops_and_resumes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = updater(world, "first")
    first.update_weights()
    first.tensors = world.learn()
    first.update_weights()
    first.tensors = world.learn()
    with monkeypatch.context() as context:
        context.setattr(hooks.trainer().publisher, "_upload", lambda *_: _raise(OSError("no space left")))
        with pytest.raises(RanksFailed, match="no space left"):
            first.update_weights()
    # The base of its encoder has moved: what it would write now builds on a version that nobody has.
    first.tensors = saved = world.learn()
    with pytest.raises(RanksFailed, match=r"start the trainer again, to resume: .* no space left"):
        first.update_weights()
    assert [m.number for m in versions(world)] == [0, 1, 2]
    resumed = updater(world, "second")
    resumed.tensors = saved
    resumed.update_weights()
    numbers = [m.number for m in versions(world)]
    assert numbers == sorted(set(numbers))
    assert rebuilt(world, numbers[-1]) == plain(saved)


def test_a_hook_without_set_up_says_which_flag_is_missing(world: World) -> None:
    hooks.post_write(None, "/updates", [])
    with pytest.raises(RanksFailed, match="--custom-megatron-init-path"):
        hooks.post_write(None, "/updates/weight_v000001", [])


def test_c16_tensors_without_dimensions_reach_the_stock_encoders_with_one() -> None:
    slime = type("Slime", (StockUpdater,), {})
    repair_slime(slime)
    assert [t.shape for _, t in slime._iter_hf_tensors(None)] == [(1,), (2, 3)]
    miles = type("Miles", (StockUpdater,), {})
    repair_miles(miles)
    seen: list[Any] = []
    miles._for_each_hf_bucket(None, lambda bucket, bar: seen.extend([t.shape for _, t in bucket] + [bar]))
    assert seen == [(1,), (2, 3), "bar"]


def test_the_frameworks_own_flags_are_checked_at_once() -> None:
    with pytest.raises(ValueError, match="--update-weight-mode delta") as caught:
        check_slime(SimpleNamespace(update_weight_mode="full", update_weight_transport="nccl"))
    assert "--update-weight-transport disk (it is nccl)" in str(caught.value)
    fitting = {
        "update_weight_mode": "delta", "update_weight_transport": "disk",
        "update_weight_delta_checksum": "adler32", "stitch_prove": True,
        "custom_update_weight_post_write_path": "stitch_slime.hooks.post_write",
    }  # fmt: skip
    check_slime(SimpleNamespace(**fitting))
    with pytest.raises(ValueError, match=r"--update-weight-delta-checksum xxh3-128 \(it is adler32\)"):
        check_slime(SimpleNamespace(**fitting | {"stitch_prove": False}))
    with pytest.raises(ValueError, match=r"--colocate False \(it is True\)"):
        check_miles(SimpleNamespace(update_weight_transfer_mode="broadcast", colocate=True), True)
    check_miles(SimpleNamespace(update_weight_transfer_mode="broadcast", colocate=False), True)
    with pytest.raises(ValueError, match="--update-weight-transfer-mode disk-delta"):
        check_miles(SimpleNamespace(update_weight_transfer_mode="broadcast"), False)
    unbuffered = SimpleNamespace(
        update_weight_transfer_mode="broadcast", colocate=False, stitch_max_staleness=2
    )
    # Nothing else would bound it: it would pass in silence.
    with pytest.raises(ValueError, match="StitchDataBuffer, which stitch_max_staleness is for"):
        check_miles(unbuffered, True)
    with pytest.raises(ValueError, match="StitchDataBuffer, which stitch_max_staleness is for"):
        check_miles(SimpleNamespace(**vars(unbuffered) | {"fully_async": True}), True)
    buffered = {"fully_async": True, "custom_async_data_buffer_path": "stitch_miles.buffer.StitchDataBuffer"}
    check_miles(SimpleNamespace(**vars(unbuffered) | buffered), True)


def test_a_session_server_that_would_lose_the_versions_stops_the_run_at_start() -> None:
    fitting = {"update_weight_transfer_mode": "broadcast", "colocate": False, "use_session_server": "v2"}
    stock = "miles.rollout.session.v2.postprocessor_hub.default_postprocess"
    for own in ("stitch_miles.session.postprocess", "mine.postprocess"):
        check_miles(SimpleNamespace(**fitting, session_sample_postprocessor_path=own), True)
    with pytest.raises(ValueError, match=r"--session-sample-postprocessor-path stitch_miles\.session\.post"):
        check_miles(SimpleNamespace(**fitting, session_sample_postprocessor_path=stock), True)
    for v1 in (True, "v1"):
        with pytest.raises(ValueError, match="--use-session-server v2, since v1"):
            check_miles(SimpleNamespace(**fitting | {"use_session_server": v1}), True)


def test_a_trainers_log_lines_are_json_with_run_version_and_rank_where_that_is_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STITCH_LOG", "json")
    logger = logging.getLogger("stitch")
    before = (logger.handlers[:], logger.propagate, logger.level)
    try:
        trainer = updater(world, "first")
        trainer.update_weights()
        trainer.tensors = world.learn()
        trainer.update_weights()
        logger.warning("after it")
    finally:
        logs.set_context(dict)
        logger.handlers[:], logger.propagate = before[:2]
        logger.setLevel(before[2])
    said = [json.loads(text) for text in capsys.readouterr().err.splitlines()]
    assert {(one["run"], one["rank"]) for one in said} == {("r", 0)}
    assert [one["version"] for one in said if one["message"].startswith("run r is claimed")] == [0]
    assert (said[-1]["message"], said[-1]["level"], said[-1]["version"]) == ("after it", "warning", 2)
