"""Kubernetes: plain manifests, one file for each part of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from ..errors import RecipeError
from ..schema import Recipe
from ..site import Site
from .files import File
from .manifests import gateways, housekeeping, replicas, sessions, settings, trainer
from .pods import Manifest
from .preparing import convert, prepare


def render(recipe: Recipe, site: Site) -> list[File]:
    """The manifests, in the order in which ``kubectl apply -f DIR`` takes them."""
    if site.store.startswith("file:") and site.store_claim is None:
        raise RecipeError(
            f"{site.store} is a directory: set store_claim of the site to the volume that has it"
        )

    def file(name: str, comment: str, *manifests: Manifest) -> File:
        return _file(
            name, comment.format_map({**site.model_dump(), "first": first, "claims": claims}), manifests
        )

    claims = site.models_claim
    if recipe.trainer is not None:
        claims += f", {site.data_claim}, {site.saves_claim}"
    made = prepare(recipe, site)
    several = convert(recipe, recipe.trainer, site) if recipe.trainer else []
    jobs = {"1-prepare.yaml": (_PREPARE, made[:1])}
    if made[1:]:
        jobs["1-prepare-convert.yaml"] = (_CONVERT, made[1:2])
        jobs["1-prepare-claim.yaml"] = (_CLAIM, made[2:])
    if several:
        jobs["1-prepare-together.yaml"] = (_TOGETHER, several)
    first = "\n".join(_first(site, name, manifests[-1]) for name, (_, manifests) in jobs.items())

    files = [
        *(file(name, comment, *manifests) for name, (comment, manifests) in jobs.items()),
        file("2-replicas.yaml", _REPLICAS, *replicas(recipe, site)),
        file("3-gateway.yaml", _GATEWAY, *gateways(recipe, site)),
        file("4-housekeeping.yaml", _HOUSEKEEPING, *housekeeping(recipe, site)),
    ]
    if recipe.trainer is not None:
        agents = sessions(recipe.trainer, site)
        manifests = [*settings(recipe, site), *agents, trainer(recipe, recipe.trainer, site)]
        files.append(file("5-trainer.yaml", _TRAINER + (_SESSIONS if agents else ""), *manifests))
    return files


_PREPARE = """Makes prompts and fetches checkpoints; where nothing is converted it creates the run as well.
The site's secrets have to be there, and PersistentVolumeClaims for many readers and writers: {claims}.
The other parts wait for what comes before them, but hold GPUs meanwhile: the first time, apply each Job alone
and wait for it. A Job is not changed by a second apply: after changing the recipe, delete it first.

First:
{first}
Then:
  kubectl --namespace {namespace} apply -f .
End it all; versions in the store and saves stay:
  kubectl --namespace {namespace} delete -f ."""
_CONVERT = (
    """What no repository has is made of what was fetched, on the GPUs of one of the trainer's nodes."""
)
_CLAIM = """Creates the run, whose version 0 is the served checkpoint: all of it is read."""
_TOGETHER = """What one node has no room for: the trained checkpoint in Megatron's format, by several of the
trainer's nodes at once, after the run was created. If it fails, delete the Job and apply again."""
_REPLICAS = """The replicas. More or fewer, at any time:
  kubectl --namespace {namespace} scale deployment {name}-replicas --replicas N"""
_GATEWAY = """Where requests go: http://{name}-gateway:30000. A gateway keeps nothing: any may end at any
time. No tokens are asked for, since stock trainers have none to show: keep these ports inside the cluster, by
a NetworkPolicy where others share it (docs/threat-model.md)."""
_HOUSEKEEPING = """Short joins, and a store that does not grow. Neither needs to run for the run to go on."""
_TRAINER = """The trainer, on a Ray cluster of its own (KubeRay 1.2 or newer). It starts when replicas are
ready. Its prompts are on the volume {data_claim}, where its flags in train.sh say. After a failure KubeRay
makes a new cluster; the trainer claims the run, which fences the one before, resumes from its newest
checkpoint and counts on. Stop training alone:
  kubectl --namespace {namespace} delete rayjob {name}-train"""

_SESSIONS = """
Agents ask its session server, at {name}-sessions, which asks for no token either."""


def _first(site: Site, file: str, job: Manifest) -> str:
    """How one Job is run to its end before anything else holds GPUs."""
    kubectl = f"  kubectl --namespace {site.namespace}"
    wait = f"wait --for=condition=complete --timeout=12h job/{job['metadata']['name']}"
    return f"{kubectl} apply -f {file}\n{kubectl} {wait}"


def _file(name: str, comment: str, manifests: Sequence[Manifest]) -> File:
    documents = yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=110, explicit_start=True)
    return File(name, "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines()) + documents)


class _Dumper(yaml.SafeDumper):
    """Text of several lines as such; no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
