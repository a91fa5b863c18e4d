"""What the tests of the main branches share: one run of a checkout, and a proof of what it published."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from recipes.miles.processes import Child, World
from stitch_core.manifest import Manifest
from stitch_core.stores.local import LocalStore
from stitch_core.versions import directory_name
from tests.real.miles.wire import decode, read_checkpoint, trained
from tests.rebuild import rebuilt
from tests.small_run import chain_of

DRIVER = str(Path(__file__).with_name("checkout_driver.py"))


def chain(world: World) -> list[Manifest]:
    return asyncio.run(chain_of(LocalStore(world.root / "store"), "math"))


def start(world: World, checkout: str, port: str, rollouts: int, *flags: str) -> Child:
    return world.start("trainer", DRIVER, str(world.root), port, str(rollouts), checkout, *flags)


def train(world: World, checkout: str, port: str, rollouts: int, *flags: str) -> None:
    child = start(world, checkout, port, rollouts, *flags)
    assert child.wait() == 0, child.text()[-6000:]


def keep_files(world: World) -> None:
    """Leave each version where the framework wrote it."""
    world.settings(
        stitch_run="math",
        stitch_store=world.store,
        stitch_work=f"{world.root}/work",
        stitch_channel="latest",
        stitch_keep_files=True,
    )


def prove(world: World, versions: Sequence[Manifest], encoding: str) -> None:
    """What the framework wrote, what a replica makes of it and what Megatron had are the same bytes.

    ``versions`` follow each other in one process of the trainer, whose base is the boot checkpoint.
    """
    tensors = read_checkpoint(world.root / "boot")
    for manifest in versions:
        written, tensors = decode(world.root / "updates" / directory_name(manifest.number), tensors)
        assert written == manifest.representation.encoding == encoding
        assert rebuilt(world.root, manifest) == tensors
        if manifest.step is not None:
            assert trained(world.root / "ckpt", manifest.step) == tensors
