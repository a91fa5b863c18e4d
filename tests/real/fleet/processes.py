"""Real processes of one fleet, and a trainer beside them: everything the tests here are made of.

The store is reached through a symbolic link, so that a test can take it away from everybody at once: a link
to nowhere is a store that is gone, a link to itself one that cannot be read, for root too.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import torch

from stitch_core.policy_publisher import PolicyPublisher
from stitch_core.safetensors import Tensor
from stitch_core.state import state_digest
from stitch_core.testing.checkpoints import table_of
from stitch_embedded.config import ModelConfig
from tests.embedded.models import config_json, nudged, random_tensors, save

# The machine may be busy with other tests; nothing here waits this long unless something is wrong.
PATIENCE = 90.0
MAX_LEN = 64
PACE = 0.03
ENGINE = {"max_len": MAX_LEN, "pace": PACE, "self_check_seconds": 0.1}


class Child:
    """One process; what it prints goes to files."""

    def __init__(self, name: str, arguments: Sequence[str], directory: Path) -> None:
        self.name = name
        # A name may start more than once: each time has files of its own.
        number = len(list(directory.glob(f"{name}.*.out")))
        self._out, self._err = (directory / f"{name}.{number}.{kind}" for kind in ("out", "err"))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
        }
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
            )

    def stdout(self) -> str:
        return self._out.read_text(encoding="utf-8")

    def stderr(self) -> str:
        return self._err.read_text(encoding="utf-8")

    async def announced(self) -> dict[str, Any]:
        """The JSON line that it prints once it listens."""
        await until(lambda: "\n" in self.stdout() or self.process.poll() is not None, f"{self.name} listens")
        assert "\n" in self.stdout(), f"{self.name} ended with {self.process.poll()}: {self.stderr()}"
        line: dict[str, Any] = json.loads(self.stdout().partition("\n")[0])
        return line

    async def url(self) -> str:
        """Where it listens."""
        line = await self.announced()
        return str(line["url"]) if "url" in line else f"http://127.0.0.1:{line['port']}"

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ended(self, patience: float = PATIENCE) -> int:
        """Its exit code."""
        await until(lambda: self.process.poll() is not None, f"{self.name} ends", patience)
        assert self.process.returncode is not None
        return self.process.returncode

    def kill(self) -> None:
        """Whatever state it is in."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Fleet:
    """A store, a boot checkpoint, and the processes around them. Close it in the end."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = root / "store"
        self.boot = root / "boot"
        self.children: list[Child] = []
        self.trainers: list[Trainer] = []
        self.kv_modes: dict[str, str] = {}
        (root / "real-store").mkdir()
        self.store.symlink_to(root / "real-store")
        self.raw = config_json()
        self.config = ModelConfig.from_dict(self.raw)
        self.tensors = random_tensors(self.config, seed=1)
        save(self.boot, self.raw, self.tensors)

    @property
    def store_url(self) -> str:
        return f"file:{self.store}"

    def point_store(self, target: Path) -> None:
        """Put another target under the store's path, in one step."""
        link = self.root / "link"
        link.symlink_to(target)
        link.rename(self.store)

    def spawn(self, name: str, *arguments: str) -> Child:
        child = Child(name, arguments, self.root)
        self.children.append(child)
        return child

    def cli(self, name: str, *arguments: str) -> Child:
        return self.spawn(name, "-m", "stitch_core.cli", *arguments)

    def replica(
        self, name: str, *options: str, kv_mode: str = "in_place", base: Path | None = None, **engine: object
    ) -> Child:
        """A replica that keeps its host directory from one start to the next."""
        self.kv_modes[name] = kv_mode
        if "--engine" not in options:
            options += tuple(f"--engine-opt={key}={value}" for key, value in (ENGINE | engine).items())
        return self.cli(
            name, "replica", "--store", self.store_url, "--base", str(base or self.boot), "--id", name,
            "--host-dir", str(self.root / f"host-{name}"), "--kv-mode", kv_mode, "--json",
            *with_defaults(options),
        )  # fmt: skip

    def engine(
        self,
        port: int = 0,
        *options: str,
        model: Path | None = None,
        program: Sequence[str] = ("-m", "stitch_embedded"),
    ) -> Child:
        """A bare engine, to put a sidecar before."""
        return self.spawn(
            "engine", *program, "--model", str(model or self.boot), "--port", str(port),
            "--max-len", str(MAX_LEN), "--pace", str(PACE), *options,
        )  # fmt: skip

    def gateway(self, port: int = 0, hold: float = 30.0) -> Child:
        return self.cli(
            "gateway",
            "gateway",
            "--store",
            self.store_url,
            "--port",
            str(port),
            "--hold",
            str(hold),
            "--json",
        )

    def trainer(self, run: str, seed: int = 0) -> Trainer:
        """Claims the run."""
        self.trainers.append(Trainer(self, run, seed))
        return self.trainers[-1]

    def close(self) -> None:
        for child in self.children:
            child.kill()
        for trainer in self.trainers:
            trainer.close()


def with_defaults(options: Sequence[str]) -> list[str]:
    """A free port, and looks at the store that fit tests of seconds."""
    defaults = {"--port": "0", "--poll": "0.3"}
    given = list(options)
    for name, value in defaults.items():
        if name not in given:
            given += [name, value]
    return given


class Trainer:
    """Publishes a policy that moves a little every time, by hand or on a thread of its own."""

    def __init__(self, fleet: Fleet, run: str, seed: int = 0) -> None:
        self.run = run
        self._publisher = PolicyPublisher.start(
            fleet.store_url, run, fleet.boot, fleet.root / f"deltas-{run}", producer={"test": "fleet"}
        )
        self._tensors, self._config = fleet.tensors, fleet.config
        self.state = ""  # of the last version that it published
        self._seeds = random.Random(seed)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def head(self) -> int:
        return self._publisher.head

    def step(self, *, changes: bool = True, seed: int | None = None) -> None:
        """One more version, published when this returns; with ``seed`` one of altogether other weights."""
        if seed is not None:
            self._tensors = random_tensors(self._config, seed)
        elif changes:
            self._tensors = nudged(self._tensors, self._seeds.randrange(2**31))
        tensors = {
            name: Tensor("BF16", tuple(t.shape), t.view(torch.uint8).numpy().data)
            for name, t in self._tensors.items()
        }
        self.state = state_digest(table_of(tensors))
        self._publisher.publish(tensors).result(PATIENCE)

    def start(self, every: float = 0.4) -> None:
        """Publish until ``stop``."""
        assert self._thread is None
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, args=(every,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Raises what publishing raised."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        try:
            self.stop()
        finally:
            self._publisher.close()

    def _run(self, every: float) -> None:
        try:
            while not self._stop.wait(every):
                self.step()
        except BaseException as error:
            self._failure = error


async def until(true: Callable[[], Any], what: str, patience: float = PATIENCE) -> None:
    """Wait until ``true()``."""
    end = time.monotonic() + patience
    while not true():
        assert time.monotonic() < end, f"not in {patience:g} s: {what}"
        await asyncio.sleep(0.05)


async def get(url: str, path: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON of a GET; status 0 if nobody answers."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
            session.get(url + path) as answer,
        ):
            value: dict[str, Any] = json.loads(await answer.read())
            return answer.status, value
    except (aiohttp.ClientError, TimeoutError, OSError):
        return 0, {}


async def ready(url: str, enough: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any]:
    """Wait until ``/ready`` says yes and ``enough`` does; what it said."""
    end = time.monotonic() + PATIENCE
    while True:
        status, said = await get(url, "/ready")
        if status == 200 and enough(said):
            return said
        assert time.monotonic() < end, f"{url} is not there yet: {said}"
        await asyncio.sleep(0.05)


async def caught_up(url: str, trainer: Trainer) -> dict[str, Any]:
    """Wait until a replica serves the version that is the trainer's newest now, or a later one."""
    head = trainer.head
    return await ready(url, lambda said: said["run"] == trainer.run and said["applied"] >= head)
