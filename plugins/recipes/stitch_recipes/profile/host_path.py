"""The way to the host checkpoint, measured with the code of a replica and nothing else to do."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import random
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stitch_core.chain import ChainReader
from stitch_core.checkpoint import Checkpoint
from stitch_core.files import PosixFiles
from stitch_core.host_checkpoint import HostCheckpoint
from stitch_core.manifest import Manifest
from stitch_core.ports import Store, SystemClock
from stitch_core.replica.child import spare_workers
from stitch_core.replica.staging import Stager

MEMCPY_BYTES = 256 << 20


@dataclass(frozen=True)
class HostPath:
    """One version brought to a host that holds the one before. Seconds and bytes.

    ``apply`` verifies, applies and hashes on ``workers`` threads, which computed ``cpu`` in sum, for fetching
    too; ``seed`` copied version 0 here at first. ``hash``: what one thread computes to read and hash it all.
    """

    fetch: float
    apply: float
    fetched: int
    canonical: int
    workers: int
    cpu: float
    seed: float
    hash: float


@contextlib.asynccontextmanager
async def staged(
    store: Store, before: Manifest, target: Manifest, boot: Path, root: Path
) -> AsyncIterator[tuple[HostPath, Path]]:
    """``target`` staged below ``root``, with what it took, and where the checkpoint lies until the end."""
    files, workers = PosixFiles(), spare_workers()
    host = HostCheckpoint(root, files, workers=workers)
    stager = Stager(
        store, ChainReader(store), host, boot, files=files, clock=SystemClock(), rng=random.Random(),
        run_blocking=asyncio.to_thread, activity=lambda _: None,
    )  # fmt: skip
    try:
        began = time.monotonic()
        await stager.stage(before)
        seed = time.monotonic() - began
        computed = time.process_time()
        done = await stager.stage(target)
        cpu = time.process_time() - computed
        hashing = await asyncio.to_thread(_hash, done.directory)
        canonical = sum(path.stat().st_size for path in done.directory.iterdir())
        yield (
            HostPath(done.fetch, done.apply, done.bytes, canonical, workers, cpu, seed, hashing),
            done.directory.resolve(),
        )
    finally:
        host.close()


def _hash(directory: Path) -> float:
    began = time.thread_time()
    Checkpoint.open(directory, PosixFiles()).table()
    return time.thread_time() - began


def memcpy_rate(nbytes: int) -> float:
    """Bytes a second of one thread's copy between buffers that are there already, the median of five."""
    size = min(nbytes, MEMCPY_BYTES)
    source, into = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        ctypes.memmove(into.ctypes.data, source.ctypes.data, size)
        times.append(time.perf_counter() - began)
    return size / statistics.median(times)
