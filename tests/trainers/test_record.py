"""C06 at the checkpoint: a record says where a run stood, and a wrong run or store is refused on load."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stitch_core.ports import StoreError
from stitch_core.trainers.data import VersionRecord
from stitch_core.trainers.group import Solo
from stitch_core.trainers.record import RecordError, RunRecord, load_record, record_path
from tests.small_run import FILES
from tests.trainers.ranks import World, own


class Source:
    """A framework's data source."""

    def __init__(self, args: Any) -> None:
        self.args, self.calls = args, []

    def save(self, rollout_id: int) -> None:
        self.calls.append(("save", rollout_id))

    def load(self, rollout_id: int | None = None) -> None:
        self.calls.append(("load", rollout_id))


class RecordedSource(VersionRecord, Source):
    pass


def source(world: World, **values: Any) -> RecordedSource:
    known = {
        "save": str(world.root / "ckpt"), "load": str(world.root / "ckpt"), "hf_checkpoint": str(world.boot),
        "stitch_run": "r", "stitch_store": f"file:{world.root}/store",
    }  # fmt: skip
    return RecordedSource(SimpleNamespace(**(known | values)))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_checkpoint_remembers_its_version(world: World) -> None:
    own(world, Solo()).publish(world.learn())
    saving = source(world)
    saving.save(4)
    assert saving.calls == [("save", 4)]
    assert load_record(world.root / "ckpt", 4, FILES) == RunRecord(4, "r", 1, 1)
    loading = source(world)
    loading.load(4)
    assert loading.stitch_record == RunRecord(4, "r", 1, 1)


def test_first_starts_and_unsaved_runs_have_no_record(world: World) -> None:
    fresh = source(world)
    fresh.load(-1)
    fresh.load(7)
    assert fresh.stitch_record is None
    source(world, save=None).save(0)
    source(world).save(0)  # nobody has claimed the run: there is no version to record
    assert load_record(world.root / "ckpt", 0, FILES) is None


def test_prompts_go_on_from_the_last_note_when_a_checkpoint_has_none(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer was killed between Megatron's checkpoint and Miles' note of its prompts. Resumed, Miles asked
    the first prompts again: 8 of 36 samples were trained on twice."""
    notes = world.root / "ckpt" / "rollout"
    notes.mkdir(parents=True)
    for name in ("global_dataset_state_dict_3.pt", "global_dataset_state_dict_12.pt", "else_5.pt"):
        (notes / name).touch()
    torn = source(world)
    torn.load(6)
    assert torn.calls == [("load", 3)]
    assert "they go on from where they were after rollout 3" in caplog.text
    caplog.clear()
    # Whole, before the first note, and at a first start: as the framework has it.
    for rollout in (12, 3, 2, -1):
        torn.load(rollout)
        assert torn.calls[-1] == ("load", rollout)
    assert not caplog.records


def test_another_run_or_store_is_refused(world: World) -> None:
    own(world, Solo()).publish(world.learn())
    source(world).save(1)
    with pytest.raises(RecordError, match="belongs to run r, stitch_run says other"):
        source(world, stitch_run="other").load(1)
    with pytest.raises(RecordError, match="head is missing: is stitch_store the same one"):
        source(world, stitch_store=f"file:{world.root}/empty").load(1)


def test_c18_a_save_waits_for_a_store_that_is_away(world: World) -> None:
    own(world, Solo())
    store, away = world.root / "store", world.root / "away"

    def back() -> None:
        store.unlink()
        away.rename(store)

    def leave() -> None:
        away.unlink(missing_ok=True)
        store.rename(away)
        store.symlink_to("store")  # a link to itself: nothing below it can be read

    saving = source(world, stitch_patience=30.0)
    saving.save(0)
    leave()
    threading.Timer(0.3, back).start()
    saving.save(1)
    assert load_record(world.root / "ckpt", 1, FILES) == RunRecord(1, "r", 0, 1)
    leave()
    with pytest.raises(StoreError):
        source(world, stitch_patience=0.2).save(2)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "x"}', '{"format": "stitch.trainer/1"}'])
def test_a_record_that_cannot_be_read_is_an_error(world: World, text: str) -> None:
    path = record_path(world.root / "ckpt", 2)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(RecordError, match="cannot be read"):
        source(world).load(2)
