"""A version as a replica on a fresh host makes it: from the boot checkpoint and the store alone."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

from stitch_core.chain import ChainReader
from stitch_core.checkpoint import Checkpoint
from stitch_core.host_checkpoint import HostCheckpoint
from stitch_core.manifest import Manifest
from stitch_core.ports import SystemClock
from stitch_core.replica.staging import Stager
from stitch_core.stores.local import LocalStore
from tests.small_run import FILES, inline


def rebuilt(root: Path, manifest: Manifest) -> dict[str, bytes]:
    """``root`` has the ``store`` and the ``boot`` checkpoint; the host's copy is gone again in the end."""
    store, directory = LocalStore(root / "store"), root / f"rebuilt-{manifest.number}"
    host = HostCheckpoint(directory, FILES)
    stager = Stager(
        store, ChainReader(store), host, root / "boot", files=FILES, clock=SystemClock(),
        rng=random.Random(0), run_blocking=inline, activity=lambda _: None,
    )  # fmt: skip
    asyncio.run(stager.stage(manifest))
    checkpoint = Checkpoint.open(host.directory, FILES)
    try:
        return {name: checkpoint.read(name) for name in checkpoint.tensors}
    finally:
        host.close()
        shutil.rmtree(directory)
