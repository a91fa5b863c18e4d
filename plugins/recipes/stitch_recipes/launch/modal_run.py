"""What runs in the containers of a rendered Modal app."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import processes, training
from ..processes import GATEWAY_PORT, REPLICA_PORT, Process
from . import ready, whole
from .common import RAY_PORT, READY_SECONDS, alone, dumped, needed, together
from .modal_app import RUN_FILE, Deployment
from .saves import prune

# Modal lets requests end first, and then gives 30 s.
DRAIN_AFTER_GRACE = 20
SETTINGS = Path("/tmp/stitch-run")


def start_replica(deployment: Deployment) -> subprocess.Popen[bytes]:
    """A replica that is ready: Modal sends requests to what this returned from."""
    recipe, site = deployment.recipe, deployment.site
    process = processes.replica(recipe, site, processes.directory(recipe, site, recipe.serve))
    os.makedirs(site.nvme, exist_ok=True)
    child = start(process, {"STITCH_DRAIN": str(DRAIN_AFTER_GRACE)})
    _answers(f"http://127.0.0.1:{REPLICA_PORT}/ready", child, READY_SECONDS)
    return child


def start_gateway(deployment: Deployment, *, tokens: bool = True) -> subprocess.Popen[bytes]:
    """A gateway that listens; without ``tokens`` for a stock trainer beside it, which shows none."""
    process = processes.gateway(deployment.recipe, deployment.site, deployment.pool)
    child = start(process, {} if tokens else {"STITCH_TOKENS": "", "STITCH_TOKEN_FILE": ""})
    _answers(f"http://127.0.0.1:{GATEWAY_PORT}/health", child, 120)
    return child


def prepare(deployment: Deployment, *, converting: bool) -> None:
    """The steps of one kind, each of which leaves what is there already."""
    volumes = deployment.prepared
    for volume in volumes.values():
        volume.reload()
    for step in alone(deployment.recipe, deployment.site):
        if step.gpus == converting:
            run(step)
    for volume in volumes.values():
        volume.commit()  # or the next container may start without it


def prepare_together(deployment: Deployment) -> None:
    """On each node of a cluster: the steps of several nodes."""
    deployment.models.reload()
    for step in together(deployment.recipe, deployment.site):
        rank, head = _place(step.nodes)
        run(step, {"NODE_RANK": str(rank), "MASTER_ADDR": head})
    deployment.models.commit()


def gather(target: Path) -> None:
    """Put together what several containers made of a checkpoint in Megatron's format.

    Its converter renames the directory of the first iteration at the end: only the first node's files, which
    are all that its container has. Those of the others were committed under the old name.
    """
    before, after = target / "iter_0000001", target / "release"
    if before.is_dir():
        after.mkdir(exist_ok=True)
        for file in sorted(before.iterdir()):
            file.replace(after / file.name)
        before.rmdir()


def claim(deployment: Deployment) -> None:
    """Create the run, unless it is there: a claim would fence the trainer that runs."""
    deployment.models.reload()
    if several := together(deployment.recipe, deployment.site):
        for step in several:
            gather(Path(step.makes or ""))
        deployment.models.commit()
    if subprocess.run(processes.known(deployment.site).argv, cwd="/", capture_output=True).returncode:
        run(processes.claim(deployment.recipe, deployment.site))


def wait_for_replicas(deployment: Deployment) -> None:
    """The gate before training. Raises TimeoutError."""
    gateway = start_gateway(deployment, tokens=False)
    try:
        if not ready.wait(f"http://127.0.0.1:{GATEWAY_PORT}", needed(deployment.recipe), READY_SECONDS):
            raise TimeoutError("replicas are not ready: `modal app logs` says what each does")
    finally:
        stop(gateway)


def tidy(deployment: Deployment) -> None:
    """Remove checkpoints of the trainer that nothing needs any more."""
    volume = deployment.saved
    volume.reload()
    place = Path(training.saves(deployment.site))
    if removed := prune(place, deployment.recipe.versions.kept_saves):
        volume.commit()
        print(f"removed of {place}: {', '.join(removed)}", flush=True)


def profile(deployment: Deployment, *options: str) -> str:
    """``stitch recipe profile`` of this run's recipe, on the served checkpoint; its row, as JSON.

    The row is also a file on the Volume of models. Raises RuntimeError without a checkpoint or a GPU, when a
    check fails, and for options that the command refuses.
    """
    from ..profile.engine import has_gpu
    from ..profile.row import describe

    recipe, site = deployment.recipe, deployment.site
    deployment.models.reload()
    base = processes.directory(recipe, site, recipe.serve)
    if (wrong := whole.fault(Path(base))) is not None:
        raise RuntimeError(f"{wrong}; `python app.py prepare` makes the checkpoint")
    if not has_gpu():
        raise RuntimeError("this container shows no GPU (/dev/nvidiactl): a row of it would be a CPU's")
    asked = ("stitch", "recipe", "profile", str(deployment.here / RUN_FILE), "--base", base, "--project")
    process = Process((*asked, "--json", *options))
    print("+", process.shell(), file=sys.stderr, flush=True)
    done = subprocess.run(process.argv, cwd="/", stdout=subprocess.PIPE, text=True)
    try:
        row = json.loads(done.stdout)
    except ValueError:
        raise RuntimeError(f"{_name(process.argv)} ended with {done.returncode}: see above") from None
    file = Path(site.models, "profiles", f"{recipe.name.replace('/', '-')}-{int(time.time())}.json")
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(row, indent=2) + "\n", "utf-8")
    deployment.models.commit()
    print(f"{describe(row)}\n\nthe row is {file} of the Volume {site.models_claim}", flush=True)
    if done.returncode:
        raise RuntimeError(f"{_name(process.argv)} ended with {done.returncode}: a check failed, see above")
    return file.read_text("utf-8")


def follow(process: Process, seconds: float) -> None:
    """Run what has no end of its own for so long."""
    child = start(process)
    try:
        code = child.wait(seconds)
        raise RuntimeError(f"{_name(process.argv)} ended with {code}")
    except subprocess.TimeoutExpired:
        stop(child)


def train(deployment: Deployment) -> None:
    """The trainer, on every node of its cluster: Ray on all, and on the first the gateway and the job.

    Raises RuntimeError when it fails; Modal then starts it again.
    """
    trainer = deployment.training
    see_all(deployment)
    rank, head = _place(trainer.nodes)
    job = training.trainer(deployment.recipe, deployment.site, head, str(SETTINGS))
    gpus = ("--num-gpus", str(trainer.gpus_per_node), "--disable-usage-stats", "--block")
    SETTINGS.mkdir(exist_ok=True)
    # On every node: some of it is read by each rank.
    for name, content in training.configuration_files(deployment.recipe, deployment.site).items():
        (SETTINGS / name).write_text(dumped(content), "utf-8")
    if rank > 0:
        node = Process(("ray", "start", "--address", f"{head}:{RAY_PORT}", *gpus), job.environment)
        _joins(node)
        _leave()
        return
    first = ("ray", "start", "--head", "--node-ip-address", head, "--port", str(RAY_PORT))
    ray = start(Process((*first, "--include-dashboard=false", *gpus), job.environment))
    gateway = start_gateway(deployment, tokens=False)
    try:
        run(job, {"RAY_ADDRESS": f"{head}:{RAY_PORT}"})
    finally:
        stop(gateway)
        stop(ray)  # which ends the other nodes
        _leave()


def see_all(deployment: Deployment) -> None:
    """What other containers have committed: the next try may run in the container of the one before, which
    saw its own node's part of the checkpoints since."""
    for volume in (deployment.saved, *deployment.prepared.values()):
        try:
            volume.reload()
        except RuntimeError as error:  # a file that something left over keeps open
            print(f"a Volume is as this container saw it before: {error}", file=sys.stderr, flush=True)


def _place(nodes: int) -> tuple[int, str]:
    """This node's rank, and the address of the first."""
    if nodes == 1:
        return 0, "127.0.0.1"
    import modal

    cluster = modal.Cluster.from_context()
    return cluster.container_rank(), cluster.container_ips("ipv4")[0]


def _joins(node: Process) -> None:
    """A node of a Ray cluster until its head is gone. The head may come later: tried for ten minutes."""
    until = time.monotonic() + 600
    while True:
        started = time.monotonic()
        subprocess.run(node.argv, env={**os.environ, **node.environment}, cwd="/")
        if time.monotonic() - started > 60 or time.monotonic() > until:
            return
        time.sleep(5)


def _leave() -> None:
    """Nothing of Ray stays: Modal may run the next try in the same container."""
    subprocess.run(("ray", "stop", "--force"), cwd="/")


def start(process: Process, more: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """In a session of its own, and nowhere below a Volume: that would bar the Volume's reload."""
    environment = {**os.environ, **process.environment, **(more or {})}
    return subprocess.Popen(process.argv, env=environment, cwd="/", start_new_session=True)


def run(process: Process, more: Mapping[str, str] | None = None) -> None:
    """Until it ends. Raises RuntimeError unless it ends well."""
    environment = {**os.environ, **process.environment, **(more or {})}
    print("+", process.shell(), file=sys.stderr, flush=True)
    code = subprocess.run(process.argv, env=environment, cwd="/").returncode
    if code:
        raise RuntimeError(f"{_name(process.argv)} ended with {code}")


def stop(child: subprocess.Popen[bytes], seconds: float = 25.0) -> None:
    """Ask it to end, and then end it with whatever it started."""
    child.terminate()
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"process {child.pid} did not end within {seconds:g} s", file=sys.stderr)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _answers(url: str, child: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until ``url`` answers with 200. Raises RuntimeError if the process ends, or the time is over."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if child.poll() is not None:
            raise RuntimeError(f"it ended with {child.returncode} before {url} answered; see above")
        try:
            with urllib.request.urlopen(url, timeout=10):
                return
        except OSError:  # not listening, or 503
            time.sleep(2)
    stop(child)
    raise RuntimeError(f"{url} did not answer well within {seconds:g} s")


def _name(argv: Sequence[str]) -> str:
    return " ".join(argv[:2])
