"""The manifests of a run on Kubernetes, as values; kubernetes.py makes files of them."""

from __future__ import annotations

from .. import processes, training
from ..footprint import disk_gib
from ..processes import GATEWAY_PORT, REPLICA_PORT
from ..schema import Engine, Recipe, Trainer
from ..site import Site
from .common import (
    DRAIN_SECONDS,
    PREPARE_SECONDS,
    READY_SECONDS,
    RESTARTS,
    dumped,
    engine_image,
    engine_setup,
    is_done,
    needed,
    together,
    trainer_image,
    trainer_setup,
)
from .pods import (
    SETTINGS,
    Manifest,
    claim_volume,
    container,
    escaped,
    gate,
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
from .preparing import of_a_trainer, on_the_network

LEAVE_SECONDS = 10
"""Until every gateway has seen that a pod is to end; only then is its process told."""

INSTALL_SECONDS = 900
"""Until a service on a plain image has been installed, from a slow index too."""

PROBE = {"periodSeconds": 5, "timeoutSeconds": 5}


def replicas(recipe: Recipe, site: Site) -> list[Manifest]:
    """A Deployment, the headless Service by which gateways find its pods, and a budget for drained nodes."""
    engine = recipe.engine
    name, selector = f"{site.name}-replicas", {"matchLabels": labels(site, "replicas")}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(site, "replicas"),
        "spec": {
            "replicas": needed(recipe),
            "selector": selector,
            "progressDeadlineSeconds": READY_SECONDS,
            # GPUs are all taken: a new pod finds room once an old one is gone.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "25%"}},
            "template": template(site, "replicas", _replica(recipe, engine, site)),
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(site, "replicas"),
        "spec": {
            "clusterIP": "None",
            "selector": labels(site, "replicas"),
            "ports": [{"name": "http", "port": REPLICA_PORT}],
        },
    }
    return [deployment, service, _budget(name, site, "replicas", selector)]


def _replica(recipe: Recipe, engine: Engine, site: Site) -> Manifest:
    process = processes.replica(recipe, site, processes.directory(recipe, site, recipe.serve))
    memory = engine.canonical_on == "memory"
    url = {"port": REPLICA_PORT}
    server = container(
        "replica", engine_image(recipe, site), script(engine_setup(site), process), site,
        env=[
            *variables({**process.environment, "STITCH_DRAIN": str(DRAIN_SECONDS)}),
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "STITCH_ADDRESS", "value": f"http://$(POD_IP):{REPLICA_PORT}"},
        ],
        ports=[{"name": "http", "containerPort": REPLICA_PORT}],
        resources=resources(
            gpus=engine.gpus, request=engine.memory_request_gib, limit=engine.memory_limit_gib,
            disk=None if site.nvme_class else engine.disk_gib,
            disk_used=disk_gib(recipe),
        ),
        volumeMounts=[
            mount("models", site.models, readOnly=True), mount("shm", "/dev/shm"), mount("nvme", site.nvme),
        ],
        # Nothing answers until the checkpoint is loaded.
        startupProbe={"httpGet": {"path": "/health", **url}, "periodSeconds": 10,
                      "failureThreshold": READY_SECONDS // 10},
        readinessProbe={"httpGet": {"path": "/ready", **url}, **PROBE, "failureThreshold": 1},
        # 503 here says that weights are uncertain, for which there is no cure but another replica.
        livenessProbe={"httpGet": {"path": "/health", **url}, **PROBE, "failureThreshold": 6},
        lifecycle={"preStop": {"exec": {"command": ["sleep", str(LEAVE_SECONDS)]}}},
    )  # fmt: skip
    return pod(
        site,
        [server],
        initContainers=[waiting("run-is-there", processes.known(site), site, PREPARE_SECONDS)],
        terminationGracePeriodSeconds=LEAVE_SECONDS + DRAIN_SECONDS + 60,
        nodeSelector=site.engine_nodes,
        volumes=[
            claim_volume("models", site.models_claim),
            memory_volume(engine.memory_limit_gib if memory else None),
            _nvme(engine, site),
        ],
    )


def _nvme(engine: Engine, site: Site) -> Manifest:
    """Goes with its pod, so that nothing is left on a node."""
    if site.nvme_class is None:
        return {"name": "nvme", "emptyDir": {"sizeLimit": f"{engine.disk_gib}Gi"}}
    claim = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": site.nvme_class,
        "resources": {"requests": {"storage": f"{engine.disk_gib}Gi"}},
    }
    return {"name": "nvme", "ephemeral": {"volumeClaimTemplate": {"spec": claim}}}


def _budget(name: str, site: Site, component: str, selector: Manifest) -> Manifest:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(site, component),
        "spec": {"maxUnavailable": 1, "selector": selector},
    }


def gateways(recipe: Recipe, site: Site) -> list[Manifest]:
    """A Deployment, the Service that clients ask, and one by which several gateways know each other."""
    name, several = f"{site.name}-gateway", recipe.fleet.gateways > 1
    process = processes.gateway(
        recipe, site, f"dns:{site.name}-replicas:{REPLICA_PORT}",
        f"dns:{site.name}-gateway-peers:{GATEWAY_PORT}" if several else None,
    )  # fmt: skip
    probe = {"httpGet": {"path": "/ready", "port": GATEWAY_PORT}, **PROBE}
    alive = {"httpGet": {"path": "/health", "port": GATEWAY_PORT}, **PROBE}
    server = service_container(
        "gateway", process, site,
        ports=[{"name": "http", "containerPort": GATEWAY_PORT}],
        resources=resources(cpu="2", request=4, limit=8),
        readinessProbe={**probe, "failureThreshold": 2},
        # Nothing answers until it is installed.
        startupProbe={**alive, "failureThreshold": INSTALL_SECONDS // PROBE["periodSeconds"]},
        livenessProbe={**alive, "failureThreshold": 6},
    )  # fmt: skip
    selector = labels(site, "gateway")
    ports = [{"name": "http", "port": GATEWAY_PORT}]
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(site, "gateway"),
        "spec": {
            "replicas": recipe.fleet.gateways,
            "selector": {"matchLabels": selector},
            "template": template(site, "gateway", pod(site, [server], terminationGracePeriodSeconds=90)),
        },
    }
    made: list[Manifest] = [
        deployment,
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata(site, "gateway"),
            "spec": {"selector": selector, "ports": ports},
        },
    ]
    if several:
        peers = {"clusterIP": "None", "selector": selector, "ports": ports}
        made += [
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": metadata(site, "gateway-peers"),
                "spec": peers,
            },
            _budget(name, site, "gateway", {"matchLabels": selector}),
        ]
    return made


def housekeeping(recipe: Recipe, site: Site) -> list[Manifest]:
    """The compactor, always one, and the collector, once a day."""
    collector = service_container("collector", processes.collector(recipe, site), site)
    job = {
        "backoffLimit": 1,
        "template": template(site, "collector", pod(site, [collector], restartPolicy="Never")),
    }
    daily = {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": metadata(site, "collector"),
        "spec": {"schedule": "17 4 * * *", "concurrencyPolicy": "Forbid", "jobTemplate": {"spec": job}},
    }
    if not recipe.versions.compact:
        return [daily]
    compactor = service_container(
        "compactor", processes.compactor(site), site,
        resources=resources(cpu="2", request=8), volumeMounts=[mount("scratch", "/tmp")],
    )  # fmt: skip
    spec = pod(
        site,
        [compactor],
        initContainers=[waiting("run-is-there", processes.known(site), site, PREPARE_SECONDS)],
        volumes=[{"name": "scratch", "emptyDir": {}}],
    )
    follows = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(site, "compactor"),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels(site, "compactor")},
            "strategy": {"type": "Recreate"},
            "template": template(site, "compactor", spec),
        },
    }
    return [follows, daily]


def settings(recipe: Recipe, site: Site) -> list[Manifest]:
    """The trainer's settings, and its command as a script: Ray would quote it in its own way."""
    process = training.trainer(recipe, site, f"{site.name}-gateway", SETTINGS)
    process = training.tidied(recipe, site, process)
    data = {name: dumped(content) for name, content in training.configuration_files(recipe, site).items()}
    data["train.sh"] = f"exec {processes.lines(process.argv)}\n"
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(site, "train"), "data": data}]


def sessions(trainer: Trainer, site: Site) -> list[Manifest]:
    """The Service by which agents reach the session server on the trainer's head, where there is one."""
    ports = trainer.flags.get("session-server-port")
    if not isinstance(ports, list):
        return []
    # The second label is KubeRay's.
    selector = {**labels(site, "train"), "ray.io/node-type": "head"}
    spec = {"selector": selector, "ports": [{"name": "http", "port": ports[0]}]}
    return [{"apiVersion": "v1", "kind": "Service", "metadata": metadata(site, "sessions"), "spec": spec}]


def trainer(recipe: Recipe, trainer: Trainer, site: Site) -> Manifest:
    """A RayJob: its head is the trainer's first node. Schema: ray-project/kuberay, ray.io_rayjobs.yaml."""
    head = {
        "rayStartParams": {"dashboard-host": "0.0.0.0", "num-gpus": str(trainer.gpus_per_node)},
        "template": template(site, "train", _node(recipe, trainer, site, "ray-head")),
    }
    more = {
        "groupName": "nodes",
        "replicas": trainer.nodes - 1,
        "minReplicas": trainer.nodes - 1,
        "maxReplicas": trainer.nodes - 1,
        "rayStartParams": {"num-gpus": str(trainer.gpus_per_node)},
        "template": template(site, "train", _node(recipe, trainer, site, "ray-worker")),
    }
    cluster = {"headGroupSpec": head, **({"workerGroupSpecs": [more]} if trainer.nodes > 1 else {})}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata(site, "train"),
        "spec": {
            "entrypoint": f"bash {SETTINGS}/train.sh",
            "backoffLimit": RESTARTS,
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": cluster,
        },
    }


def _node(recipe: Recipe, trainer: Trainer, site: Site, name: str) -> Manifest:
    process = training.trainer(recipe, site, f"{site.name}-gateway", SETTINGS)
    setup, several = trainer_setup(trainer, site), trainer.nodes > 1
    node = container(
        name, trainer_image(trainer, site), [], site,
        # KubeRay puts this before its own `ray start`, in one line of a shell.
        args=[escaped(" && ".join(setup) + " || exit 1")] if setup else [],
        env=variables(process.environment),
        resources=of_a_trainer(trainer, site.trainer_network if several else None),
        **(on_the_network(site) if several else {}),
        volumeMounts=[
            mount("models", site.models, readOnly=True), mount("data", site.data), mount("saves", site.saves),
            mount("settings", SETTINGS, readOnly=True), mount("shm", "/dev/shm"),
        ],
    )  # fmt: skip
    converted = [
        waiting("converted", is_done(step, site), site, PREPARE_SECONDS, mount("models", site.models))
        for step in together(recipe, site)
    ]
    ready = gate(f"http://{site.name}-gateway:{GATEWAY_PORT}", needed(recipe), READY_SECONDS, site)
    return pod(
        site,
        [node],
        initContainers=[*converted, ready] if name == "ray-head" else [],
        nodeSelector=site.trainer_nodes,
        volumes=[
            claim_volume("models", site.models_claim),
            claim_volume("data", site.data_claim),
            claim_volume("saves", site.saves_claim),
            {"name": "settings", "configMap": {"name": f"{site.name}-train"}},
            memory_volume(trainer.memory_limit_gib),
        ],
    )
