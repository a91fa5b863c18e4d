"""Pods of Kubernetes: what the manifests have in common."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..processes import Process
from ..site import Site
from .common import SERVICE_IMAGE, install, service_setup

Manifest = dict[str, Any]

SETTINGS = "/etc/stitch"
"""Where the ConfigMap with the trainer's settings is mounted."""

LEAST_MEMORY = "1Gi"
"""Requested where a recipe has a limit alone: who has all of a host's GPUs has its memory as well."""

LEAST_DISK_GIB = 32
"""Requested of a limit of disk: for logs and what is compiled."""


def labels(site: Site, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "stitch",
        "app.kubernetes.io/instance": site.name,
        "app.kubernetes.io/component": component,
    }


def metadata(site: Site, component: str) -> Manifest:
    return {"name": f"{site.name}-{component}", "labels": labels(site, component)}


def script(setup: Sequence[str], process: Process) -> list[str]:
    """What a container runs: the setup, then the process in the shell's place, so that signals reach it."""
    return ["bash", "-c", "\n".join(["set -euo pipefail", *setup, f"exec {shlex.join(process.argv)}"])]


def variables(environment: Mapping[str, str]) -> list[Manifest]:
    """As a container's."""
    return [{"name": name, "value": escaped(value)} for name, value in sorted(environment.items())]


def container(name: str, image: str, command: list[str], site: Site, **more: Any) -> Manifest:
    """One container with the site's secrets as variables."""
    secrets = [{"secretRef": {"name": secret}} for secret in site.secrets]
    mounts = [*more.pop("volumeMounts", []), *_store_mount(site)]
    given = {"name": name, "image": image, "command": [*map(escaped, command)], "envFrom": secrets, **more}
    given["volumeMounts"] = mounts
    return {key: value for key, value in given.items() if value not in ([], {}, None)}


def escaped(text: str) -> str:
    """Text of a command or a variable that Kubernetes leaves as it is: ``$(NAME)`` it would fill in."""
    return text.replace("$", "$$")


def service_container(name: str, process: Process, site: Site, **more: Any) -> Manifest:
    """Of what needs no GPU: Stitch's own commands on a plain Python image."""
    return container(name, SERVICE_IMAGE, script(service_setup(site), process), site, **more)


def waiting(name: str, process: Process, site: Site, seconds: int, *mounts: Manifest) -> Manifest:
    """An init container that tries until the process succeeds, and fails when the time is over."""
    lines = [
        "set -euo pipefail",
        *service_setup(site),
        f"until {shlex.join(process.argv)} >/dev/null; do",
        f'  ((SECONDS < {seconds})) || {{ echo "not after {seconds} s" >&2; exit 1; }}',
        "  sleep $((5 + RANDOM % 5))",
        "done",
    ]
    return container(name, SERVICE_IMAGE, ["bash", "-c", "\n".join(lines)], site, volumeMounts=list(mounts))


def gate(url: str, count: int, seconds: int, site: Site) -> Manifest:
    """An init container that ends when a gateway has so many replicas."""
    words = ("python3", "-m", "stitch_recipes.launch.ready", url, "--replicas", str(count))
    process = Process((*words, "--seconds", str(seconds)))
    return container("replicas-are-ready", SERVICE_IMAGE, script([install(site)], process), site)


def resources(
    *, gpus: int = 0, cpu: str | None = None, request: int | None = None, limit: int | None = None,
    disk: int | None = None, disk_used: int = 0, devices: Mapping[str, str] | None = None,
) -> Manifest:  # fmt: skip
    """Of a container; memory and disk in GiB. GPUs and other devices are limits as well; ``disk`` is a limit,
    of which no more is requested than ``disk_used``: hosts have not that much for each of their GPUs.
    """
    requests: Manifest = dict(devices or {})
    limits: Manifest = dict(devices or {})
    if cpu:
        requests["cpu"] = cpu
    if request:
        requests["memory"] = f"{request}Gi"
    elif limit:
        # Without one Kubernetes would request the limit, for which a host of just that size has no room.
        requests["memory"] = LEAST_MEMORY
    if limit:
        limits["memory"] = f"{limit}Gi"
    if disk:
        requests["ephemeral-storage"] = f"{min(disk, disk_used + LEAST_DISK_GIB)}Gi"
        limits["ephemeral-storage"] = f"{disk}Gi"
    if gpus:
        requests["nvidia.com/gpu"] = limits["nvidia.com/gpu"] = gpus
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def claim_volume(name: str, claim: str) -> Manifest:
    return {"name": name, "persistentVolumeClaim": {"claimName": claim}}


def memory_volume(limit: int | None) -> Manifest:
    """/dev/shm; what lies in it counts against the pod's memory, ``limit`` GiB."""
    sized = {"sizeLimit": f"{limit}Gi"} if limit else {}
    return {"name": "shm", "emptyDir": {"medium": "Memory", **sized}}


def mount(name: str, path: str, **more: Any) -> Manifest:
    return {"name": name, "mountPath": path, **more}


def _store_mount(site: Site) -> list[Manifest]:
    """Of a file: store, at its own path."""
    return [mount("store", store_directory(site))] if site.store.startswith("file:") else []


def store_directory(site: Site) -> str:
    """Of a file: store."""
    return site.store.removeprefix("file:").partition("?")[0]


def pod(site: Site, containers: list[Manifest], **more: Any) -> Manifest:
    """A pod that talks to no Kubernetes API, with the volume of a file: store.

    It gets no variables for the namespace's Services either: one of STITCH_... or MASTER_PORT could be meant.
    """
    volumes = list(more.pop("volumes", []))
    if _store_mount(site):
        volumes.append(claim_volume("store", site.store_claim or ""))
    alone = {"automountServiceAccountToken": False, "enableServiceLinks": False}
    given = {**alone, **more, "containers": containers, "volumes": volumes}
    return {key: value for key, value in given.items() if value not in ([], {}, None)}


def template(site: Site, component: str, spec: Manifest) -> Manifest:
    return {"metadata": {"labels": labels(site, component)}, "spec": spec}
