"""The fleet of the demo on real SGLang: the same processes and the same life, other replicas."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .fleet import DRAIN_SECONDS, Child, Fleet
from .sglang_server import CPU_ARGUMENTS, environment, free_port

START_SECONDS = 300.0
LAUNCH = ("-m", "sglang.launch_server")


@dataclass
class SGLangFleet(Fleet):
    """``python``: of an environment with the stock wheel. One server at a time is started."""

    python: Path = Path("python")
    start_seconds: float = START_SECONDS

    async def start_named(
        self, name: str, kv_mode: str, *, program: Sequence[str] = LAUNCH, engine: str = "sglang"
    ) -> str:
        """The URL of a replica that serves the run; ``program`` may be a faulty one's."""
        self.kv_modes[name] = kv_mode
        port, log = free_port(), self.logs / f"{name}.log"
        url = f"http://127.0.0.1:{port}"
        stitch = {
            "store": self.settings.store_url, "run": self.settings.run, "id": name, "kv_mode": kv_mode,
            "host_dir": os.fspath(self.scratch / name), "poll": str(self.settings.poll),
            "drain": str(DRAIN_SECONDS),
        }  # fmt: skip
        variables = {f"STITCH_{key.upper()}": value for key, value in stitch.items()}
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                self.python, "-W", "ignore", *program, "--model-path", os.fspath(self.settings.boot),
                "--port", str(port), *CPU_ARGUMENTS, *self.settings.engine_arguments(),
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                env={**environment(self.scratch, variables), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        child = Child(name, process, url, log, kv_mode)
        self._adopt(child)
        self.replicas[name] = child
        await self._until_ready(child)
        return url
