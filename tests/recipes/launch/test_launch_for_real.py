"""The scripts run: processes are started once, found again, and ended, as is a trainer that
fails. The host is this one, and its ssh a shell; there is no GPU, so that the replica ends at once.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from stitch_core.chain import ChainReader
from stitch_core.stores import open_store
from stitch_recipes import catalogue, processes
from stitch_recipes.launch import shell
from stitch_recipes.launch.files import write
from stitch_recipes.site import Site

pytestmark = pytest.mark.real
RECIPE = catalogue.load("qwen3-0.6b/miles")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """This machine as the only host, with a checkpoint and `stitch` from the clone."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setattr(processes, "GATEWAY_PORT", free.getsockname()[1])
    model = tmp_path / "models" / "qwen3-0.6b-bf16"
    model.mkdir(parents=True)
    save_file({"a": np.arange(8, dtype=np.float32)}, model / "model.safetensors")
    programs = tmp_path / "bin"
    programs.mkdir()
    stitch = f"#!{sys.executable}\nimport sys\nfrom stitch_core.cli.main import main\nsys.exit(main())\n"
    (programs / "stitch").write_text(stitch)
    (programs / "stitch").chmod(0o755)
    (programs / "python3").symlink_to(sys.executable)
    paths = ":".join([str(ROOT), *map(str, sorted((ROOT / "plugins").iterdir()))])
    (tmp_path / "activate").write_text(
        f"export PATH={programs}:$PATH PYTHONPATH={paths}\n[[ -n $UNSET_VARIABLE ]] || true\n"
    )
    (tmp_path / "store").mkdir()
    fields = {
        "run": "math-1",
        "store": f"file:{tmp_path}/store",
        "models": f"{tmp_path}/models",
        "hosts": ["here"],
        "replicas": ["here"],
        "ssh": ["bash", "-c", 'exec bash -c "$1"'],
        "directory": f"{tmp_path}/host",
        "activate": f"{tmp_path}/activate",
    }
    return Site.model_validate(fields)


@pytest.fixture
def out(site: Site, tmp_path: Path) -> Iterator[Path]:
    """A rendering; whatever it started is ended in the end."""
    write(shell.render(RECIPE, site), tmp_path / "out", "ssh")
    yield tmp_path / "out"
    run(tmp_path / "out", "stop.sh")


def run(out: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(out / words[0]), *words[1:]], capture_output=True, text=True, timeout=180,
        env={**os.environ, **variables},
    )  # fmt: skip


def state(site: Site) -> Path:
    return Path(site.directory) / site.run / "state"


def pid(site: Site, name: str) -> int:
    return int((state(site) / f"{name}.pid").read_text().split()[0])


def alive(process: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False


def epoch(site: Site) -> int:
    async def read() -> int:
        store = open_store(site.store)
        try:
            head, _ = await ChainReader(store).head(site.run)
            return head.epoch
        finally:
            await store.close()

    return asyncio.run(read())


def test_a_run_is_launched_looked_at_launched_again_and_stopped(site: Site, out: Path) -> None:
    first = run(out, "launch.sh", "serve")
    assert first.returncode == 0, first.stderr
    assert "stop it with" in first.stderr
    health = f"http://127.0.0.1:{processes.GATEWAY_PORT}/health"
    until = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(health, timeout=5) as answer:
                assert answer.status == 200
            break
        except OSError:
            log = (state(site) / "gateway.log").read_text()
            assert time.monotonic() < until, log
            time.sleep(0.2)
    assert epoch(site) == 1
    services = {name: pid(site, name) for name in ("gateway", "compactor", "collector")}
    assert all(map(alive, services.values()))

    # Here is no sglang: the replica ends as soon as its shell comes to it.
    until = time.monotonic() + 60
    while "replica-0: ended, see" not in (shown := run(out, "launch.sh", "status").stdout):
        assert time.monotonic() < until, shown
        time.sleep(0.2)
    assert f"gateway: process {services['gateway']}" in shown
    assert "sglang" in (state(site) / "replica-0.log").read_text()

    again = run(out, "launch.sh", "serve")
    assert again.returncode == 0, again.stderr
    assert f"gateway runs already, as process {services['gateway']}" in again.stderr
    assert "run math-1 is there: it goes on" in again.stderr
    assert epoch(site) == 1, "a second claim would fence a trainer that runs"
    assert {name: pid(site, name) for name in services} == services

    gate = run(out, "launch.sh", "train", STITCH_READY_SECONDS="1")
    assert gate.returncode != 0
    assert "not 1 after 1 s" in gate.stderr
    assert not (state(site) / "train.pid").exists()

    stopped = run(out, "stop.sh")
    assert stopped.returncode == 0, stopped.stderr
    assert not any(map(alive, services.values()))
    assert list(state(site).glob("*.pid")) == []


def trainer(site: Site, out: Path, program: str) -> Path:
    """The host's directory, with a program of ours in the trainer's place."""
    settings = out / "settings.sh"
    (out / "trainer.sh").write_text(program)
    settings.write_text(settings.read_text() + f"trainer=(bash {out}/trainer.sh {state(site)})\n")
    state(site).mkdir(parents=True)
    subprocess.run(f"cp {out}/* {state(site).parent}", shell=True, check=True)
    return state(site).parent


def test_a_trainer_that_fails_is_started_again_until_it_ends_well(site: Site, out: Path) -> None:
    here = trainer(site, out, 'echo once >> "$1/starts"; (($(wc -l < "$1/starts") >= 3))\n')
    done = run(here, "train.sh", STITCH_RESTART_SECONDS="0")
    assert done.returncode == 0, done.stderr
    assert (state(site) / "starts").read_text().count("once") == 3
    assert done.stderr.count("the trainer ended with 1; start") == 2


def test_a_trainer_that_fails_always_is_given_up(site: Site, out: Path) -> None:
    here = trainer(site, out, 'echo once >> "$1/starts"; exit 7\n')
    done = run(here, "train.sh", STITCH_RESTART_SECONDS="0", STITCH_RESTARTS="2")
    assert done.returncode == 2
    assert (state(site) / "starts").read_text().count("once") == 3
    assert "the trainer failed 3 times (now with 7)" in done.stderr


def test_a_trainer_is_stopped_with_its_children_and_not_started_again(site: Site, out: Path) -> None:
    """Its children would go on holding GPUs."""
    program = 'trap "" TERM\n(trap "" TERM; sleep 600) & echo $! > "$1/child"\necho once >> "$1/starts"\n'
    here = trainer(site, out, program + 'trap "exit 5" TERM; wait\n')
    assert run(here, "local.sh", "start", "train", "train.sh").returncode == 0
    until = time.monotonic() + 30
    while not (state(site) / "starts").exists():
        assert time.monotonic() < until, (state(site) / "train.log").read_text()
        time.sleep(0.1)
    child, loop = int((state(site) / "child").read_text()), pid(site, "train")
    assert alive(child)
    assert alive(loop)
    assert run(here, "local.sh", "stop").returncode == 0
    assert not alive(loop)
    assert not alive(child)
    assert (state(site) / "starts").read_text().count("once") == 1


def test_a_process_that_only_has_the_same_id_is_let_alone(site: Site, out: Path) -> None:
    """After a reboot ids are given out again: another program's is not stopped."""
    here = trainer(site, out, "true\n")
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        (state(site) / "gateway.pid").write_text(f"{other.pid} 1\n")
        assert run(here, "local.sh", "stop").returncode == 0
        assert other.poll() is None
        assert not (state(site) / "gateway.pid").exists()
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
