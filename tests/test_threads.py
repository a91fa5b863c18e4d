"""Pools go on when no thread can be started any more, as after the main thread's end in Python 3.12."""

from __future__ import annotations

import asyncio
import threading

import pytest

from stitch_core.threads import LoopThread, Pool


def refused(_: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_a_pool_goes_on_with_the_thread_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, go = Pool(4, "test"), threading.Event()
    monkeypatch.setattr(threading.Thread, "start", refused)
    first = pool.submit(go.wait, 60)
    others = [pool.submit(int, "7") for _ in range(8)]
    go.set()
    assert first.result(60)
    assert [other.result(60) for other in others] == [7] * 8
    pool.shutdown()


def test_a_loop_has_a_thread_for_blocking_calls_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def call() -> int:
        return await asyncio.to_thread(int, "7")

    loop = LoopThread("test")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        assert loop.run(call(), 60) == 7
        loop.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test")]
