"""C77: what the plugin sees of the boot checkpoint before SGLang loads it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from stitch_core.checkpoint import first_change, marks_of
from stitch_core.files import PosixFiles
from stitch_core.testing.checkpoints import write_checkpoint
from stitch_core.testing.runs import RunBuilder
from stitch_sglang import plugin
from stitch_sglang.server import boot_directory

FILES = PosixFiles()


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plugin, "boot_marks", {})
    monkeypatch.setenv("STITCH_STORE", f"file:{tmp_path}/store")
    monkeypatch.setenv("STITCH_RUN", "r")


def launch(model_path: str) -> SimpleNamespace:
    """SGLang is about to start its schedulers."""
    server_args = SimpleNamespace(model_path=model_path)
    plugin.before_launch_subprocesses(object, server_args=server_args)
    return server_args


@pytest.mark.parametrize("given", ["absolute", "relative", "a link"])
def test_it_is_looked_at_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """As it was named: where a link points may change until it is hashed."""
    trainer = RunBuilder(tmp_path / "run", FILES)
    link = tmp_path / "current"
    link.symlink_to(trainer.boot)
    monkeypatch.chdir(tmp_path)
    server_args = launch({"absolute": str(trainer.boot), "relative": "run/boot", "a link": str(link)}[given])
    directory = boot_directory(server_args)
    assert directory.samefile(trainer.boot)
    assert first_change(plugin.boot_marks, marks_of(directory, FILES)) is None
    other = tmp_path / "other"
    write_checkpoint(other, FILES, trainer.tensors[0], 2)
    if given == "a link":
        link.unlink()
        link.symlink_to(other)
    else:
        trainer.boot.rename(tmp_path / "loaded")
        other.rename(trainer.boot)
    assert first_change(plugin.boot_marks, marks_of(directory, FILES)) is not None


def test_one_that_is_not_there_is_no_proof(tmp_path: Path) -> None:
    launch(str(tmp_path / "no such"))
    assert not plugin.boot_marks
