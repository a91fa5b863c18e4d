"""Manifests are what Kubernetes and KubeRay take, and say what the recipe says."""

import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from stitch_recipes import catalogue, processes, training
from stitch_recipes.errors import RecipeError
from stitch_recipes.launch import kubernetes
from stitch_recipes.launch.common import together
from stitch_recipes.launch.pods import SETTINGS
from stitch_recipes.schema import Recipe
from tests.recipes.launch.examples import HARD, cases, hard, site_for
from tests.recipes.launch.schemas import VERSIONS, ValidationError, check, check_pod


def manifests(recipe: Recipe, **fields: Any) -> list[dict[str, Any]]:
    files = kubernetes.render(recipe, site_for(recipe, **fields))
    return [document for file in files for document in yaml.safe_load_all(file.text)]


def one(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name]
    return found


def pods(document: Any) -> Iterator[dict[str, Any]]:
    """Every pod's spec in a manifest."""
    if isinstance(document, dict):
        if "containers" in document:
            yield document
        for value in document.values():
            yield from pods(value)
    elif isinstance(document, list):
        for value in document:
            yield from pods(value)


def expanded(text: str, environment: dict[str, str]) -> str:
    """As Kubernetes fills in commands: $$ is a dollar, $(NAME) a variable that is there."""

    def fill(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else environment.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", fill, text)


def executed(script: str) -> list[str]:
    """The words that bash would run in its place."""
    shell = 'exec() { printf "%s\\0" "$@"; }\n' + script
    output = subprocess.run(["bash", "-c", shell], check=True, capture_output=True, text=True, timeout=60)
    return output.stdout.split("\0")[:-1]


@pytest.mark.parametrize("recipe", cases())
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"store": "file:/shared/stitch", "store_claim": "versions", "nvme_class": "fast", "secrets": []},
    ],
    ids=["plain", "own-volumes"],
)  # fmt: skip
def test_kubernetes_takes_every_manifest(recipe: Recipe, fields: dict[str, Any]) -> None:
    documents = manifests(hard(recipe), **fields)
    for document in documents:
        for version in VERSIONS:
            check(document, version)
        if document["kind"] == "RayJob":
            for pod in pods(document):
                check_pod(pod)
    names = [(d["kind"], d["metadata"]["name"]) for d in documents]
    assert len(names) == len(set(names))
    assert all(len(name) <= 63 for _, name in names)
    for document in documents:
        for pod in pods(document):
            volumes = [volume["name"] for volume in pod.get("volumes", [])]
            containers = [*pod.get("initContainers", []), *pod["containers"]]
            mounted = {mount["name"] for c in containers for mount in c.get("volumeMounts", [])}
            assert mounted == set(volumes)
            assert len(volumes) == len(mounted)


def test_the_schemas_tell_what_is_misspelt() -> None:
    """They are strict: without that a probe that nobody reads would pass."""
    recipe = catalogue.load("glm-4.5-air/fp8")
    deployment = one(manifests(recipe), "Deployment", "math-replicas")
    deployment["spec"]["template"]["spec"]["containers"][0]["readyProbe"] = {}
    with pytest.raises(ValidationError, match="readyProbe"):
        check(deployment)
    job = one(manifests(recipe), "RayJob", "math-train")
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-gpus"] = 8
    with pytest.raises(ValidationError, match="8 is not of type 'string'"):
        check(job)


@pytest.mark.parametrize("recipe", cases())
def test_replicas_are_as_the_recipe_says(recipe: Recipe) -> None:
    documents, engine = manifests(recipe), recipe.engine
    deployment = one(documents, "Deployment", "math-replicas")["spec"]
    assert deployment["replicas"] == max(recipe.fleet.min_replicas, 1)
    assert deployment["strategy"]["rollingUpdate"]["maxSurge"] == 0
    spec = deployment["template"]["spec"]
    (replica,) = spec["containers"]
    assert replica["resources"]["limits"]["nvidia.com/gpu"] == engine.gpus
    assert replica["resources"]["requests"]["memory"] == f"{engine.memory_request_gib}Gi"
    assert replica["resources"]["limits"]["memory"] == f"{engine.memory_limit_gib}Gi"
    assert replica["resources"]["limits"]["ephemeral-storage"] == f"{engine.disk_gib}Gi"
    disk = int(replica["resources"]["requests"]["ephemeral-storage"].removesuffix("Gi"))
    assert (disk > 1000) == (engine.canonical_on == "nvme")
    assert disk == 32 or engine.canonical_on == "nvme"
    assert replica["readinessProbe"]["httpGet"] == {"path": "/ready", "port": processes.REPLICA_PORT}
    assert replica["livenessProbe"]["httpGet"]["path"] == "/health"
    environment = {each["name"]: each.get("value") for each in replica["env"]}
    held, drain = environment["STITCH_HOST_DIR"], int(environment["STITCH_DRAIN"])
    places = {mount["name"]: mount["mountPath"] for mount in replica["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    place = "shm" if engine.canonical_on == "memory" else "nvme"
    assert held.startswith(places[place] + "/")
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    if place == "shm":
        assert volumes["shm"]["emptyDir"]["sizeLimit"] == f"{engine.memory_limit_gib}Gi"
    else:
        assert volumes["nvme"]["emptyDir"]["sizeLimit"] == f"{engine.disk_gib}Gi"
    before = int(replica["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert spec["terminationGracePeriodSeconds"] > before + drain
    assert one(documents, "Service", "math-replicas")["spec"]["clusterIP"] == "None"
    assert one(documents, "PodDisruptionBudget", "math-replicas")["spec"]["maxUnavailable"] == 1


def test_a_gateway_is_not_ended_while_it_is_installed() -> None:
    """It was after 150 s, each time anew: a slow index of packages kept a run without one."""
    deployment = one(manifests(catalogue.load("glm-4.5-air/fp8")), "Deployment", "math-gateway")
    (gateway,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "pip install" in gateway["command"][-1]
    started, alive = gateway["startupProbe"], gateway["livenessProbe"]
    assert started["httpGet"] == alive["httpGet"] == {"path": "/health", "port": processes.GATEWAY_PORT}
    assert started["periodSeconds"] * started["failureThreshold"] >= 900
    assert "initialDelaySeconds" not in alive


def test_gateways_find_replicas_and_each_other() -> None:
    recipe = catalogue.load("glm-4.5-air/fp8")
    alone = one(manifests(recipe), "Deployment", "math-gateway")
    assert "dns:math-replicas:30100" in str(alone)
    assert "--peers" not in str(alone)
    several = recipe.model_copy(update={"fleet": recipe.fleet.model_copy(update={"gateways": 3})})
    documents = manifests(several)
    assert one(documents, "Deployment", "math-gateway")["spec"]["replicas"] == 3
    assert "--peers dns:math-gateway-peers:30000" in str(one(documents, "Deployment", "math-gateway"))
    peers = one(documents, "Service", "math-gateway-peers")["spec"]
    assert peers["clusterIP"] == "None"
    assert peers["selector"] == one(documents, "Service", "math-gateway")["spec"]["selector"]


@pytest.mark.parametrize("recipe", cases(trained=True))
def test_the_trainer_is_a_cluster_of_the_recipes_nodes_that_waits_for_replicas(recipe: Recipe) -> None:
    assert recipe.trainer is not None
    documents = manifests(recipe)
    spec = one(documents, "RayJob", "math-train")["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["backoffLimit"] > 0
    cluster = spec["rayClusterSpec"]
    groups = cluster.get("workerGroupSpecs", [])
    assert 1 + sum(group["replicas"] for group in groups) == recipe.trainer.nodes
    for group in [cluster["headGroupSpec"], *groups]:
        (node,) = group["template"]["spec"]["containers"]
        assert "command" not in node
        assert node["args"][0].endswith(" || exit 1")  # KubeRay adds: && ulimit ...; ray start ...
        assert group["rayStartParams"]["num-gpus"] == str(recipe.trainer.gpus_per_node)
        assert node["resources"]["limits"]["nvidia.com/gpu"] == recipe.trainer.gpus_per_node
    *_, gate = cluster["headGroupSpec"]["template"]["spec"]["initContainers"]
    assert f"--replicas {max(recipe.fleet.min_replicas, 1)} " in gate["command"][-1]
    assert "http://math-gateway:30000" in gate["command"][-1]


@pytest.mark.parametrize("name", ["glm-4.5-air/fp8", "qwen3-4b/slime"])
def test_values_of_flags_survive_yaml_kubernetes_and_the_shell(name: str) -> None:
    recipe = hard(catalogue.load(name))
    site = site_for(recipe)
    documents = manifests(recipe)
    replica = one(documents, "Deployment", "math-replicas")["spec"]["template"]["spec"]["containers"][0]
    command = [expanded(word, {"POD_IP": "10.0.0.1"}) for word in replica["command"]]
    served = processes.replica(recipe, site, processes.directory(recipe, site, recipe.serve))
    words = executed(command[-1][command[-1].index("exec ") :])
    assert words == list(served.argv)
    assert set(HARD.values()) <= set(words)
    given = {e["name"]: expanded(e["value"], {"POD_IP": "10.0.0.1"}) for e in replica["env"] if "value" in e}
    assert given["STITCH_ADDRESS"] == "http://10.0.0.1:30100"
    assert served.environment.items() <= given.items()
    data = one(documents, "ConfigMap", "math-train")["data"]
    trainer = training.trainer(recipe, site, "math-gateway", SETTINGS)
    assert executed(data["train.sh"]) == list(training.tidied(recipe, site, trainer).argv)
    for file, content in training.configuration_files(recipe, site).items():
        assert yaml.safe_load(data[file]) == content


def test_a_conversion_of_several_nodes_meets_and_the_trainer_waits_for_it() -> None:
    recipe, (step,) = several_nodes()
    documents = manifests(recipe)
    job = one(documents, "Job", "math-together")["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (step.nodes,) * 2 + ("Indexed",)
    spec = job["template"]["spec"]
    service = one(documents, "Service", "math-together")
    assert spec["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["publishNotReadyAddresses"] is True
    given = {each["name"]: each for each in spec["containers"][0]["env"]}
    assert given["MASTER_ADDR"]["value"] == "math-together-0.math-together"
    assert "job-completion-index" in given["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    head = one(documents, "RayJob", "math-train")["spec"]["rayClusterSpec"]["headGroupSpec"]
    waits = [container["name"] for container in head["template"]["spec"]["initContainers"]]
    assert waits == ["converted", "replicas-are-ready"]
    for name in ("math-prepare", "math-convert"):
        prepared = one(documents, "Job", name)["spec"]["template"]["spec"]["initContainers"]
        assert "convert_hf_to_torch_dist" not in str(prepared)


def test_a_conversion_has_room_where_its_ranks_meet() -> None:
    """A container has 64 MB of /dev/shm, of which NCCL takes more."""
    documents = manifests(catalogue.load("glm-4.5-air/fp8"))
    for name, places in (("math-prepare", {"/models", "/data"}), ("math-convert", {"/models", "/dev/shm"})):
        spec = one(documents, "Job", name)["spec"]["template"]["spec"]
        steps = [s for s in [*spec["initContainers"], *spec["containers"]] if s["name"].startswith("step")]
        assert len(steps) == 2
        for step in steps:
            assert {mount["mountPath"] for mount in step["volumeMounts"]} == places


@pytest.mark.parametrize("recipe", cases(trained=True))
def test_no_gpu_is_held_while_checkpoints_are_downloaded_or_read_for_the_claim(recipe: Recipe) -> None:
    """One Job did all: 8 GPUs waited for terabytes. The last one claims, after it has waited."""
    documents = manifests(recipe)
    jobs = {d["metadata"]["name"]: d for d in documents if d["kind"] == "Job"}
    specs = {name.removeprefix("math-"): d["spec"]["template"]["spec"] for name, d in jobs.items()}
    assert "hf download" in str(specs["prepare"])
    for name in {"prepare", "claim"} & set(specs):
        assert "nvidia.com/gpu" not in str(specs[name])
        assert "nodeSelector" not in specs[name]
    assert [name for name, spec in specs.items() if "stitch claim" in str(spec)] == [
        "claim" if "convert" in specs else "prepare"
    ]
    if "convert" in specs:
        wait, *steps = [*specs["convert"]["initContainers"], *specs["convert"]["containers"]]
        assert "hf download" not in str(specs["convert"])
        assert "resources" not in wait
        assert all("nvidia.com/gpu" in str(step["resources"]) for step in steps)
        (done,), (converted,) = specs["prepare"]["containers"], specs["claim"]["initContainers"]
        marker = done["command"][-1].rpartition(" ")[2]
        assert marker.startswith("/models/.prepared/")
        assert f"ls {marker}" in wait["command"][-1]
        assert converted["command"][-1].count("/models/.prepared/") == len(steps)


def test_agents_reach_the_session_server_of_the_trainers_head() -> None:
    recipe = catalogue.load("glm-4.7-flash/code")
    documents = manifests(recipe)
    service = one(documents, "Service", "math-sessions")["spec"]
    assert recipe.trainer is not None
    assert [service["ports"][0]["port"]] == recipe.trainer.flags["session-server-port"]
    head = one(documents, "RayJob", "math-train")["spec"]["rayClusterSpec"]["headGroupSpec"]
    selected = {**head["template"]["metadata"]["labels"], "ray.io/node-type": "head"}
    assert service["selector"] == selected
    assert "math-sessions" not in str(manifests(catalogue.load("glm-4.5-air/fp8")))


@pytest.mark.parametrize("recipe", cases(trained=True))
def test_a_limit_alone_is_not_requested_whole_which_no_host_of_that_size_could_give(recipe: Recipe) -> None:
    """2048 GiB are a limit of Modal's; a host of 2 TiB has less to give, and the trainer waited for ever."""
    trainer = recipe.trainer
    assert trainer is not None
    cluster = one(manifests(recipe), "RayJob", "math-train")["spec"]["rayClusterSpec"]
    (node,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    asked = node["resources"]["requests"].get("memory")
    if trainer.memory_request_gib is not None:
        assert asked == f"{trainer.memory_request_gib}Gi"
    elif trainer.memory_limit_gib is not None:
        assert asked == "1Gi"
        assert node["resources"]["limits"]["memory"] == f"{trainer.memory_limit_gib}Gi"
    else:
        assert "memory" not in str(node["resources"])


@pytest.mark.parametrize("name", ["kimi-k2.6/nvfp4", "qwen3-30b-a3b/miles"])
def test_nodes_that_train_or_convert_together_get_the_sites_network(name: str) -> None:
    """Nothing asked for it: 16 nodes would have trained over the pods' own network."""
    recipe = catalogue.load(name)
    assert recipe.trainer is not None
    documents = manifests(recipe, trainer_network={"rdma/ib": "8"})
    for document in documents:
        for version in VERSIONS:
            check(document, version)
    meant = {("Job", "math-together"), ("RayJob", "math-train")} if recipe.trainer.nodes > 1 else set()
    given = {(d["kind"], d["metadata"]["name"]) for d in documents if "rdma/ib" in str(d)}
    assert given == meant
    for document in documents:
        for pod in pods(document):
            for container in pod["containers"] if "rdma/ib" in str(document) else []:
                asked = container["resources"]
                assert asked["limits"]["rdma/ib"] == asked["requests"]["rdma/ib"] == "8"
                assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert "IPC_LOCK" not in str(manifests(recipe))


def test_nodes_that_convert_together_are_not_held_while_checkpoints_are_downloaded() -> None:
    """Both Jobs were applied at once: 64 GPUs of kimi-k2.6/nvfp4 waited hours for one node's conversion."""
    recipe = catalogue.load("kimi-k2.6/nvfp4")
    (text,) = [f.text for f in kubernetes.render(recipe, site_for(recipe)) if f.name == "1-prepare.yaml"]
    commands = [line[1:].strip() for line in text.splitlines() if line.startswith("#   kubectl")]
    wait = "wait --for=condition=complete --timeout=12h"
    assert commands == [
        "kubectl --namespace default apply -f 1-prepare.yaml",
        f"kubectl --namespace default {wait} job/math-prepare",
        "kubectl --namespace default apply -f 1-prepare-convert.yaml",
        f"kubectl --namespace default {wait} job/math-convert",
        "kubectl --namespace default apply -f 1-prepare-claim.yaml",
        f"kubectl --namespace default {wait} job/math-claim",
        "kubectl --namespace default apply -f 1-prepare-together.yaml",
        f"kubectl --namespace default {wait} job/math-together",
        "kubectl --namespace default apply -f .",
        "kubectl --namespace default delete -f .",
    ]


@pytest.mark.parametrize("recipe", cases())
def test_no_service_of_the_namespace_sets_a_variable(recipe: Recipe) -> None:
    for document in manifests(recipe):
        for pod in pods(document):
            assert pod["enableServiceLinks"] is False


def several_nodes() -> tuple[Recipe, list[processes.Process]]:
    """A recipe whose checkpoint one node cannot convert."""
    recipe = catalogue.load("glm-5.2/nvfp4")
    return recipe, together(recipe, site_for(recipe))


def test_secrets_are_named_and_never_there() -> None:
    for document in manifests(catalogue.load("glm-4.5-air/fp8")):
        for pod in pods(document):
            for container in [*pod.get("initContainers", []), *pod["containers"]]:
                assert container["envFrom"] == [{"secretRef": {"name": "store-keys"}}]


def test_a_directory_as_store_needs_its_volume() -> None:
    with pytest.raises(RecipeError, match="set store_claim of the site"):
        manifests(catalogue.load("glm-4.5-air/fp8"), store="file:/shared/stitch")
