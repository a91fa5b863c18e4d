"""prepare.sh as bash runs it: what is cut off is made again, what is whole is left, a copy has to be whole.

Stand-ins are the hub's program, which copies a checkpoint that was made here, and a converter on GPUs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stitch_core.checkpoint import Checkpoint
from stitch_core.files import PosixFiles
from stitch_recipes import catalogue
from stitch_recipes.check import problems
from stitch_recipes.launch import shell
from stitch_recipes.launch.files import write
from stitch_recipes.profile.bases import made
from stitch_recipes.schema import Recipe
from tests.recipes.launch.examples import site_for

HUB = """#!/bin/bash
echo "hf $*" >> {log}
while [[ $1 != --local-dir ]]; do shift; done
mkdir -p "$2" && cp {hub}/* "$2"
"""


@pytest.fixture
def kimi() -> dict[str, Any]:
    """Kimi K2.6: INT4 from the hub, its language model without a GPU, BF16 of that with one."""
    tree = catalogue.load("kimi-k2.6/nvfp4").model_dump()
    tree["trainer"]["data"] = {}
    tree["trainer"]["flags"] |= {"megatron-to-hf-mode": "bridge", "prompt-data": "/x"}
    tree["serve"] = "bf16"
    tree["checkpoints"]["bf16"]["prepared"]["command"] = (
        "[[ ! -e {target} ]]; mkdir {target}; cp {source}/* {target}; [[ ! -e $BROKEN ]] && echo converted"
    )
    return tree


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    tree = catalogue.load("kimi-k2.6/nvfp4-serve").model_dump()
    directory = made(Recipe.model_validate({**tree, "serve": "int4"}), "small", tmp_path / "hub").directory
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "hf").write_text(HUB.format(log=tmp_path / "log", hub=directory))
    (tmp_path / "bin" / "hf").chmod(0o755)
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    return directory


def prepare(tree: dict[str, Any], place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    recipe = Recipe.model_validate(tree)
    write(shell.render(recipe, site_for(recipe, models=f"{place}/models", secrets=[])), place / "out", "ssh")
    variables = {
        "PATH": f"{place}/bin:/usr/bin:/bin", "PYTHONPATH": ":".join(filter(None, sys.path)),
        "HOME": os.environ["HOME"], "BROKEN": f"{place}/broken",
    }  # fmt: skip
    script = place / "out" / "prepare.sh"
    return subprocess.run(
        ["bash", script, *words], env=variables, capture_output=True, text=True, timeout=120
    )  # fmt: skip


def test_what_was_cut_off_is_made_again_and_what_was_made_is_left(
    kimi: dict[str, Any], hub: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken").touch()
    assert prepare(kimi, tmp_path).returncode != 0
    models = tmp_path / "models"
    assert not (models / "kimi-k2.6-bf16").exists()
    (tmp_path / "broken").unlink()
    done = prepare(kimi, tmp_path)
    assert (done.returncode, done.stdout) == (0, "converted\n"), done.stderr
    assert "done before" in done.stderr  # the language model
    text, bf16 = (Checkpoint.open(models / f"kimi-k2.6-{name}", PosixFiles()) for name in ("text", "bf16"))
    assert set(text.tensors) == set(bf16.tensors)
    assert "model.embed_tokens.weight" in text.tensors
    assert {path.name for path in models.iterdir()} == {
        ".prepared", "kimi-k2.6-int4", "kimi-k2.6-text", "kimi-k2.6-bf16",
    }  # fmt: skip
    again = prepare(kimi, tmp_path)
    assert (again.returncode, again.stdout, again.stderr.count("done before")) == (0, "", 2)


def test_another_revision_of_the_source_makes_all_of_it_again(
    kimi: dict[str, Any], hub: Path, tmp_path: Path
) -> None:
    assert prepare(kimi, tmp_path).returncode == 0
    kimi["checkpoints"]["int4"]["source"]["revision"] = "0" * 40
    done = prepare(kimi, tmp_path)
    assert (done.returncode, done.stdout) == (0, "converted\n"), done.stderr
    assert "done before" not in done.stderr


def test_a_replicas_host_takes_a_whole_copy_only(kimi: dict[str, Any], hub: Path, tmp_path: Path) -> None:
    """A directory was enough: what rsync had left half-way was served, or its replica ended."""
    lacks = prepare(kimi, tmp_path, "served")
    assert (lacks.returncode, "copy all of it to this host" in lacks.stderr) == (2, True)
    served = tmp_path / "models" / "kimi-k2.6-bf16"
    shutil.copytree(hub, served)
    assert prepare(kimi, tmp_path, "served").returncode == 0
    shard = next(served.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    partly = prepare(kimi, tmp_path, "served")
    assert partly.returncode == 2
    assert f"{shard}: " in partly.stderr
    assert "but the header describes" in partly.stderr


def test_a_recipe_that_only_serves_makes_what_takes_no_gpu_on_its_replicas_hosts(
    kimi: dict[str, Any], hub: Path, tmp_path: Path
) -> None:
    alone = {**kimi, "trainer": None, "serve": "text", "versions": {}, "unknown": {}}
    done = prepare(alone, tmp_path, "served")
    assert done.returncode == 0, done.stderr
    assert (
        "model.embed_tokens.weight"
        in Checkpoint.open(tmp_path / "models" / "kimi-k2.6-text", PosixFiles()).tensors
    )
    found = problems(Recipe.model_validate({**alone, "serve": "bf16"}))
    assert "checkpoints.bf16.prepared.gpus: they are a trainer's, and this recipe only serves" in found
    assert not any("prepared.gpus" in problem for problem in problems(Recipe.model_validate(alone)))
