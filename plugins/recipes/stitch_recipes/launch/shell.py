"""Plain shell over ssh: scripts that say how, and ``settings.sh``, all that this run has of its own."""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib import resources

from .. import processes, training
from ..errors import RecipeError
from ..processes import Process
from ..schema import Recipe
from ..site import Site
from .common import (
    DRAIN_SECONDS,
    RAY_PORT,
    READY_SECONDS,
    RESTARTS,
    alone,
    dumped,
    engine_image,
    engine_setup,
    needed,
    service_setup,
    together,
    trainer_image,
    trainer_setup,
)
from .files import File

ALWAYS = ("common", "local", "launch", "stop", "replica", "gateway", "collector")
INSTALL = """#!/usr/bin/env bash
# What this run needs on a host, over what the image or machine has: install.sh trainer|replica|gateway
# Made for these images, in which ssh may end as well:
#   trainer  {trainer_image}
#   replica  {engine_image}
#   gateway  any with Python 3.11 or newer
source "$(dirname "${{BASH_SOURCE[0]}}")/common.sh"
activated
case ${{1:-}} in
trainer)
{trainer}
  ;;
replica)
{replica}
  ;;
gateway)
{gateway}
  ;;
*) echo "install.sh trainer|replica|gateway" >&2; exit 2 ;;
esac
"""
TRAINING = ("ray-head", "ray-worker", "train")

Setting = str | int | Iterable[str]


def render(recipe: Recipe, site: Site) -> list[File]:
    """The directory that ``launch.sh`` ships to every host. Raises RecipeError for hosts that are missing."""
    names = [*ALWAYS, *(["compactor"] if recipe.versions.compact else [])]
    files = [
        File("install.sh", _install(recipe, site)),
        File("settings.sh", _settings(recipe, site)),
        File("prepare.sh", _prepare(recipe, site)),
    ]
    if recipe.trainer is not None:
        names += TRAINING
        contents = training.configuration_files(recipe, site)
        files += [File(name, dumped(content)) for name, content in contents.items()]
    scripts = resources.files(__package__) / "scripts"
    return [*files, *(File(f"{name}.sh", (scripts / f"{name}.sh").read_text("utf-8")) for name in names)]


def _settings(recipe: Recipe, site: Site) -> str:
    trainer, engine = recipe.trainer, recipe.engine
    hosts = _hosts(recipe, site)
    first = (hosts or site.replicas)[0]
    gateway = site.gateway or first
    replica = processes.replica(recipe, site, processes.directory(recipe, site, recipe.serve))
    text = "# What this run is; the scripts say how it is started. Made from a recipe and a site: change\n"
    text += "# those, and render again. Each script uses some of it, and what is quoted is meant so.\n"
    text += "# shellcheck shell=bash disable=SC2016,SC2034\n\n"
    places: dict[str, Setting] = {
        "run": site.run,
        "there": _there(site),
        "ssh": site.ssh,
        "activate": site.activate or "",
        "secrets": site.secrets,
        "hosts": hosts,
        "replica_hosts": site.replicas,
        "replica_slots": map(str, _slots(site.replicas)),
        "serving_hosts": dict.fromkeys(site.replicas),
        "gateway_host": gateway,
        "first": first,
        "everywhere": dict.fromkeys([*hosts, gateway, *site.replicas]),
        "want": needed(recipe, len(site.replicas)),
        "ready_seconds": READY_SECONDS,
        "restarts": RESTARTS,
    }
    commands: dict[str, Setting] = {
        "gateway_port": processes.GATEWAY_PORT,
        "gateway": processes.gateway(recipe, site).argv,
        "compactor": processes.compactor(site).argv if recipe.versions.compact else (),
        "collector": processes.collector(recipe, site).argv,
        "claim": processes.claim(recipe, site).argv,
        "versions": processes.known(site).argv,
        "replica_port": processes.REPLICA_PORT,
        "replica_gpus": engine.gpus,
        "replica_host_dir": replica.environment["STITCH_HOST_DIR"],
        "drain_seconds": DRAIN_SECONDS + 30,
        "replica_environment": _environment({**replica.environment, "STITCH_DRAIN": str(DRAIN_SECONDS)}),
        "replica": replica.argv,
    }
    text += _assignments(places) + "\n" + _assignments(commands)
    if trainer is not None:
        process = training.tidied(
            recipe, site, training.trainer(recipe, site, gateway.rpartition("@")[2], _there(site))
        )
        training_values: dict[str, Setting] = {
            "ray_port": RAY_PORT,
            "trainer_gpus": trainer.gpus_per_node,
            "convert_nodes": max((step.nodes for step in together(recipe, site)), default=0),
            "trainer_environment": _environment(process.environment),
            "trainer": process.argv,
        }
        text += "\n" + _assignments(training_values)
    return text


def _hosts(recipe: Recipe, site: Site) -> list[str]:
    """Of the trainer's nodes."""
    nodes = recipe.trainer.nodes if recipe.trainer else 0
    if nodes and not site.hosts:
        raise RecipeError(f"{recipe.name} trains on {nodes} nodes: name them in the site's hosts")
    if nodes and nodes != len(site.hosts):
        raise RecipeError(
            f"{recipe.name} trains on {nodes} nodes, and the site names {len(site.hosts)} hosts"
        )
    if len(set(site.hosts)) < len(site.hosts):
        raise RecipeError("the site names a host twice in hosts: each trainer node is one")
    if not site.replicas:
        raise RecipeError("the site names no replicas")
    return site.hosts[:nodes]


def _slots(replicas: list[str]) -> list[int]:
    """Which replica of its host each is."""
    seen: Counter[str] = Counter()
    slots = []
    for host in replicas:
        slots.append(seen[host])
        seen[host] += 1
    return slots


def _environment(variables: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in sorted(variables.items())]


def _assignments(values: Mapping[str, Setting]) -> str:
    """Variables and arrays of bash; a flag with what follows it is a line."""
    text = ""
    for name, value in values.items():
        if isinstance(value, str | int):
            text += f"{name}={shlex.quote(str(value))}\n"
        else:
            words = list(value)
            text += f"{name}=({_array(words)})\n"
    return text


def _array(words: list[str]) -> str:
    line = shlex.join(words)
    if len(line) < 90:
        return line
    text = ""
    for word in words:
        text += ("\n  " if word.startswith("--") or "=" in word else " ") + shlex.quote(word)
    return f"{text.lstrip(' ')}\n"


def _prepare(recipe: Recipe, site: Site) -> str:
    """Steps by the trainer's programs are for its hosts; a replica's host can download."""
    target = shlex.quote(processes.directory(recipe, site, recipe.serve))
    served = alone(recipe.model_copy(update={"trainer": None}), site)
    if recipe.trainer is not None and any(step.makes for step in served):
        lacks = f"{target} is made by the trainer: share {site.models}, or copy all of it to this host"
        fetch = f"python3 -m stitch_recipes.launch.whole {target} || die {shlex.quote(lacks)}\n"
    else:
        fetch = "\n  ".join(map(_command, served)) + "\n"
    steps = "".join(f"\n{_command(step)}\n" for step in alone(recipe, site))
    several = "\n".join(map(_command, together(recipe, site)))
    if several:
        lines = "export NODE_RANK=$2 MASTER_ADDR=$3\n" + several + "\nexit 0"
        steps = f"""
if [[ ${{1:-}} == together ]]; then # RANK HEAD: on several hosts at once, after the rest
{textwrap.indent(lines, "  ")}
fi
{steps}"""
    return f"""#!/usr/bin/env bash
# Fetch and convert what this host lacks: all checkpoints, or with "served" the one that replicas boot from.
# Run it again after a failure: what was done is left.
# shellcheck disable=SC2016 # what is quoted is for another shell
source "$(dirname "${{BASH_SOURCE[0]}}")/common.sh"
enter
if [[ ${{1:-}} == served ]]; then
  {fetch}  exit 0
fi
{steps}"""


def _install(recipe: Recipe, site: Site) -> str:
    trainer = recipe.trainer
    lines = {
        "trainer": trainer_setup(trainer, site, "gateway", "cli", "recipes") if trainer else [],
        "replica": engine_setup(site, "cli"),
        "gateway": service_setup(site, "recipes"),
    }
    texts = {name: "\n".join(f"  {line}" for line in given or [":"]) for name, given in lines.items()}
    images = {"engine_image": engine_image(recipe, site), "trainer_image": "none"}
    if trainer:
        images["trainer_image"] = trainer_image(trainer, site)
    return INSTALL.format(**texts, **images)


def _command(process: Process) -> str:
    """As one command of a script, each variable and flag on a line of its own."""
    given = _environment(process.environment)
    before = " \\\n  ".join(["env", *map(shlex.quote, given)]) + " \\\n  " if given else ""
    return before + processes.lines(process.argv)


def _there(site: Site) -> str:
    return f"{site.directory}/{site.run}"
