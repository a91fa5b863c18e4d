"""What the launchers agree on: images, what is installed on them, and when training may start."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path

import yaml

from ..processes import Process
from ..schema import COMMIT, Recipe, Trainer
from ..site import Site
from ..training import HOME, prepare
from .once import WORDS, marker_paths

DRAIN_SECONDS = 600
"""What requests get to end when a replica is asked to leave: long answers are what rollouts are made of."""

READY_SECONDS = 2 * 3600
"""How long training waits for replicas: a large checkpoint is fetched, loaded and tested by itself first."""

PREPARE_SECONDS = 12 * 3600
"""How long the preparation of checkpoints may take, of which a download of terabytes is a part."""

PROFILE_SECONDS = 6 * 3600
"""How long one profile may take: the model is loaded three times, and its next version is made."""

RESTARTS = 20
"""How often a trainer is started again by itself."""

RAY_PORT = 6379

ASIDE = ("AGENT_", "NCCL_")
"""Begin the names of variables that change how checkpoints are made, at most, and not what is made."""

SERVICE_IMAGE = "python:3.12-slim"
"""For what needs no GPU: gateway, compactor, collector."""

# Dated tags, which do not move; the framework's revision is checked out over them, Megatron stays as it is.
# slime: docker/version.txt and docker/justfile of the declared revision. Miles: the newest that a public
# recipe names; its Megatron has every flag of the later one that recipes are checked against (recipes/flags).
_IMAGES = {"miles": "radixark/miles:dev-202607290235", "slime": "slimerl/slime:nightly-dev-20260810a-cu129"}
_REPOSITORIES = {"miles": "https://github.com/radixark/miles", "slime": "https://github.com/THUDM/slime"}


def once(step: Process, site: Site) -> Process:
    """A step that is not done again where it was done; one that makes no checkpoint sees for itself.

    What its variables say is a part of what is done: they become words of the command, but for those that
    make no other bytes.
    """
    if step.makes is None:
        return step
    aside = {name: value for name, value in step.environment.items() if name.startswith(ASIDE)}
    variables = [f"{name}={value}" for name, value in sorted(step.environment.items()) if name not in aside]
    given = ("env", *variables) if variables else ()
    words = ("python3", "-m", "stitch_recipes.launch.once", f"{site.models}/.prepared", step.makes)
    return dataclasses.replace(step, argv=(*words, str(step.nodes), *given, *step.argv), environment=aside)


def alone(recipe: Recipe, site: Site) -> list[Process]:
    """Steps of the preparation that run on one host."""
    return [once(step, site) for step in prepare(recipe, site) if step.nodes == 1]


def together(recipe: Recipe, site: Site) -> list[Process]:
    """Those that several of the trainer's nodes do at once, after the others."""
    return [once(step, site) for step in prepare(recipe, site) if step.nodes > 1]


def is_done(step: Process, site: Site) -> Process:
    """What fails until a step of several nodes is done on all."""
    markers = marker_paths(Path(site.models, ".prepared"), step.argv[WORDS:], step.nodes)
    return Process(("ls", *map(str, markers)))


def dumped(content: Mapping[str, object]) -> str:
    """As YAML."""
    return yaml.safe_dump(dict(content), sort_keys=False, width=110)


def needed(recipe: Recipe, most: int | None = None) -> int:
    """Replicas that must be ready before training starts, of ``most`` that there will be."""
    wanted = max(recipe.fleet.min_replicas, 1)
    return wanted if most is None else max(min(wanted, most), 1)


def engine_image(recipe: Recipe, site: Site) -> str:
    return site.engine_image or f"lmsysorg/sglang:v{recipe.engine.release}"


def engine_setup(site: Site, *extras: str) -> list[str]:
    """Shell lines after which SGLang's own image has Stitch; none for an image that has it."""
    return [] if site.engine_image else [install(site, "sglang", *extras)]


def trainer_image(trainer: Trainer, site: Site) -> str:
    return site.trainer_image or _IMAGES[trainer.framework]


def trainer_setup(trainer: Trainer, site: Site, *extras: str) -> list[str]:
    """Shell lines after which the framework's own image has its revision and Stitch."""
    if site.trainer_image:
        return []
    if COMMIT.fullmatch(trainer.revision):
        root = HOME[trainer.framework]
        revision = [
            f"git init -q {root}",  # which leaves a repository as it is
            f"git -C {root} fetch {_REPOSITORIES[trainer.framework]} {trainer.revision}",
            f"git -C {root} checkout --detach --force {trainer.revision}",
            f"python3 -m pip install --no-deps -e {root}",
        ]
    else:
        revision = [f"python3 -m pip install --no-deps miles-rl=={shlex.quote(trainer.revision)}"]
    return [*revision, install(site, trainer.framework, *extras)]


def service_setup(site: Site, *extras: str) -> list[str]:
    """Shell lines after which a plain Python image has Stitch's own commands."""
    return [install(site, "cli", "gateway", *extras)]


def install(site: Site, *extras: str) -> str:
    """The shell line that installs Stitch for what an image is to do, and for the site's store."""
    scheme = site.store.partition(":")[0]
    wanted = dict.fromkeys([*extras, *([scheme] if scheme in ("s3", "modal") else [])])
    given, brackets = site.package, f"[{','.join(wanted)}]" if wanted else ""
    if "[" in given:
        package = given
    elif "://" in given:
        package = f"stitch-rl{brackets} @ {given}"
    else:
        name, equals, version = given.partition("==")
        package = f"{name}{brackets}{equals}{version}"
    return f"python3 -m pip install {shlex.quote(package)}"
