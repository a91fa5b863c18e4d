"""Checkpoints of a trainer: old ones go while it runs, and none that a restart or a rollback needs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stitch_recipes import catalogue, training
from stitch_recipes.launch import modal_run
from stitch_recipes.launch.modal_app import Deployment
from stitch_recipes.launch.saves import prune
from stitch_recipes.processes import Process
from stitch_recipes.schema import Versions
from tests.recipes.launch.examples import site_for
from tests.recipes.launch.test_modal_profile import Volume

RECIPE = catalogue.load("qwen3-0.6b/miles")


def saved(saves: Path, *numbers: int, newest: int | str | None = None) -> None:
    """As both frameworks save: by the last rollout, then the tracker."""
    for number in numbers:
        (saves / f"iter_{number:07d}").mkdir(parents=True)
        (saves / f"iter_{number:07d}" / "__0_0.distcp").write_text("x")
    (saves / "latest_checkpointed_iteration.txt").write_text(str(numbers[-1] if newest is None else newest))


def there(saves: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("iter_")) for path in saves.glob("iter_*[0-9]"))


def test_the_newest_stay_whatever_their_numbers(tmp_path: Path) -> None:
    """Megatron's --save-retain-interval 20 would keep 99 alone: no number is a multiple."""
    saved(tmp_path, 19, 39, 59, 79, 99)
    (tmp_path / "rollout").mkdir()
    (tmp_path / "stitch").mkdir()
    assert prune(tmp_path, 3) == ["iter_0000019", "iter_0000039"]
    assert there(tmp_path) == [59, 79, 99]
    assert prune(tmp_path, 3) == []
    assert (tmp_path / "rollout").is_dir()
    assert (tmp_path / "stitch").is_dir()


def test_what_is_being_saved_counts_for_nothing_and_is_left_alone(tmp_path: Path) -> None:
    """The tracker names the last one that is whole; 99 may be half there."""
    saved(tmp_path, 19, 39, 59, 79, 99, newest=79)
    assert prune(tmp_path, 2) == ["iter_0000019", "iter_0000039"]
    assert there(tmp_path) == [59, 79, 99]


def test_a_trainer_that_was_sent_back_keeps_what_it_was_sent_back_from(tmp_path: Path) -> None:
    saved(tmp_path, 19, 39, 59, 79, 99, newest=39)
    assert prune(tmp_path, 2) == []
    assert there(tmp_path) == [19, 39, 59, 79, 99]


def nothing(saves: Path) -> None:
    pass


def a_release(saves: Path) -> None:
    saved(saves, 19, 39, 59, newest="release")


def a_tracker_alone(saves: Path) -> None:
    saved(saves, 19, 39, 59, newest=79)


@pytest.mark.parametrize("fill", [nothing, a_release, a_tracker_alone])
def test_where_the_one_to_load_is_not_known_nothing_goes(
    fill: Callable[[Path], None], tmp_path: Path
) -> None:
    fill(tmp_path)
    before = there(tmp_path)
    assert prune(tmp_path, 2) == []
    assert there(tmp_path) == before
    assert prune(tmp_path / "nowhere", 2) == []


def test_links_and_files_are_no_checkpoints_and_what_was_half_removed_goes(tmp_path: Path) -> None:
    saved(tmp_path, 39, 59, 79)
    (tmp_path / "iter_0000001").symlink_to(tmp_path / "iter_0000039")
    (tmp_path / "iter_0000002").write_text("a file")
    (tmp_path / "iter_0000019.removed").mkdir()
    assert prune(tmp_path, 2) == ["iter_0000039"]
    assert {path.name for path in tmp_path.glob("iter_*")} == {
        "iter_0000001", "iter_0000002", "iter_0000059", "iter_0000079",
    }  # fmt: skip


def beside(saves: Path, script: str) -> subprocess.Popen[bytes]:
    words = training.tidied(RECIPE, site_for(RECIPE, saves="/s"), Process(("bash", "-c", script))).argv
    assert words[3:5] == ("/s/math-1", str(RECIPE.versions.kept_saves))
    command = [sys.executable, *words[1:3], str(saves), "2", *words[5:]]
    path = {"PYTHONPATH": ":".join(filter(None, sys.path)), "STITCH_SAVES_SECONDS": "0.1"}
    return subprocess.Popen(command, env={**os.environ, **path})


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_old_ones_go_while_the_trainer_runs_and_its_end_is_the_trainers(tmp_path: Path) -> None:
    saved(tmp_path / "saves", 19, 39, 59)
    go = tmp_path / "go"
    child = beside(tmp_path / "saves", f"until [[ -e {go} ]]; do sleep 0.05; done; exit 7")
    try:
        until(lambda: there(tmp_path / "saves") == [39, 59])
        go.touch()
        assert child.wait(60) == 7
    finally:
        child.kill()
        child.wait()


def test_a_trainer_that_is_asked_to_end_is_asked(tmp_path: Path) -> None:
    child = beside(
        tmp_path, f"trap 'touch {tmp_path}/asked; exit 5' TERM; touch {tmp_path}/up; sleep 60 & wait"
    )
    try:
        until((tmp_path / "up").exists)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 5
        assert (tmp_path / "asked").exists()
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("versions", "kept"),
    [
        ({"save_every": 20, "anchor_every": 32}, 5),  # 64 versions back: saves of 80 rollouts
        ({"save_every": 10, "anchor_every": 64}, 14),
        ({"save_every": 20, "anchor_every": 32, "publish_every": 2}, 8),
        ({"save_every": 20, "anchor_every": 32, "keep_saves": 3}, 3),
        ({"anchor_every": 32}, 2),
        ({"save_every": 20}, 2),
    ],
)
def test_as_many_are_kept_as_reach_back_to_what_a_rollback_can_go_to(
    versions: dict[str, int], kept: int
) -> None:
    assert Versions.model_validate(versions).kept_saves == kept


def test_on_modal_they_go_from_the_volume_that_all_nodes_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer's container sees its own part of each: what it removed, the others' parts would outlive."""
    volume = Volume()
    monkeypatch.setattr(Deployment, "saved", property(lambda self: volume))
    versions = RECIPE.versions.model_copy(update={"keep_saves": 2})
    recipe = RECIPE.model_copy(update={"versions": versions})
    deployment = Deployment(recipe, site_for(recipe, saves=str(tmp_path)), tmp_path)
    modal_run.tidy(deployment)
    assert volume.calls == ["reload"]
    saved(tmp_path / "math-1", 9, 19, 29)
    modal_run.tidy(deployment)
    assert volume.calls == ["reload", "reload", "commit"]
    assert there(tmp_path / "math-1") == [19, 29]


def test_a_trainer_that_is_tried_again_sees_what_the_other_nodes_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the same container the parts of the other nodes were missing, and none of the checkpoints loaded."""

    class Held(Volume):
        def reload(self) -> None:
            super().reload()
            raise RuntimeError("there are open files preventing the operation")

    saves, held = Volume(), Held()
    monkeypatch.setattr(Deployment, "saved", property(lambda self: saves))
    monkeypatch.setattr(Deployment, "prepared", property(lambda self: {"/models": held, "/data": held}))
    modal_run.see_all(Deployment(RECIPE, site_for(RECIPE), tmp_path))
    assert (saves.calls, held.calls) == (["reload"], ["reload"] * 2)
    assert capsys.readouterr().err.count("open files") == 2
