"""The manifests that prepare a run on Kubernetes: checkpoints, prompts, and the run itself."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from .. import processes
from ..processes import Process
from ..schema import Recipe, Trainer
from ..site import Site
from .common import PREPARE_SECONDS, alone, engine_image, engine_setup, together, trainer_image, trainer_setup
from .pods import (
    Manifest,
    claim_volume,
    container,
    labels,
    memory_volume,
    metadata,
    mount,
    pod,
    resources,
    script,
    service_container,
    template,
    variables,
    waiting,
)

_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def prepare(recipe: Recipe, site: Site) -> Manifest:
    """A Job: the steps one after the other, as init containers, then the claim of a run that is not there."""
    trainer = recipe.trainer
    places = {"models": (site.models, site.models_claim)}
    if trainer and trainer.data:
        places["data"] = (site.data, site.data_claim)
    files = [mount(name, place) for name, (place, _) in places.items()]
    image = trainer_image(trainer, site) if trainer else engine_image(recipe, site)
    setup = trainer_setup(trainer, site) if trainer else engine_setup(site)
    made = alone(recipe, site)
    converts = any(step.converts for step in made)
    steps = [
        container(
            f"step-{i}", image, script(setup, step), site,
            # Ranks of one node meet in /dev/shm, of which a container has 64 MB.
            volumeMounts=[*files, mount("shm", "/dev/shm")] if step.converts else files,
            env=variables(step.environment),
            resources=of_a_trainer(trainer) if trainer and step.converts else {},
        )
        for i, step in enumerate(made, 1)
    ]  # fmt: skip
    known, claim = (shlex.join(p.argv) for p in (processes.known(site), processes.claim(recipe, site)))
    create = Process(("bash", "-c", f"{known} >/dev/null 2>&1 || exec {claim}"))
    spec = pod(
        site,
        [service_container("claim", create, site, volumeMounts=[mount("models", site.models)])],
        initContainers=steps,
        restartPolicy="Never",
        nodeSelector=site.trainer_nodes if converts else {},
        volumes=[
            *(claim_volume(name, claim) for name, (_, claim) in places.items()),
            *([memory_volume(trainer.memory_limit_gib)] if trainer and converts else []),
        ],
    )
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(site, "prepare"),
        "spec": {"backoffLimit": 3, "template": template(site, "prepare", spec)},
    }


def convert(recipe: Recipe, trainer: Trainer, site: Site) -> list[Manifest]:
    """For each step of several nodes: a Job with a pod for each, and the Service by which they meet."""
    made: list[Manifest] = []
    for step in together(recipe, site):
        name = f"{site.name}-convert"
        node = container(
            "node", trainer_image(trainer, site), script(trainer_setup(trainer, site), step), site,
            env=[
                *variables({**step.environment, "MASTER_ADDR": f"{name}-0.{name}"}),
                # Set by the Job's controller; it is the node's number.
                {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
            ],
            resources=of_a_trainer(trainer, site.trainer_network),
            **on_the_network(site),
            volumeMounts=[mount("models", site.models), mount("shm", "/dev/shm")],
        )  # fmt: skip
        spec = pod(
            site, [node],
            initContainers=[waiting("run-is-there", processes.known(site), site, PREPARE_SECONDS)],
            restartPolicy="Never",
            subdomain=name,
            nodeSelector=site.trainer_nodes,
            volumes=[claim_volume("models", site.models_claim), memory_volume(trainer.memory_limit_gib)],
        )  # fmt: skip
        service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels(site, "convert")}
        job = {
            # One that fails alone cannot meet the others again.
            "backoffLimit": 0,
            "completionMode": "Indexed",
            "completions": step.nodes,
            "parallelism": step.nodes,
            "template": template(site, "convert", spec),
        }
        meta = metadata(site, "convert")
        made += [
            {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": service},
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": job},
        ]
    return made


def on_the_network(site: Site) -> Manifest:
    """Of a container that talks to other nodes by NCCL: the site's devices, and the right to lock memory."""
    if not site.trainer_network:
        return {}
    return {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}


def of_a_trainer(trainer: Trainer, network: Mapping[str, str] | None = None) -> Manifest:
    """What one of the trainer's nodes asks for; ``network``: the site's, for one of several."""
    return resources(
        gpus=trainer.gpus_per_node, request=trainer.memory_request_gib, limit=trainer.memory_limit_gib,
        disk=trainer.disk_gib, devices=network,
    )  # fmt: skip
