"""What a recipe gives its trainer passes the plugins' own preflight, and is what a shell will run."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from stitch_core.trainers.settings import read_settings
from stitch_recipes import catalogue, training
from stitch_recipes.errors import RecipeError
from stitch_recipes.processes import CONFIG
from stitch_recipes.schema import Recipe
from stitch_recipes.site import Site, read_site

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
    assert recipe.trainer is not None
    site = Site.model_validate({"environment": dict.fromkeys(recipe.trainer.asks, "there")})
    process = training.trainer(recipe, site, "gateway", "/run")
    assert process.argv[:2] == ("bash", "-c")
    words = list(process.argv[4:])
    names = [word for word in words if word.startswith("--")]
    assert len(names) == len(set(names))
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
    programs = tmp_path / "miles" / "utils" / "external_utils"
    programs.mkdir(parents=True)
    (tmp_path / "01").touch()
    (programs / "model_args_utils.py").write_text('print("--num-layers 2 --moe-layer-freq [0]*1")')
    line = training.ARGUMENTS["miles"].format(script="tiny")
    done = subprocess.run(
        ["bash", "-c", f'{line} && printf "%s\\n" "${{MODEL_ARGS[@]}}"'],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split("\n")[:-1] == ["--num-layers", "2", "--moe-layer-freq", "[0]*1"]


def test_checkpoints_are_made_after_those_that_they_are_made_of() -> None:
    steps = training.prepare(catalogue.load("kimi-k2.6/nvfp4"), SITE)
    assert [step.argv[0] for step in steps] == ["bash", "hf", "bash", "bash", "bash"]
    assert [step.converts for step in steps] == [False, False, True, True, True]
    assert "DAPO-Math-17k" in steps[0].argv[2]
    assert "moonshotai/Kimi-K2.6" in steps[1].argv
    said = [step.argv[2] for step in steps[2:]]
    assert "convert_kimi_int4_to_bf16.py --model-dir /models/kimi-k2.6-int4" in said[0]
    assert "convert_hf_to_nvfp4.py --model-dir /models/kimi-k2.6-bf16" in said[1]
    assert '--nnodes 8 --node-rank "$NODE_RANK"' in said[2]


@pytest.mark.parametrize("name", ["moonlight-16b-a3b/slime", "qwen3-0.6b/miles"])
def test_a_model_whose_thoughts_do_not_end_is_not_graded_by_what_follows_them(name: str) -> None:
    """deepscaler gives 0 to an answer without </think>: Moonlight has none, and 2,048 tokens are few."""
    trainer = catalogue.load(name).trainer
    assert trainer is not None
    assert trainer.flags["rm-type"] == "math"


def test_kimi_k2_6_trains_with_the_rotary_frequencies_that_it_is_served_with() -> None:
    """Miles' kimi-k2-thinking says beta_fast 1, its kimi-k25 says 32, as config.json does."""
    recipe = catalogue.load("kimi-k2.6/nvfp4")
    assert recipe.trainer is not None
    assert recipe.model.geometry.config["rope_scaling"]["beta_fast"] == 32
    assert recipe.trainer.model_script == "kimi-k25"


def test_a_recipe_that_only_serves_has_no_trainer_to_start() -> None:
    with pytest.raises(RecipeError, match="it only serves"):
        training.trainer(catalogue.load("kimi-k3/mxfp4-serve"), SITE, "gateway", "/run")


@pytest.mark.parametrize("name", ["glm-4.7-flash/code", "glm-5.2/nvfp4"])
def test_agents_find_their_modules_and_the_session_server(name: str) -> None:
    """Flags name modules of an example; the server would have bound the gateway's name, and on any node."""
    recipe = catalogue.load(name)
    assert recipe.trainer is not None
    with pytest.raises(
        RecipeError, match=r"needs variables in the site's environment: AGENT_SERVER_URL: where"
    ):
        training.trainer(recipe, SITE, "gateway", "/run")
    given = {
        "AGENT_SERVER_URL": "http://agents:1",
        "MILES_ROUTER_EXTERNAL_HOST": "head",
        "NCCL_NVLS_ENABLE": "0",
    }
    process = training.trainer(recipe, Site.model_validate({"environment": given}), "gateway", "/run")
    assert given.items() <= process.environment.items()
    paths = process.environment["PYTHONPATH"].split(":")
    assert paths == ["/root/Megatron-LM", "/root/miles/examples/swe-agent-harbor-docker"]
    words = list(process.argv)
    assert words[words.index("--session-server-ip") + 1] == "0.0.0.0"
    assert "--pin-rollout-manager-to-head" in words


def test_prompts_are_made_once_and_whole(tmp_path: Path) -> None:
    """The command is real; what it writes is there under its name only when it ended well."""
    tree = catalogue.load("qwen3-0.6b/miles").model_dump()
    (name,) = tree["trainer"]["data"]
    tree["trainer"]["data"][name]["command"] = (
        f"echo made >> {tmp_path}/log\necho x > {{target}}; test -e {tmp_path}/ok"
    )
    site = Site.model_validate({"data": f"{tmp_path}/data"})
    step = training.prepare(Recipe.model_validate(tree), site)[0]
    made = tmp_path / "data" / name
    assert subprocess.run(step.argv).returncode == 1
    assert not made.exists()
    (tmp_path / "ok").touch()
    assert [subprocess.run(step.argv).returncode for _ in range(2)] == [0, 0]
    assert made.read_text() == "x\n"
    assert (tmp_path / "log").read_text().count("made") == 2


def test_prompts_that_a_user_makes_are_looked_for_before_anything_is_downloaded(tmp_path: Path) -> None:
    site = Site.model_validate({"data": str(tmp_path)})
    step = training.prepare(catalogue.load("glm-4.7-flash/code"), site)[0]
    done = subprocess.run(step.argv, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{tmp_path}/swe/train.jsonl is not there: prompts of Harbor's tasks")
    (tmp_path / "swe").mkdir()
    (tmp_path / "swe" / "train.jsonl").touch()
    assert subprocess.run(step.argv).returncode == 0


@pytest.mark.parametrize("name", TRAINED)
def test_every_command_that_makes_prompts_is_python(name: str) -> None:
    """Without the data set's library: as far as its import, which is not here."""
    recipe = catalogue.load(name)
    assert recipe.trainer is not None
    for data in recipe.trainer.data.values():
        if data.command is not None:
            program = shlex.split(data.command.replace("{target}", "x"))
            assert program[:2] == ["python3", "-c"]
            compile(program[2], name, "exec")
