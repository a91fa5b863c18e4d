"""What every demo does around its training: prepare the run, find scratch space, end in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from . import grpo
from .policy import Policy, write_checkpoint
from .report import WarmUp
from .settings import Settings

T = TypeVar("T")

TMPFS, TMPFS_BYTES = Path("/dev/shm"), 256 << 20


def prepare(settings: Settings) -> tuple[Policy, WarmUp]:
    """The policy as training begins, and version 0 of the run on disk."""
    began = time.monotonic()
    policy = Policy(settings.seed)
    loss = grpo.warm_up(policy, settings.seed)
    write_checkpoint(settings.boot, policy.rollout_weights())
    run = {
        "store": settings.store.name,
        "run": settings.run,
        "boot": settings.boot.name,
        "max_len": settings.max_len,
        "settings": settings.to_json(),
    }
    (settings.out / "run.json").write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
    return policy, WarmUp(grpo.WARMUP_STEPS, time.monotonic() - began, loss)


def scratch_directory(out: Path) -> Path:
    """Where host checkpoints live: in RAM where there is room."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(TMPFS).free >= TMPFS_BYTES:
            return Path(tempfile.mkdtemp(prefix="stitch-demo-", dir=TMPFS))
    (out / "scratch").mkdir()
    return out / "scratch"


async def beside(work: Awaitable[T], *background: Coroutine[Any, Any, None]) -> T:
    """The result of ``work``, with ``background`` running until then. Raises what fails first."""
    first = asyncio.ensure_future(work)
    others = [asyncio.create_task(one) for one in background]
    try:
        done, _ = await asyncio.wait([first, *others], return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()
        return await first
    finally:
        for one in (first, *others):
            one.cancel()
        await asyncio.gather(first, *others, return_exceptions=True)


async def until_sigterm(work: Awaitable[T]) -> T:
    """SIGTERM ends it as Ctrl-C does, with everything put away."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work
