"""Publishing made-up versions to a store; as a process, one that kills itself at a chosen request.

python publishing.py URL RUN DIRECTORY EVENT COUNT
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

from stitch_core.chain import ChainReader
from stitch_core.files import PosixFiles
from stitch_core.manifest import Manifest
from stitch_core.payload import Boot, Payload
from stitch_core.ports import Store, SystemClock
from stitch_core.publisher import Publisher
from stitch_core.retry import Retry
from stitch_core.stores.transfer import verify


def state(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


BOOT = Boot("boot", state("boot"))
LARGE = 17 * 2**20
"""Bytes that an S3 store sends in parts."""


def publisher(store: Store, run: str, *, retry: Retry | None = None, deadline: float = 60.0) -> Publisher:
    return Publisher(
        store, run, files=PosixFiles(), clock=SystemClock(), rng=random.Random(),
        nonce=lambda: secrets.token_hex(16), run_blocking=asyncio.to_thread, retry=retry or Retry(),
        swap_deadline=deadline,
    )  # fmt: skip


def payload(
    directory: Path, publisher: Publisher, text: str, *, full: bool, sizes: tuple[int, ...]
) -> Payload:
    """New files that say ``text``, as a version of any kind; nothing here decodes them."""
    directory = directory / secrets.token_hex(4)
    directory.mkdir(parents=True)
    names = []
    for number, size in enumerate(sizes):
        names.append(f"part-{number}")
        (directory / names[-1]).write_bytes(random.Random(f"{text} {number}").randbytes(size))
    if full:
        return Payload("full", state(text), directory, tuple(names))
    changed = {"w": ("0" * 32, "1" * 32)}
    return Payload("delta", state(text), directory, tuple(names), publisher.head.state, "xor", changed)


async def check_whole(store: Store, run: str, lowest: int = 0) -> list[Manifest]:
    """The chain from the head down, every payload object from version ``lowest`` on compared."""
    chain = ChainReader(store)
    head, _ = await chain.head(run)
    newest = await chain.manifest(run, head)
    manifests = await chain.back_to(newest, above_floor=False)
    for manifest in manifests:
        for file in manifest.representation.files if manifest.number >= lowest else ():
            await verify(store, manifest.file_key(file.name), file.size, file.sha256)
    return manifests


async def publish_for_ever(store: Any, run: str, directory: Path, event: str, count: int) -> None:
    """Claim, say what is there, publish; print each number that was acknowledged. Dies at a request."""
    seen = 0

    def die(**_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen >= count:
            os.kill(os.getpid(), signal.SIGKILL)

    writer = publisher(store, run)
    await writer.claim(BOOT)
    store._client.meta.events.register(f"{event}.s3", die)
    while True:
        made = payload(directory, writer, secrets.token_hex(8), full=False, sizes=(1000, LARGE))
        print((await writer.publish(made)).number, flush=True)


if __name__ == "__main__":
    from stitch_core.stores import open_store

    url, run, directory, event, count = sys.argv[1:]
    asyncio.run(publish_for_ever(open_store(url), run, Path(directory), event, int(count)))
