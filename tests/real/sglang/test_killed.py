"""kill -9 of a whole stock SGLang server that follows a run: what it had in RAM goes with the next start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stitch_core.scratch import TMPFS
from stitch_sglang.server import Scratch

from .world import World

pytestmark = pytest.mark.real


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    try:
        world.start(host_dir="", destination="disk")  # which is none: a temporary one
        yield world
    finally:
        world.close()


async def test_a_killed_server_left_its_host_checkpoint_in_ram_for_good(world: World) -> None:
    await world.server.until_ready()
    await world.serves(world.publish(1))
    said = "stitch: the host checkpoint is in "
    (line,) = [line for line in world.server.log.read_text().splitlines() if said in line]
    host = Path(line.partition(said)[2].split()[0].strip('",'))
    assert TMPFS in host.parents
    assert list(host.glob("data-*/*.safetensors"))
    world.server.stop()  # from now on whatever starts here may remove it, another test's process too
    following = Scratch(None, world.boot)
    assert not host.parent.exists()
    assert following.path != host
    following.close()
    assert not following.path.parent.exists()
