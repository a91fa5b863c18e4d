"""What a replica says of the profile of its model, release and flags."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stitch_core.files import PosixFiles
from stitch_core.profile_record import NAME, Record, Setup, write_record
from stitch_sglang.profiled import Profiled
from stitch_sglang.settings import Settings

STATE = "sha256:00"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_OPT_X", raising=False)


def replica(boot: Path, settings: Settings | None = None, **flags: Any) -> Profiled:
    made = Profiled(settings or Settings(store="memory:"), SimpleNamespace(**({"tp_size": 2} | flags)), boot)
    made.boots(STATE)
    return made


def write(boot: Path, like: Profiled, path: str = "cpu", *failed: str) -> None:
    write_record(boot / NAME, Record(Setup.of(like.status()["setup"]), path, failed, 1.0), PosixFiles())


def test_without_a_record_it_is_not_known(tmp_path: Path) -> None:
    made = replica(tmp_path)
    assert made.said()["profiled"] is None
    assert str(tmp_path / NAME) in made.said()["why"]


def test_a_record_beside_the_boot_checkpoint_counts_at_once(tmp_path: Path) -> None:
    made = replica(tmp_path)
    write(tmp_path, made)
    assert made.said()["profiled"] is None
    made.look()
    assert made.said()["profiled"] is True
    assert replica(tmp_path).said()["profiled"] is True


def test_one_that_failed_by_any_way_is_said(tmp_path: Path) -> None:
    made = replica(tmp_path)
    write(tmp_path, made, "cpu")
    write(tmp_path, made, "disk", "after: equal to a fresh server")
    made.look()
    assert made.said()["profiled"] is False
    assert "disk: after: equal to a fresh server" in made.said()["why"]


def test_another_model_release_or_flag_is_not_what_was_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, replica(tmp_path))
    assert replica(tmp_path).said()["profiled"] is True
    assert replica(tmp_path, tp_size=4).said()["profiled"] is None
    assert replica(tmp_path, host="0.0.0.0").said()["profiled"] is True
    disk = Settings(store="memory:", destination="disk")
    assert replica(tmp_path, disk).said()["profiled"] is None
    other = Profiled(Settings(store="memory:"), SimpleNamespace(tp_size=2), tmp_path)
    other.boots("sha256:11")
    assert other.said()["profiled"] is None
    monkeypatch.setattr("stitch_sglang.profiled.RELEASE", "0.5.24")
    assert replica(tmp_path).said()["profiled"] is None
    monkeypatch.undo()
    monkeypatch.setenv("SGLANG_OPT_X", "1")
    assert replica(tmp_path).said()["profiled"] is None


def test_where_the_record_is_told(tmp_path: Path) -> None:
    settings = Settings(store="memory:", profile=tmp_path / "elsewhere.json")
    made = replica(tmp_path, settings)
    write_record(
        tmp_path / "elsewhere.json", Record(Setup.of(made.status()["setup"]), "cpu", (), 1.0), PosixFiles()
    )
    made.look()
    assert made.said()["profiled"] is True


def test_a_file_that_is_no_record_is_named(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("{}")
    made = replica(tmp_path)
    assert made.said()["profiled"] is None
    assert str(tmp_path / NAME) in made.said()["why"]


def test_before_the_boot_checkpoint_is_known_nothing_is_said(tmp_path: Path) -> None:
    made = Profiled(Settings(store="memory:"), SimpleNamespace(), tmp_path)
    made.look()
    assert made.said()["profiled"] is made.status()["setup"] is None
