"""The manifests that prepare a run on Kubernetes: checkpoints, prompts, and the run itself."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence

from .. import processes
from ..processes import Process
from ..schema import Recipe, Trainer
from ..site import Site
from .common import (
    PREPARE_SECONDS,
    alone,
    engine_image,
    engine_setup,
    is_done,
    together,
    trainer_image,
    trainer_setup,
)
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


def prepare(recipe: Recipe, site: Site) -> list[Manifest]:
    """Jobs, one after the other: what needs no GPU, what does, and the claim of a run that is not there.

    Of each the steps come one after the other, as init containers. A pod holds what one of its containers
    needs from its first to its last: downloads of hours have no GPU in theirs, and the claim, which reads the
    served checkpoint, has none either.
    """
    made = alone(recipe, site)
    first, later = [s for s in made if not s.gpus], [s for s in made if s.gpus]
    if not later:
        return [_steps(recipe, site, "prepare", first, [], _claim(recipe, site))]
    marker = _marker(site, first)
    done = Process(("bash", "-c", 'mkdir -p "${1%/*}" && touch "$1"', "done", marker))
    return [
        _steps(recipe, site, "prepare", first, [], done),
        _steps(recipe, site, "convert", later[:-1], [_after("prepared", ("ls", marker), site)], later[-1]),
        _steps(
            recipe, site, "claim", [], [_after("converted", _marks(later, site), site)], _claim(recipe, site)
        ),
    ]


def _after(name: str, argv: tuple[str, ...], site: Site) -> Manifest:
    return waiting(name, Process(argv), site, PREPARE_SECONDS, mount("models", site.models))


def _marks(steps: Sequence[Process], site: Site) -> tuple[str, ...]:
    """What fails until these steps were done."""
    return ("ls", *(path for step in steps for path in is_done(step, site).argv[1:]))


def _claim(recipe: Recipe, site: Site) -> Process:
    known, claim = (shlex.join(p.argv) for p in (processes.known(site), processes.claim(recipe, site)))
    return Process(("bash", "-c", f"{known} >/dev/null 2>&1 || exec {claim}"))


def _marker(site: Site, steps: Sequence[Process]) -> str:
    """What is there once these steps were done."""
    words = "\0".join(word for step in steps for word in step.argv)
    return f"{site.models}/.prepared/{hashlib.sha256(words.encode()).hexdigest()[:32]}.all"


def _steps(
    recipe: Recipe, site: Site, component: str, made: Sequence[Process], before: list[Manifest], last: Process
) -> Manifest:
    """A Job: ``before``, the steps, and ``last``: one more of them, or one of Stitch's own commands."""
    trainer, on_gpus = recipe.trainer, last.gpus
    places = {"models": (site.models, site.models_claim)}
    if trainer and trainer.data and not on_gpus and made:
        places["data"] = (site.data, site.data_claim)
    files = [mount(name, place) for name, (place, _) in places.items()]
    image = trainer_image(trainer, site) if trainer else engine_image(recipe, site)
    setup = trainer_setup(trainer, site) if trainer else engine_setup(site)

    def one(name: str, step: Process) -> Manifest:
        return container(
            name, image, script(setup, step), site,
            # Ranks of one node meet in /dev/shm, of which a container has 64 MB.
            volumeMounts=[*files, mount("shm", "/dev/shm")] if step.gpus else files,
            env=variables(step.environment),
            resources=of_a_trainer(trainer) if trainer and step.gpus else {},
        )  # fmt: skip

    steps = [one(f"step-{i}", step) for i, step in enumerate(made, 1)]
    ends = (
        one(f"step-{len(made) + 1}", last)
        if on_gpus
        else service_container("last", last, site, volumeMounts=[mount("models", site.models)])
    )
    spec = pod(
        site,
        [ends],
        initContainers=[*before, *steps],
        restartPolicy="Never",
        nodeSelector=site.trainer_nodes if on_gpus else {},
        volumes=[
            *(claim_volume(name, claim) for name, (_, claim) in places.items()),
            *([memory_volume(trainer.memory_limit_gib)] if trainer and on_gpus else []),
        ],
    )
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(site, component),
        "spec": {"backoffLimit": 3, "template": template(site, component, spec)},
    }


def convert(recipe: Recipe, trainer: Trainer, site: Site) -> list[Manifest]:
    """For each step of several nodes: a Job with a pod for each, and the Service by which they meet."""
    made: list[Manifest] = []
    for step in together(recipe, site):
        name = f"{site.name}-together"
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
        labelled = labels(site, "together")
        service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labelled}
        job = {
            # One that fails alone cannot meet the others again.
            "backoffLimit": 0,
            "completionMode": "Indexed",
            "completions": step.nodes,
            "parallelism": step.nodes,
            "template": template(site, "together", spec),
        }
        meta = metadata(site, "together")
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
