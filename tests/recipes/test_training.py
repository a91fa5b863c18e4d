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
    assert [step.argv[0] for step in steps] == ["bash", "hf", "bash", "bash", "bash", "bash"]
    assert [step.gpus for step in steps] == [False, False, False, True, True, True]
    models = [step.makes and step.makes.removeprefix("/models/kimi-k2.6-") for step in steps]
    assert models == [None, None, "text", "bf16", "nvfp4", "bf16-megatron"]
    assert "DAPO-Math-17k" in steps[0].argv[-1]
    assert "moonshotai/Kimi-K2.6" in steps[1].argv
    said = [*(step.argv[-1] for step in steps[2:5]), steps[5].argv[2]]
    assert "language_model /models/kimi-k2.6-int4 /models/kimi-k2.6-text.new" in said[0]
    assert "convert_kimi_int4_to_bf16.py --model-dir /models/kimi-k2.6-text" in said[1]
    assert "convert_hf_to_nvfp4.py --model-dir /models/kimi-k2.6-bf16" in said[2]
    assert '--nnodes 4 --node-rank "$NODE_RANK"' in said[3]


def test_what_is_made_of_something_that_takes_gpus_comes_after_it() -> None:
    """Else it would be among the downloads, which a launcher runs first."""
    tree = catalogue.load("kimi-k2.6/nvfp4").model_dump()
    tree["checkpoints"]["nvfp4"]["prepared"]["gpus"] = False
    steps = training.prepare(Recipe.model_validate(tree), SITE)
    assert [step.gpus for step in steps] == [False, False, False, True, True, True]


def converted(recipe: Recipe, name: str) -> dict[str, str]:
    (step,) = [s for s in training.prepare(recipe, SITE) if s.makes == f"/models/glm-4.5-air-{name}"]
    return dict(step.environment)


def test_what_a_checkpoint_is_made_of_is_a_part_of_how_it_is_made() -> None:
    """With another revision of the source, or other variables, the old conversion was taken for this one."""
    tree = catalogue.load("glm-4.5-air/fp8").model_dump()
    before = converted(Recipe.model_validate(tree), "fp8-block")
    for path, value in (
        ("checkpoints/bf16/source/revision", "0" * 40),
        ("trainer/revision", "0" * 40),
        ("trainer/environment/NVTE_X", "1"),
    ):
        changed = catalogue.load("glm-4.5-air/fp8").model_dump()
        *above, last = path.split("/")
        part = changed
        for step in above:
            part = part[step]
        part[last] = value
        assert converted(Recipe.model_validate(changed), "fp8-block") != before
        assert converted(Recipe.model_validate(changed), "bf16-megatron") != converted(
            Recipe.model_validate(tree), "bf16-megatron"
        )


def test_a_conversion_that_was_cut_off_leaves_nothing_behind_that_the_next_one_takes_over(
    tmp_path: Path,
) -> None:
    """Miles' converter of INT4 leaves out files that are there, whole or not."""
    tree = catalogue.load("glm-4.5-air/fp8").model_dump()
    tree["checkpoints"]["fp8-block"]["prepared"]["command"] = (
        f"[[ ! -e {{target}} ]]; mkdir {{target}}; ls {{source}} > {{target}}/a; test -e {tmp_path}/ok"
    )
    site = Site.model_validate({"models": f"{tmp_path}/models"})
    made = tmp_path / "models" / "glm-4.5-air-fp8-block"
    (step,) = [s for s in training.prepare(Recipe.model_validate(tree), site) if s.makes == str(made)]
    (tmp_path / "models" / "glm-4.5-air-bf16").mkdir(parents=True)
    assert [subprocess.run(step.argv).returncode for _ in range(2)] == [1, 1]
    assert not made.exists()
    (tmp_path / "ok").touch()
    assert [subprocess.run(step.argv).returncode for _ in range(2)] == [0, 0]
    assert [file.name for file in made.iterdir()] == ["a"]
    assert {path.name for path in made.parent.iterdir()} == {"glm-4.5-air-bf16", "glm-4.5-air-fp8-block"}


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


def test_kimi_k2_6_is_trained_as_what_miles_converts_and_exports() -> None:
    """The wrapper was, for which Miles has no bridge; its exporter refused the embedding's name."""
    recipe = catalogue.load("kimi-k2.6/nvfp4")
    geometry = recipe.model.geometry
    assert recipe.trainer is not None
    assert (geometry.architecture, geometry.model_type) == ("DeepseekV3ForCausalLM", "deepseek_v3")
    assert (geometry.prefix, geometry.head, geometry.vision) == ("model.", "lm_head.", None)
    assert recipe.trainer.flags["model-name"] == "deepseekv3"
    assert recipe.trainer.flags["trust-remote-code"] is True
    served = catalogue.load("kimi-k2.6/nvfp4-serve").model.geometry
    assert served.architecture == "KimiK25ForConditionalGeneration"
    assert served.vision is not None


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
