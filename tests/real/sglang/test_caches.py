"""C63: a model that computes with copies of its weights, which its first forward pass made, on stock SGLang.

Two replicas of one run, one by each destination. What Stitch can see is made anew of each version; the rest
is found by `stitch profile`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.local.sglang_server import environment
from stitch_core.cli.main import main
from stitch_core.profile_record import NAME

from .server import SGLangServer
from .world import RUN, World

pytestmark = pytest.mark.real

PROMPTS = ([40, 41, 42, 43], [33 + i % 90 for i in range(300)], [9])


class Caching(World):
    """``by_disk``: the other replica. ``pointer``: the file that lets the model keep what nobody can see."""

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        self.variables = {
            "SGLANG_EXTERNAL_MODEL_PACKAGE": "tests.real.sglang.caching_models",
            "CACHES": str(scratch),
        }
        self.pointer = scratch / "by_pointer"
        given = {
            "STITCH_STORE": self.url, "STITCH_RUN": RUN, "STITCH_ID": "by-disk", "STITCH_POLL": "0.2",
            "STITCH_HOST_DIR": str(scratch / "other"), "STITCH_DESTINATION": "disk", **self.variables,
        }  # fmt: skip
        self.by_disk = SGLangServer(self.boot, scratch, given)
        self.start(environment=self.variables, destination="cpu")

    def close(self) -> None:
        self.by_disk.stop()
        super().close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caching]:
    world = Caching(tmp_path_factory.mktemp("world"))
    try:
        asyncio.run(world.by_disk.until_ready())
        asyncio.run(world.server.until_ready())
        yield world
    finally:
        world.close()


async def profiled(world: Caching, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Exit code and row of a profile of the replica that copies from memory."""
    capsys.readouterr()
    arguments = [
        "profile", "--server", world.server.url, "--store", world.url, "--run", RUN, "--json", "--perturb",
        "--base", str(world.boot), "--record", str(world.boot / NAME), "--start-reference", "sglang",
        "--work", str(world.scratch / "profile"), "--idle", "0", "--load", "1", "--load-tokens", "8",
        "--tokens", "12", "--patience", "120",
    ]  # fmt: skip
    code = await asyncio.to_thread(main, arguments)
    said = capsys.readouterr()
    assert said.out, said.err
    return code, json.loads(said.out)


async def answers(server: SGLangServer) -> list[Any]:
    found = [await server.generate(prompt, new=12, return_logprob=True) for prompt in PROMPTS]
    return [(one["output_ids"], one["meta_info"]["output_token_logprobs"]) for one in found]


async def about(server: SGLangServer) -> Any:
    return (await server.call("GET", "/stitch/status"))[1]["profile"]


async def test_what_can_be_seen_is_made_anew_of_each_version(
    world: Caching, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By both destinations, as a server answers that booted from the version."""
    for name, value in environment(world.scratch, world.variables).items():
        monkeypatch.setenv(name, value)
    assert (await about(world.server))["profiled"] is None
    before = await answers(world.by_disk)
    code, row = await profiled(world, capsys)
    assert code == 0, row["checks"]
    assert row["path"] == "cpu"
    assert row["checks"][-1]["what"] == "after: equal to a fresh server"
    number = int(row["version"].rpartition("_v")[2])
    await world.status_until(lambda status: status["applied"] == number, server=world.by_disk)
    after = await answers(world.server)
    assert await answers(world.by_disk) == after != before
    said = await about(world.server)
    assert said["profiled"] is True
    info = (await world.server.call("GET", "/server_info"))[1]["stitch"]["profile"]
    assert info == {"profiled": True, "why": said["why"]}
    assert (await about(world.by_disk))["profiled"] is None, "it is of other flags"
    assert "model.layers.0.mlp.gate_up_proj._wide" in world.server.log.read_text()


async def test_what_cannot_be_seen_is_found_by_stitch_profile(
    world: Caching, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(world.scratch, world.variables).items():
        monkeypatch.setenv(name, value)
    world.pointer.touch()
    code, row = await profiled(world, capsys)
    assert code == 1
    assert [one["what"] for one in row["checks"] if not one["ok"]] == ["after: equal to a fresh server"]
    said = await about(world.server)
    assert said["profiled"] is False
    assert "after: equal to a fresh server" in said["why"]
