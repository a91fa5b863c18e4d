"""Miles' session server in front of the gateway and a stock SGLang server, from STITCH_MILES' checkout.

What the session server asks of an engine only SGLang's own code can answer: a chat of token ids, with
log-probabilities and meta_info. Versions are published here; there is no trainer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.miles.processes import ROOT, World
from stitch_core.checkpoint import Checkpoint
from stitch_core.files import PosixFiles
from stitch_core.policy_publisher import PolicyPublisher
from stitch_core.safetensors import Tensor
from tests.real.miles.agents import gateway, template

pytestmark = pytest.mark.real
CHECKOUT = os.environ.get("STITCH_MILES", "")
SGLANG = Path(
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "venv.py"), "path", "sglang"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()
) / "bin" / "python"  # fmt: skip
if not CHECKOUT:
    pytest.skip("platform: no checkout of Miles, set STITCH_MILES to one", allow_module_level=True)
if not SGLANG.exists():
    pytest.skip("platform: no environment of SGLang, `make venv-sglang` makes it", allow_module_level=True)


def moved(tensor: Tensor) -> Tensor:
    """Every tenth element's last bit flipped; that makes no infinity and no NaN."""
    bits = np.frombuffer(tensor.data, np.uint16).copy()
    bits[::10] ^= 1
    return tensor._replace(data=bits.tobytes())


class Sessions:
    """The driver, which makes a group of samples for each line."""

    def __init__(self, world: World, port: str) -> None:
        self.log = world.root / "sessions.log"
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name("session_driver.py")),
             str(world.root), port, CHECKOUT],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("wb"), text=True,
            env=environment,
        )  # fmt: skip

    def group(self) -> list[dict[str, Any]]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.made()

    def made(self) -> list[dict[str, Any]]:
        assert self.process.stdout is not None
        samples = []
        for line in self.process.stdout:
            said = json.loads(line) if line.startswith('{"') else {}
            if "done" in said:
                return samples
            if "sample" in said:
                samples.append(said["sample"])
        raise AssertionError(self.log.read_text()[-6000:])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    template(world)
    try:
        yield world
    finally:
        world.close()


def test_each_turn_of_an_agent_says_which_versions_made_it(world: World) -> None:
    found = Checkpoint.open(world.root / "boot", PosixFiles())
    tensors = {name: Tensor(ref.dtype, ref.shape, found.read(name)) for name, ref in found.tensors.items()}
    with PolicyPublisher.start(world.store, "math", world.root / "boot", world.root / "work") as publisher:
        set_channel(world)
        child = gateway(world)
        replica = world.sglang("a", SGLANG)
        replica.until_ready()
        sessions = Sessions(world, child.url().rpartition(":")[2])
        try:
            served = []
            for version in (1, 2):
                served.append((version - 1, sessions.group()))
                tensors = {name: moved(tensor) for name, tensor in tensors.items()}
                publisher.publish(tensors, step=version)
                publisher.flush()
                until_served(replica.url(), version)
            served.append((2, sessions.group()))
        finally:
            sessions.close()
    turns = []
    for version, samples in served:
        assert len(samples) == 4
        for sample in samples:
            reports = sample["metadata"]["stitch"]
            assert [report["source"] for report in reports] == ["session"] * len(reports)
            assert {(r["run"], r["start"], r["end"]) for r in reports} == {("math", version, version)}
            assert set(sample["weight_versions"]) == {str(version)}
            assert sum(report["spans"][-1]["end"] for report in reports) == sum(sample["loss_mask"])
            turns.append(len(reports))
    assert max(turns) == 2


def set_channel(world: World) -> None:
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "stitch_core.cli", "channel", "set", "latest", "math",
         "--store", world.store],
        check=True, capture_output=True, cwd=ROOT,
    )  # fmt: skip


def until_served(url: str, version: int) -> None:
    import urllib.request

    deadline = time.monotonic() + 120
    while True:
        with urllib.request.urlopen(f"{url}/server_info", timeout=10) as response:
            if json.load(response)["weight_version"] == str(version):
                return
        assert time.monotonic() < deadline, f"version {version} is not served in 120 s"
        time.sleep(0.3)
