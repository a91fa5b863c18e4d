"""Every recipe renders for every launcher, the same each time, and by the command that people type."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from stitch_core.cli.main import main
from stitch_recipes import catalogue
from stitch_recipes.launch import kubernetes, modal, shell
from stitch_recipes.schema import Recipe
from tests.recipes.launch.examples import cases, site_for

LAUNCHERS = [kubernetes, modal, shell]


@pytest.mark.parametrize("recipe", cases())
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_same_recipe_and_site_are_the_same_text(recipe: Recipe, launcher: ModuleType) -> None:
    site = site_for(recipe)
    first, again = launcher.render(recipe, site), launcher.render(recipe, site)
    assert first == again
    assert len({file.name for file in first}) == len(first)
    assert all(file.text.endswith("\n") for file in first)


def test_the_text_does_not_hang_on_the_order_of_sets() -> None:
    """Another process has other hashes."""
    program = (
        "import json; from stitch_recipes import catalogue; "
        "from tests.recipes.launch.test_every import LAUNCHERS, site_for; "
        "recipe = catalogue.load('glm-4.5-air/fp8'); "
        "made = [f for each in LAUNCHERS for f in each.render(recipe, site_for(recipe))]; "
        "print(json.dumps([[f.name, f.text] for f in made]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120,
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "PYTHONHASHSEED": "7", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    recipe = catalogue.load("glm-4.5-air/fp8")
    files = [file for each in LAUNCHERS for file in each.render(recipe, site_for(recipe))]
    here = [[file.name, file.text] for file in files]
    assert json.loads(done.stdout) == here


def test_the_command_writes_says_what_is_next_and_refuses_what_was_edited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site.toml").write_text('namespace = "rl"\n')
    words = ["recipe", "render", "glm-4.5-air/fp8-serve", "--for", "kubernetes"]
    words += ["--site", str(tmp_path / "site.toml"), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    assert f"kubectl --namespace rl apply -f {tmp_path / 'out'}\n" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changed"] == []
    edited = tmp_path / "out" / "3-gateway.yaml"
    edited.write_text(edited.read_text().replace("8Gi", "9Gi"))
    assert main(words) == 2
    assert "3-gateway.yaml: edited" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0
    assert "9Gi" not in edited.read_text()


def test_the_command_prints_a_site_to_fill_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "site"]) == 0
    assert 'run = "my-run"' in capsys.readouterr().out
