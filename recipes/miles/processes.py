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
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = [ROOT / "plugins" / name for name in ("gateway", "embedded", "miles", "slime")]
PATIENCE = 420.0


class Child:
    """One process in a session of its own, so that all that it starts can be ended with it."""

    def __init__(self, name: str, arguments: list[str], root: Path, **variables: str) -> None:
        self.name, self.log = name, root / f"{name}-{time.monotonic_ns()}.log"
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *PLUGINS])), "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "RAY_AUTH_MODE": "disabled", **variables,
        }  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", *arguments], stdout=log, stderr=subprocess.STDOUT,
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
        text = self.until(lambda text: '"url"' in text and "\n" in text, "address", 120.0)
        line = next(line for line in text.splitlines() if '"url"' in line)
        return str(json.loads(line)["url"])

    def wait(self, patience: float = PATIENCE) -> int:
        return self.process.wait(patience)

    def kill(self) -> None:
        """SIGKILL for the process and everything in its session."""
        for pid in _session(self.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def _session(leader: int) -> list[int]:
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
        self.settings(stitch_run="math", stitch_store=self.store, stitch_work=f"{root}/work",
                      stitch_channel="latest")  # fmt: skip

    @property
    def store(self) -> str:
        return f"file:{self.root}/store"

    def settings(self, **values: str) -> None:
        """Write the YAML that the trainer reads."""
        (self.root / "stitch.yaml").write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in values.items()))

    def start(self, name: str, *arguments: str) -> Child:
        child = Child(name, list(arguments), self.root, RAY_DIRECTORY=self.ray)
        self.children.append(child)
        return child

    def gateway(self, trainer_gpus: int = 1) -> Child:
        """Miles expects its engines on the GPUs behind those of its trainer."""
        return self.start(
            "gateway", "-m", "stitch_core.cli", "gateway", "--store", self.store, "--run", "math", "--facade",
            "--engine", f"base_gpu_id={trainer_gpus}", "--port", "0", "--json",
        )  # fmt: skip

    def replica(self, name: str, *options: str, kv_mode: str = "in_place") -> Child:
        return self.start(
            name, "-m", "stitch_core.cli", "replica", "--store", self.store, "--base", f"{self.root}/boot",
            "--port", "0", "--poll", "0.5", "--host-dir", f"{self.root}/host-{name}", "--id", name,
            "--kv-mode", kv_mode, "--json", *options,
        )  # fmt: skip

    def trainer(self, gateway: Child, rollouts: int, *flags: str) -> Child:
        port = gateway.url().rpartition(":")[2]
        driver = Path(__file__).with_name("driver.py")
        return self.start("trainer", str(driver), str(self.root), port, str(rollouts), *flags)

    def close(self) -> None:
        for child in self.children:
            child.kill()
        shutil.rmtree(self.ray, ignore_errors=True)
