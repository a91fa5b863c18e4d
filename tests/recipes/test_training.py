"""What a recipe gives its trainer passes the plugins' own preflight, and is what a shell will run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from stitch_core.trainers.settings import read_settings
from stitch_recipes import catalogue, training
from stitch_recipes.errors import RecipeError
from stitch_recipes.processes import CONFIG
from stitch_recipes.site import read_site

SITE = read_site(None)
TRAINED = [name for name in catalogue.names() if catalogue.load(name).trainer is not None]


@pytest.mark.parametrize("name", TRAINED)
def test_the_settings_are_settings_of_stitch(name: str) -> None:
    recipe = catalogue.load(name)
    content = training.configuration_files(recipe, SITE)[CONFIG]
    settings = read_settings(SimpleNamespace(hf_checkpoint="/models/boot", **content))
    assert (settings.run, settings.store, settings.lag) == (SITE.run, SITE.store, recipe.versions.lag)
    assert settings.max_staleness == recipe.versions.max_staleness
    assert recipe.trainer is not None
    assert settings.inner_generate == recipe.trainer.functions.get("generate")


@pytest.mark.parametrize("name", TRAINED)
def test_every_flag_reaches_the_loop_once_with_its_value(name: str) -> None:
    """The shell is real; python3 prints what it was given, in place of the framework."""
    recipe = catalogue.load(name)
    process = training.trainer(recipe, SITE, "gateway", "/run")
    assert process.argv[:2] == ("bash", "-c")
    words = list(process.argv[4:])
    names = [word for word in words if word.startswith("--")]
    assert len(names) == len(set(names))
    assert recipe.trainer is not None
    script = process.argv[2]
    # The rest of the line after the framework's directory and its own list of arguments.
    loop = script[script.index("exec ") :]
    shown = (
        f'MODEL_ARGS=(--num-layers 2); python3() {{ printf "%s\\0" "$@"; }}; {loop.replace("exec ", "", 1)}'
    )
    done = subprocess.run(
        ["bash", "-c", shown, "trainer", *words], capture_output=True, text=True, check=True
    )
    given = done.stdout.split("\0")[:-1]
    assert given[-len(words) :] == words
    assert "--num-layers" in given
    assert recipe.trainer.script in given


def test_miles_arguments_are_words_and_no_patterns(tmp_path: Path) -> None:
    """Its model scripts say --moe-layer-freq [0]*1+[1]*45, which a shell would look for among files."""
    scripts = tmp_path / "scripts" / "models"
    scripts.mkdir(parents=True)
    (tmp_path / "01").touch()
    (scripts / "tiny.py").write_text(
        'def model_args():\n    return "--num-layers 2 --moe-layer-freq [0]*1 "\n'
    )
    line = training.ARGUMENTS["miles"].format(script="tiny")
    done = subprocess.run(
        ["bash", "-c", f'{line} && printf "%s\\n" "${{MODEL_ARGS[@]}}"'],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split("\n")[:-1] == ["--num-layers", "2", "--moe-layer-freq", "[0]*1"]


def test_checkpoints_are_made_after_those_that_they_are_made_of() -> None:
    steps = training.prepare(catalogue.load("kimi-k2.6/nvfp4"), SITE)
    assert [step.argv[0] for step in steps] == ["hf", "bash", "bash", "bash"]
    assert "moonshotai/Kimi-K2.6" in steps[0].argv
    said = [step.argv[2] for step in steps[1:]]
    assert "convert_kimi_int4_to_bf16.py --model-dir /models/kimi-k2.6-int4" in said[0]
    assert "convert_hf_to_nvfp4.py --model-dir /models/kimi-k2.6-bf16" in said[1]
    assert '--nnodes 8 --node-rank "$NODE_RANK"' in said[2]


def test_a_recipe_that_only_serves_has_no_trainer_to_start() -> None:
    with pytest.raises(RecipeError, match="it only serves"):
        training.trainer(catalogue.load("kimi-k3/mxfp4-serve"), SITE, "gateway", "/run")
