"""The rendered app, built by the real SDK without an account: Modal is asked for what the recipe says."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import modal
import pytest
import yaml

from stitch_recipes import catalogue
from stitch_recipes.errors import RecipeError
from stitch_recipes.launch import modal as launcher
from stitch_recipes.launch.common import DRAIN_SECONDS
from stitch_recipes.launch.files import write
from stitch_recipes.launch.modal_app import DAY, GIB, LEAST_MEMORY_MIB, Deployment
from stitch_recipes.schema import Recipe
from stitch_recipes.site import Site
from tests.recipes.launch.examples import cases, hard, site_for

MODAL: dict[str, Any] = {"store": "modal://versions/runs?environment=lab", "region": "us", "cloud": "aws"}


@pytest.fixture(autouse=True)
def without_an_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MODAL_CONFIG_PATH", str(tmp_path / "none.toml"))


@pytest.fixture
def loaded() -> Iterator[list[str]]:
    """Names of modules that a test imported."""
    names: list[str] = []
    yield names
    for name in names:
        sys.modules.pop(name, None)


def app_of(recipe: Recipe, out: Path, loaded: list[str], **fields: Any) -> ModuleType:
    """The rendered app.py, imported as Modal does."""
    write(launcher.render(recipe, site_for(recipe, **{**MODAL, **fields})), out, "modal")
    name = f"rendered_app_{len(sys.modules)}"
    spec = importlib.util.spec_from_file_location(name, out / "app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loaded.append(name)
    spec.loader.exec_module(module)
    return module


def volumes(info: Any) -> dict[str, str]:
    return {place: volume.name for place, volume in info.volumes.items()}


@pytest.mark.parametrize("recipe", cases())
def test_the_pool_is_as_the_recipe_says(recipe: Recipe, tmp_path: Path, loaded: list[str]) -> None:
    app = app_of(hard(recipe), tmp_path, loaded)
    engine, info = recipe.engine, app.Replica.info()
    assert info.gpus == [(engine.gpu, engine.gpus)]
    assert info.memory_mib == (engine.memory_request_gib * GIB, engine.memory_limit_gib * GIB)
    asked = app.run.replicas()
    assert info.ephemeral_disk_mib == (engine.disk_gib * GIB if engine.disk_gib >= 512 else None)
    assert volumes(info) == {"/models": "models", "/stitch-store": "versions"}
    assert not any(volume.read_only or volume.sub_path for volume in info.volumes.values())
    assert (info.port, info.unauthenticated, info.exit_grace_period) == (30100, True, DRAIN_SECONDS)
    assert (info.cloud, info.compute_regions, info.routing_region) == ("aws", ["us"], "us-east")
    assert asked["min_containers"] == max(recipe.fleet.min_replicas, 1)
    assert asked["max_containers"] == recipe.fleet.max_replicas
    assert asked["target_concurrency"] == recipe.fleet.concurrency
    gateway = app.Gateway.info()
    assert (gateway.gpus, gateway.unauthenticated) == ([], False)


@pytest.mark.parametrize("recipe", cases(trained=True))
def test_the_trainer_is_a_cluster_of_the_recipes_nodes(
    recipe: Recipe, tmp_path: Path, loaded: list[str]
) -> None:
    trainer = recipe.trainer
    assert trainer is not None
    info = app_of(recipe, tmp_path, loaded).train.info()
    assert info.gpus == [(trainer.gpu, trainer.gpus_per_node)]
    if trainer.nodes > 1:
        assert (info.cluster_info.size, info.cluster_info.rdma) == (trainer.nodes, True)
    else:
        assert info.cluster_info is None
    if trainer.memory_limit_gib is not None:
        least = LEAST_MEMORY_MIB if trainer.memory_request_gib is None else trainer.memory_request_gib * GIB
        assert info.memory_mib == (least, trainer.memory_limit_gib * GIB)
    assert volumes(info) == {
        "/models": "models", "/data": "data", "/saves": "saves", "/stitch-store": "versions",
    }  # fmt: skip
    assert info.timeout == DAY
    assert info.max_retries
    assert info.max_retries > 0


def test_preparing_is_an_app_of_its_own_that_starts_no_replica(tmp_path: Path, loaded: list[str]) -> None:
    recipe = catalogue.load("glm-4.5-air/fp8")
    app = app_of(recipe, tmp_path, loaded)
    assert recipe.trainer is not None
    assert (app.app.name, app.preparing.name) == ("math", "math-prepare")
    assert app.download.info().gpus == []
    assert volumes(app.download.info()) == {"/models": "models", "/data": "data"}
    assert app.convert.info().gpus == [(recipe.trainer.gpu, recipe.trainer.gpus_per_node)]
    assert volumes(app.claim.info()) == {"/models": "models", "/stitch-store": "versions"}
    assert [f.app.name for f in (app.download, app.convert, app.claim, app.ready)] == [
        "math-prepare", "math-prepare", "math-prepare", "math",
    ]  # fmt: skip


@pytest.mark.parametrize("recipe", cases())
def test_a_profile_has_the_image_the_gpus_and_the_memory_of_a_replica_and_starts_no_pool(
    recipe: Recipe, tmp_path: Path, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    images: list[tuple[str, list[str]]] = []
    build = Deployment._image

    def noted(self: Deployment, tag: str, setup: list[str]) -> modal.Image:
        images.append((tag, setup))
        return build(self, tag, setup)

    monkeypatch.setattr(Deployment, "_image", noted)
    app = app_of(recipe, tmp_path, loaded)
    profile, replica = app.profile.info(), app.Replica.info()
    assert (profile.gpus, profile.memory_mib) == (replica.gpus, replica.memory_mib)
    assert profile.ephemeral_disk_mib == replica.ephemeral_disk_mib
    assert (profile.cloud, profile.regions) == (replica.cloud, replica.compute_regions)
    assert profile.timeout == 6 * 3600
    assert volumes(profile) == {"/models": "models"}  # it claims a run of its own, in a store of its own
    assert (app.app.name, app.profiling.name, app.profile.app.name) == (
        "math",
        "math-profile",
        "math-profile",
    )
    images.clear()
    app.run.profile()
    app.run.replicas()
    assert images[0] == images[1]


def test_what_one_node_cannot_convert_is_done_by_a_cluster(tmp_path: Path, loaded: list[str]) -> None:
    recipe = catalogue.load("glm-5.2/nvfp4")
    app = app_of(recipe, tmp_path, loaded)
    assert recipe.trainer is not None
    assert recipe.trainer.conversion.nodes > 1
    info = app.convert_together.info()
    assert info.cluster_info.size == recipe.trainer.conversion.nodes
    assert info.gpus == [(recipe.trainer.gpu, recipe.trainer.gpus_per_node)]
    assert app.convert.info().cluster_info is None


def test_no_gpu_is_asked_for_to_convert_nothing(tmp_path: Path, loaded: list[str]) -> None:
    app = app_of(catalogue.load("qwen3-0.6b/miles"), tmp_path, loaded)
    assert not hasattr(app, "convert")
    with pytest.raises(modal.exception.AuthError):
        app.main("prepare")


def test_housekeeping_comes_by_the_clock(tmp_path: Path, loaded: list[str]) -> None:
    app = app_of(catalogue.load("glm-4.5-air/fp8"), tmp_path, loaded)
    assert app.compact.info().schedule == "Period(seconds=3600.0)"
    assert app.collect.info().schedule == "Period(seconds=86400.0)"
    assert (app.tidy.info().schedule, volumes(app.tidy.info())) == (
        "Period(seconds=3600.0)",
        {"/saves": "saves"},
    )
    assert app.compact.info().timeout > 3600


def test_a_recipe_that_only_serves_has_no_trainer(tmp_path: Path, loaded: list[str]) -> None:
    app = app_of(catalogue.load("kimi-k3/mxfp4-serve"), tmp_path, loaded)
    assert not hasattr(app, "train")
    assert not hasattr(app, "convert")
    assert not hasattr(app, "tidy")
    # A plain Python image has no program that downloads.
    assert app.run.preparing_image()[0] == "lmsysorg/sglang:v0.5.23"
    assert volumes(app.download.info()) == {"/models": "models"}
    text = (tmp_path / "app.py").read_text()
    assert "train" not in text.split("def main")[1]
    assert "start training" not in text
    assert "the trainer claims" not in text
    assert not re.search(r"# </?[a-z]+>", text)


def test_secrets_are_names_and_other_stores_mount_nothing(tmp_path: Path, loaded: list[str]) -> None:
    app = app_of(catalogue.load("qwen3-4b/slime"), tmp_path, loaded, store="s3://bucket/x")
    assert volumes(app.Replica.info()) == {"/models": "models"}
    assert len(app.Replica.info().secrets) == 1
    assert "store-keys" in (tmp_path / "run.yaml").read_text()


def secrets(info: Any) -> set[str]:
    """Of a function the SDK says each by its expression."""
    return {re.sub(r"^.*from_name\('(.*)'\)$", r"\1", secret) for secret in info.secrets}


def test_a_pool_behind_proxy_auth_lets_in_all_that_runs_a_gateway_and_gives_nothing_else_the_token(
    tmp_path: Path, loaded: list[str]
) -> None:
    recipe = catalogue.load("glm-4.5-air/fp8")
    app = app_of(recipe, tmp_path, loaded, modal_proxy_secret="pool-door")
    assert not app.Replica.info().unauthenticated
    over_the_pool = (app.Gateway, app.ready, app.train)
    others = (app.Replica, app.compact, app.collect, app.download, app.convert, app.claim)
    assert all("pool-door" in secrets(part.info()) for part in over_the_pool)
    assert not any("pool-door" in secrets(part.info()) for part in others)
    assert all("store-keys" in secrets(part.info()) for part in (*over_the_pool, *others))
    text = (tmp_path / "app.py").read_text()
    assert "Modal lets nobody into the pool" in text
    assert "reachable by whoever" not in text


def test_an_open_pool_says_so_and_names_no_secret_but_the_sites(tmp_path: Path, loaded: list[str]) -> None:
    app = app_of(catalogue.load("glm-4.5-air/fp8"), tmp_path, loaded)
    assert app.Replica.info().unauthenticated
    assert secrets(app.Gateway.info()) == secrets(app.train.info()) == {"store-keys"}
    text = (tmp_path / "app.py").read_text()
    assert "reachable by whoever" in text
    assert "Modal lets nobody into the pool" not in text
    assert "start training" in text
    assert not re.search(r"# </?[a-z]+>", text)


def test_a_conversion_has_the_disk_of_a_trainers_node_as_on_kubernetes(
    tmp_path: Path, loaded: list[str]
) -> None:
    recipe = catalogue.load("kimi-k2.6/nvfp4")
    app = app_of(recipe, tmp_path, loaded)
    assert recipe.trainer is not None
    assert recipe.trainer.disk_gib == 2048
    for function in (app.convert, app.convert_together, app.train):
        assert function.info().ephemeral_disk_mib == 2048 * GIB


def test_what_the_site_has_to_say_is_asked_for_before_anything_is_deployed() -> None:
    recipe = catalogue.load("glm-4.7-flash/code")
    with pytest.raises(RecipeError, match="needs variables in the site's environment: AGENT_SERVER_URL"):
        launcher.render(recipe, site_for(recipe, **MODAL, environment={}))


@pytest.mark.parametrize("recipe", cases())
def test_a_container_reads_the_same_recipe_and_site(recipe: Recipe, tmp_path: Path) -> None:
    wanted, site = hard(recipe), site_for(recipe, **MODAL)
    write(launcher.render(wanted, site), tmp_path, "modal")
    deployment = Deployment.read(str(tmp_path / "app.py"))
    assert deployment.recipe == wanted
    assert deployment.site == site
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())["recipe"]["name"] == recipe.name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"store": "file:/stitch"}, "which containers do not share"),
        ({"models": "/tmp"}, "Modal mounts no Volume there"),
        ({"models": "/all", "data": "/all"}, "each at a place of its own"),
    ],
)
def test_what_modal_refuses_is_refused_before(fields: dict[str, str], message: str) -> None:
    recipe = catalogue.load("qwen3-4b/slime")
    with pytest.raises(RecipeError, match=message):
        launcher.render(recipe, Site.model_validate(fields))


def test_the_app_is_launched_by_a_plain_script(tmp_path: Path, loaded: list[str]) -> None:
    """Without an account it fails at Modal's door, not before."""
    app = app_of(catalogue.load("qwen3-4b/slime"), tmp_path, loaded)
    with pytest.raises(modal.exception.AuthError):
        app.main("launch")
    with pytest.raises(modal.exception.AuthError):
        app.main("profile", "--change", "training")
    with pytest.raises(SystemExit, match=r"python app\.py \[prepare"):
        app.main("lunch")
