"""A trainer's process that ends in one of several ways right after its last publish; see test_leaving.py.

Its store takes the version's files only when the interpreter is ending, so that nothing is published before
that, on however fast a machine.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from stitch_core import leaving
from stitch_core.policy_publisher import PolicyPublisher
from stitch_core.ports import WriteRefused
from stitch_core.stores.local import LocalStore
from stitch_core.trainers.group import Solo
from stitch_core.trainers.own_delta import OwnDelta
from stitch_core.trainers.publication import GroupPublisher
from stitch_core.trainers.settings import TrainerSettings
from tests.small_run import FILES, Trainer

ROOT, WAY, FAULT = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
LAST = "weight_v000002" if WAY == "group" else "weight_v000001"
ended = threading.Event()
"""Set where something waits before the interpreter ends, such as the end of a ``with``."""


class Late(LocalStore):
    """Creates the last version's files only when the process is ending, or fails then, as ``FAULT`` says."""

    async def create(self, key: str, source: Any) -> None:
        if LAST in key and FAULT != "repaired":
            # Private, and the only thing that is set from the end of the main thread on.
            while not (threading._SHUTTING_DOWN or ended.is_set()):  # type: ignore[attr-defined]  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            if FAULT == "hung":
                await asyncio.sleep(3600)
        if LAST in key and FAULT in ("refused", "repaired"):
            raise WriteRefused("this disk is full")
        await super().create(key, source)


def policy() -> PolicyPublisher:
    trainer = Trainer(ROOT)
    publisher = PolicyPublisher(
        lambda: Late(ROOT / "store"), "r", trainer.boot, ROOT / "work", producer={"name": "test"}
    )
    first = publisher.publish(trainer.learn())
    if FAULT == "repaired":
        wait([first], 60)  # which asks nothing
        publisher.publish(trainer.learn())
    return publisher


def group() -> OwnDelta:
    """A trainer's own encoder, behind the step."""
    trainer = Trainer(ROOT)
    settings = TrainerSettings("r", f"file:{ROOT}/store", trainer.boot, ROOT / "work", async_=True)
    publisher = GroupPublisher(settings, Solo(), files=FILES, store=lambda: Late(ROOT / "store"))
    publisher.claim()
    delta = OwnDelta(publisher, FILES)
    delta.publish(trainer.tensors)  # which is waited for
    delta.publish(trainer.learn())
    return delta


def cut_off(publisher: PolicyPublisher) -> None:
    """The signal comes while the next version is encoded."""
    signal.signal(signal.SIGTERM, on_signal)
    publisher._encoder.encode = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)  # type: ignore
    publisher.publish({})


def on_signal(*_: object) -> None:
    sys.exit(0)


def child() -> None:
    policy()


def end() -> None:
    if WAY == "return":
        policy()
    elif WAY == "exit":
        policy()
        sys.exit(0)
    elif WAY == "raise":
        policy()
        raise LookupError("of the trainer's own")
    elif WAY == "sigterm":
        signal.signal(signal.SIGTERM, on_signal)
        policy()
        os.kill(os.getpid(), signal.SIGTERM)
    elif WAY == "group":
        group()
    elif WAY == "cut-off":
        cut_off(policy())
    elif WAY == "with-cut-off":
        ended.set()
        with policy() as publisher:
            cut_off(publisher)
    elif WAY == "asked":
        publisher = policy()
        ended.set()
        publisher._pipeline.outstanding()[-1].exception()
    elif WAY in ("with", "with-exit"):
        with policy() as publisher:
            close = publisher.close
            publisher.close = lambda *a: (ended.set(), close(*a))  # type: ignore[assignment,method-assign]
            if WAY == "with":
                raise LookupError("of the trainer's own")
            sys.exit(0)
    elif WAY in ("fork", "spawn"):
        process = multiprocessing.get_context(WAY).Process(target=child)
        process.start()
        process.join()
        print("child", process.exitcode, flush=True)
    elif WAY == "forked":
        policy()
        if os.fork() == 0:
            sys.exit(0)
        print("child", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)


if __name__ == "__main__":
    leaving.SAY_AFTER = 0.05 if FAULT == "hung" else 60.0
    end()
