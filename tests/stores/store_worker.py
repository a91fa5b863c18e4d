"""What test_local_processes.py runs in its own processes: python store_worker.py ROOT JOB [ARGUMENT...]."""

import asyncio
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from stitch_core.ports import AlreadyExists, Conflict, NotFound
from stitch_core.stores.local import LocalStore


def body(key: str) -> bytes:
    return key.encode().ljust(64, b".") * 8192


async def create(store: LocalStore, me: str, rounds: str) -> None:
    """Race for keys 0..rounds-1; prints those that were won."""
    for number in range(int(rounds)):
        try:
            await store.create(f"race/{number}", me.encode() * 100_000)
            print(number, flush=True)
        except AlreadyExists:
            pass


async def count(store: LocalStore, increments: str) -> None:
    """Add 1 to the counter, ``increments`` times."""
    for _ in range(int(increments)):
        while True:
            try:
                blob = await store.load("counter")
                await store.swap("counter", blob.tag, b"%d" % (int(blob.data) + 1))
                break
            except Conflict:
                pass


async def publish(store: LocalStore, start: str) -> None:
    """Create objects and move the head to each, for ever; prints the numbers that are done."""
    try:
        tag: str | None = (await store.load("head")).tag
    except NotFound:
        tag = None
    for number in itertools.count(int(start)):
        await store.create(f"objects/{number}", body(f"objects/{number}"))
        tag = await store.swap("head", tag, body(f"head {number}"))
        print(number, flush=True)


async def main(root: str, job: str, *arguments: str) -> None:
    store = LocalStore(Path(root))
    print("ready", flush=True)
    sys.stdin.readline()  # so that all start at once
    await {"create": create, "count": count, "publish": publish}[job](store, *arguments)
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
