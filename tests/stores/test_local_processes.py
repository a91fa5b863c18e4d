"""LocalStore between processes: one winner, no lost update, and nothing half-written after kill -9."""

import asyncio
import random
import subprocess
import sys
from pathlib import Path

from stitch_core.stores.local import LocalStore

WORKER = Path(__file__).parent / "store_worker.py"


def body(name: str) -> bytes:
    """What the worker writes: long enough to be caught half-written, and telling of every byte."""
    return name.encode().ljust(64, b".") * 8192


def start(root: Path, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(WORKER), str(root), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def go(*workers: subprocess.Popen[str]) -> None:
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()


def finish(worker: subprocess.Popen[str]) -> list[int]:
    output, _ = worker.communicate(timeout=60)
    return [int(line) for line in output.split()]


async def test_one_process_wins_each_key(tmp_path: Path) -> None:
    rounds = 20
    workers = [start(tmp_path, "create", me, rounds) for me in "abcd"]
    go(*workers)
    won = dict(zip("abcd", map(finish, workers), strict=True))
    assert all(worker.returncode == 0 for worker in workers)
    assert sorted(number for numbers in won.values() for number in numbers) == list(range(rounds))
    store = LocalStore(tmp_path)
    for me, numbers in won.items():
        for number in numbers:
            assert await store.read(f"race/{number}") == me.encode() * 100_000
    await store.close()


async def test_a_counter_loses_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    await store.create("counter", b"0")
    workers = [start(tmp_path, "count", 15) for _ in range(4)]
    go(*workers)
    for worker in workers:
        finish(worker)
        assert worker.returncode == 0
    assert await store.read("counter") == b"60"
    await store.close()


async def test_kill_9_leaves_nothing_half(tmp_path: Path) -> None:
    rng, store = random.Random(1), LocalStore(tmp_path)
    start_at, acknowledged, killed_busy, rounds = 0, -1, 0, 0
    temporaries = tmp_path / ".stitch" / "tmp"
    # However slow the machine: enough rounds, and some that ended in the middle of a write.
    while rounds < 8 or acknowledged <= 8 or not killed_busy:
        rounds += 1
        assert rounds < 60, "no process was killed in the middle of a write"
        worker = start(tmp_path, "publish", start_at)
        go(worker)
        async with asyncio.timeout(60):
            while not temporaries.is_dir():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.01)
        await asyncio.sleep(rng.uniform(0.02, 0.1))
        worker.kill()
        acknowledged = max([acknowledged, *finish(worker)])
        objects = [-1]
        for entry in await store.list(""):
            data = await store.read(entry.key)
            name = data.partition(b".")[0].decode()
            assert data == body(name), f"{entry.key} is not whole"
            if entry.key != "head":
                assert name == entry.key
                objects.append(int(name.removeprefix("objects/")))
        if acknowledged >= 0:
            at = int((await store.load("head")).data.partition(b".")[0].removeprefix(b"head "))
            assert at >= acknowledged
            assert at in objects, "the head names what is not there"
        start_at = max(objects) + 1
        killed_busy += any(temporaries.iterdir())
    await store.close()
