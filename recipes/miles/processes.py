"""The processes of one run: a gateway that is one engine to Miles, replicas, and the trainer with its Ray."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from recipes.local.sglang_server import CPU_ARGUMENTS, free_port
from recipes.local.sglang_server import environment as sglang_environment

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = [ROOT / "plugins" / name for name in ("gateway", "embedded", "miles", "slime")]
PATIENCE = 420.0


class Child:
    """One process in a session of its own, so that all that it starts can be ended with it."""

    def __init__(
        self, name: str, arguments: list[str], root: Path, environment: Mapping[str, str],
        python: Path | str = sys.executable, address: str | None = None,
    ) -> None:  # fmt: skip
        """``address``: its URL, where it prints none."""
        self.name, self.log = name, root / f"{name}-{time.monotonic_ns()}.log"
        self._address = address
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [python, "-W", "ignore", *arguments], stdout=log, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, env=environment, start_new_session=True,
            )  # fmt: skip

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, found: Callable[[str], bool], what: str, patience: float = PATIENCE) -> str:
        """Its output, once ``found`` holds of it."""
        deadline = time.monotonic() + patience
        while not found(text := self.text()):
            assert self.process.poll() is None, f"{self.name} ended before {what}:\n{text[-6000:]}"
            assert time.monotonic() < deadline, f"{self.name}: no {what} in {patience:g} s:\n{text[-6000:]}"
            time.sleep(0.1)
        return text

    def url(self) -> str:
        """Where it listens, from the JSON line that it prints."""
        if self._address is not None:
            return self._address
        text = self.until(lambda text: '"url"' in text and "\n" in text, "address", 120.0)
        line = next(line for line in text.splitlines() if '"url"' in line)
        return str(json.loads(line)["url"])

    def until_ready(self, patience: float = PATIENCE) -> None:
        """Returns once it serves a version."""

        def ready(_: str) -> bool:
            try:
                with urllib.request.urlopen(f"{self.url()}/ready", timeout=2) as response:
                    return bool(response.status == 200)
            except OSError:
                return False

        self.until(ready, "a version to serve", patience)

    def wait(self, patience: float = PATIENCE) -> int:
        return self.process.wait(patience)

    def kill(self) -> None:
        """SIGKILL for the process and everything in its session."""
        for pid in session(self.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def session(leader: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            # pid (name) state ppid pgrp session; a name may hold blanks and brackets.
            if int(stat.rpartition(")")[2].split()[3]) == leader:
                members.append(int(entry.name))
    return members


class World:
    """A store, a boot checkpoint and prompts under ``root``; close it in the end."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # Of its own, since Ray's sockets lie below and a socket's path holds hardly more than 100 bytes.
        self.ray = tempfile.mkdtemp(prefix="ray-")
        self.children: list[Child] = []
        subprocess.run(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name("policy.py")), str(root)],
            check=True, capture_output=True,
        )  # fmt: skip
        self.settings(**self.required)

    @property
    def store(self) -> str:
        return f"file:{self.root}/store"

    @property
    def required(self) -> dict[str, object]:
        """Settings of every run here."""
        return {
            "stitch_run": "math", "stitch_store": self.store, "stitch_work": f"{self.root}/work",
            "stitch_channel": "latest",
        }  # fmt: skip

    def settings(self, **values: object) -> None:
        """Write the YAML that the trainer reads."""
        (self.root / "stitch.yaml").write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in values.items()))

    def start(self, name: str, *arguments: str) -> Child:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *PLUGINS])), "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "RAY_AUTH_MODE": "disabled", "RAY_DIRECTORY": self.ray,
        }  # fmt: skip
        return self._keep(Child(name, list(arguments), self.root, environment))

    def _keep(self, child: Child) -> Child:
        self.children.append(child)
        return child

    def gateway(self, base_gpu: int = 1) -> Child:
        """Miles expects engines on the GPUs behind its trainer's; with stitch_miles.launch, from 0 on."""
        return self.start(
            "gateway", "-m", "stitch_core.cli", "gateway", "--store", self.store, "--run", "math", "--facade",
            "--engine", f"base_gpu_id={base_gpu}", "--port", "0", "--json", "--leave", "0",
        )  # fmt: skip

    def replica(
        self, name: str, *options: str, kv_mode: str = "in_place", program: str = "stitch_core.cli"
    ) -> Child:
        return self.start(
            name, "-m", program, "replica", "--store", self.store, "--base", f"{self.root}/boot",
            "--port", "0", "--poll", "0.5", "--host-dir", f"{self.root}/host-{name}", "--id", name,
            "--kv-mode", kv_mode, "--json", *options,
        )  # fmt: skip

    def sglang(
        self, name: str, python: Path, *options: str, kv_mode: str = "in_place",
        program: str = "sglang.launch_server",
    ) -> Child:  # fmt: skip
        """A stock SGLang server that follows the store; ``python`` is of an environment with its wheel."""
        port = free_port()
        stitch = {
            "store": self.store, "id": name, "kv_mode": kv_mode, "poll": "0.5", "drain": "5",
            "host_dir": f"{self.root}/host-{name}",
        }  # fmt: skip
        variables = {f"STITCH_{key.upper()}": value for key, value in stitch.items()}
        environment = sglang_environment(self.root, variables) | {"OMP_NUM_THREADS": "1"}
        arguments = ["-m", program, "--model-path", f"{self.root}/boot", "--port", str(port)]
        address = f"http://127.0.0.1:{port}"
        child = Child(name, [*arguments, *CPU_ARGUMENTS, *options], self.root, environment, python, address)
        return self._keep(child)

    def trainer(self, gateway: Child, rollouts: int, *flags: str) -> Child:
        port = gateway.url().rpartition(":")[2]
        driver = Path(__file__).with_name("driver.py")
        return self.start("trainer", str(driver), str(self.root), port, str(rollouts), *flags)

    def close(self) -> None:
        for child in self.children:
            child.kill()
        shutil.rmtree(self.ray, ignore_errors=True)
