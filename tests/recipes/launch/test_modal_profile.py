"""`python app.py profile`: the recipe's own update, measured in a container of a replica's, its row kept."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stitch_recipes import catalogue
from stitch_recipes.launch import modal as launcher
from stitch_recipes.launch import modal_run
from stitch_recipes.launch.files import write
from stitch_recipes.launch.modal_app import Deployment
from stitch_recipes.profile import engine
from stitch_recipes.profile.bases import made
from tests.recipes.launch.examples import site_for

RECIPE = catalogue.load("qwen3-0.6b/miles")
SERVED = "qwen3-0.6b-bf16"


class Volume:
    """What a container does with one; there is no other container."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def reload(self) -> None:
        self.calls.append("reload")

    def commit(self) -> None:
        self.calls.append("commit")


@pytest.fixture
def volume(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Volume:
    """In place of Modal's, on a host that shows a GPU, with a checkpoint and `stitch` of the clone."""
    there = Volume()
    monkeypatch.setattr(Deployment, "models", property(lambda self: there))
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(engine, "DRIVER", tmp_path / "nvidiactl")
    made(RECIPE, "small", tmp_path / "models" / SERVED)
    programs = tmp_path / "bin"
    programs.mkdir()
    program = f"#!{sys.executable}\nimport sys\nfrom stitch_core.cli.main import main\nsys.exit(main())\n"
    (programs / "stitch").write_text(program)
    (programs / "stitch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    return there


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    site = site_for(RECIPE, store="modal://versions/runs", models=str(tmp_path / "models"))
    write(launcher.render(RECIPE, site), tmp_path / "out", "modal")
    return Deployment.read(str(tmp_path / "out" / "app.py"))


def kept(tmp_path: Path) -> list[dict[str, Any]]:
    files = sorted((tmp_path / "models" / "profiles").glob("qwen3-0.6b-miles-*.json"))
    return [json.loads(file.read_text()) for file in files]


def test_the_row_is_printed_returned_and_a_file_on_the_volume(
    volume: Volume, deployment: Deployment, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Everything but the engine is real: there is no GPU here."""
    row = json.loads(modal_run.profile(deployment, "--engine", "none", "--change", "training"))
    assert kept(tmp_path) == [row]
    assert volume.calls == ["reload", "commit"]
    assert (row["recipe"], row["change"]["kind"]) == (RECIPE.name, "training")
    assert (row["checkpoint"]["name"], row["checkpoint"]["made"]) == (RECIPE.serve, False)
    assert row["preparation"]["apply"] > 0
    assert any("--engine none" in one for one in row["excludes"])
    assert row["projection"]["terms"]
    said = capfd.readouterr()
    assert "qwen3-0.6b/miles: bf16" in said.out
    assert "excluded    " in said.out
    assert "of the Volume models" in said.out
    assert "+ stitch recipe profile " in said.err


def lacks_checkpoint(tmp_path: Path) -> None:
    next((tmp_path / "models" / SERVED).glob("*.safetensors")).unlink()


def shows_no_gpu(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").unlink()


@pytest.mark.parametrize(
    ("spoil", "options", "message"),
    [
        (lacks_checkpoint, (), r"not there; `python app.py prepare` makes the checkpoint"),
        (shows_no_gpu, (), "this container shows no GPU"),
        (lambda tmp_path: None, ("--chance",), "stitch recipe ended with 2: see above"),
    ],
)
def test_what_cannot_be_measured_is_said_and_leaves_no_row(
    spoil: Callable[[Path], None],
    options: tuple[str, ...],
    message: str,
    volume: Volume,
    deployment: Deployment,
    tmp_path: Path,
) -> None:
    spoil(tmp_path)
    with pytest.raises(RuntimeError, match=message):
        modal_run.profile(deployment, *options)
    assert kept(tmp_path) == []


def test_a_check_that_fails_is_an_error_and_its_row_is_kept(
    volume: Volume, deployment: Deployment, tmp_path: Path
) -> None:
    row = modal_run.profile(deployment, "--engine", "none")
    shutil.rmtree(tmp_path / "models" / "profiles")
    program = f"#!/bin/sh\ncat <<'E'\n{row}\nE\nexit 1\n"
    (tmp_path / "bin" / "stitch").write_text(program)
    with pytest.raises(RuntimeError, match="a check failed, see above"):
        modal_run.profile(deployment)
    assert kept(tmp_path) == [json.loads(row)]


def test_a_rendered_run_is_a_recipe_for_every_command(deployment: Deployment, tmp_path: Path) -> None:
    """One of a file of one's own is in the container by its run.yaml alone."""
    assert catalogue.load(str(tmp_path / "out" / "run.yaml")) == RECIPE
