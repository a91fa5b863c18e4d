"""What cannot work says so in one clear line; what only has to wait waits, and says for what."""

from __future__ import annotations

import asyncio
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.embedded.models import random_tensors, save

from .processes import MAX_LEN, PATIENCE, Child, Fleet, caught_up, get
from .traffic import Traffic, proven

pytestmark = pytest.mark.real

RUN = "startup"


@pytest.fixture
def fleet(tmp_path: Path) -> Any:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


async def refused(child: Child, *words: str) -> None:
    """It ended, and one line says why."""
    assert await child.ended() in (1, 2), child.stderr()
    lines = child.stderr().strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("stitch "), lines
    for word in words:
        assert word in lines[0], lines
    assert not child.stdout()


async def test_a_port_in_use(fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        replica = fleet.replica("r", "--run", RUN, "--port", port)
        gateway = fleet.gateway(int(port))
        await refused(replica, "stitch replica:", f"port {port}", "in use")
        await refused(gateway, "stitch gateway:", f"port {port}", "in use")


async def test_what_was_given_is_wrong(fleet: Fleet) -> None:
    store = ("--store", fleet.store_url)
    none, empty, torn = (fleet.root / name for name in ("none", "empty", "torn"))
    empty.mkdir()
    shutil.copytree(fleet.boot, torn)
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    cases = [
        (fleet.replica("run", "--run", "../etc"), ("run id", "../etc")),
        (fleet.replica("option", "--run", RUN, pase=1), ("pase",)),
        (fleet.replica("none", "--run", RUN, base=none), ("none", "no such directory")),
        (fleet.replica("empty", "--run", RUN, base=empty), ("empty", "config.json")),
        (fleet.replica("torn", "--run", RUN, base=torn), ("torn: unreadable checkpoint",)),
        (fleet.cli("scheme", "gateway", "--store", "ftp:x", "--port", "0"), ("ftp",)),
        (fleet.cli("claim", "claim", *store, "--run", RUN, "--base", str(none)), ("none",)),
        (fleet.cli("status", "status", *store, "--run", "no-such"), ("no-such",)),
    ]
    for child, words in cases:
        await refused(child, *words)


async def test_a_base_that_is_not_version_0(fleet: Fleet) -> None:
    """Nothing that it could serve would be right: it ends, and names both."""
    fleet.trainer(RUN)
    other = fleet.root / "other"
    save(other, fleet.raw, random_tensors(fleet.config, seed=2))
    replica = fleet.replica("r", "--run", RUN, base=other)
    assert await replica.ended() in (1, 2)
    lines = replica.stderr().strip().splitlines()
    assert len(lines) == 1, lines
    assert f"{other} is not version 0 of run {RUN}" in lines[0]


# As `stitch`, on a machine where somebody puts another checkpoint in the place of the one that was loaded.
EXCHANGED = """
import sys
from pathlib import Path
from stitch_embedded.engine import EmbeddedEngine

boot, right = map(Path, sys.argv[1:3])
load = EmbeddedEngine.__init__

def load_and_exchange(self, *arguments):
    load(self, *arguments)
    boot.rename(boot.with_name("loaded"))
    right.rename(boot)

EmbeddedEngine.__init__ = load_and_exchange
del sys.argv[1:3]
from stitch_core.cli.__main__ import entry
sys.exit(entry())
"""


async def test_c77_a_boot_checkpoint_that_changes_after_it_was_loaded(fleet: Fleet) -> None:
    """It is version 0 when it is hashed, and was not when the engine loaded it: no answer is of that."""
    trainer = fleet.trainer(RUN)
    right = fleet.root / "right"
    fleet.boot.rename(right)
    save(fleet.boot, fleet.raw, random_tensors(fleet.config, seed=2))
    fleet.kv_modes["r"] = "in_place"
    replica = fleet.spawn(
        "r", "-c", EXCHANGED, str(fleet.boot), str(right), "replica", "--store", fleet.store_url,
        "--run", RUN, "--base", str(fleet.boot), "--id", "r", "--host-dir", str(fleet.root / "host"),
        "--port", "0", "--poll", "0.3", f"--engine-opt=max_len={MAX_LEN}",
        "--engine-opt=self_check_seconds=0.1", "--json",
    )  # fmt: skip
    url = await replica.url()
    assert (await caught_up(url, trainer))["applied"] == 0
    async with Traffic(url, lambda _: {"run": RUN}, clients=2) as traffic:
        await traffic.more(5)
        trainer.step()  # the proof wants another version to be found out
        await caught_up(url, trainer)
        await traffic.more(5)
    assert not right.exists()
    await proven(fleet, RUN, traffic.outcomes)


async def test_a_store_that_is_not_there_yet_is_waited_for(fleet: Fleet) -> None:
    """``/ready`` says what is missing, at each stage; nobody has to start anything again."""
    fleet.point_store(fleet.root / "mounted later")
    replica = fleet.replica("r", "--run", RUN)
    url = await replica.url()
    await told(url, RUN)
    fleet.point_store(fleet.store)
    await told(url, "Too many levels")
    fleet.point_store(fleet.root / "real-store")
    await told(url, f"run {RUN}")
    trainer = fleet.trainer(RUN)
    await caught_up(url, trainer)


async def told(url: str, words: str) -> None:
    """Wait until ``/ready`` is 503 with these words, while ``/health`` is well."""
    end = asyncio.get_running_loop().time() + PATIENCE
    said: dict[str, Any] = {}
    while words not in str(said.get("why_not_ready")):
        assert asyncio.get_running_loop().time() < end, said
        await asyncio.sleep(0.05)
        status, said = await get(url, "/ready")
        assert status == 503
        assert (await get(url, "/health"))[0] == 200
