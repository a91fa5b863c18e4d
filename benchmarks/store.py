"""An S3 store against plain boto3 transfers on the same server, and the requests that Stitch makes.

The server is SeaweedFS on loopback, its files on this machine's disk; payload files lie on tmpfs where there
is one, as a replica's do. Plain: one s3transfer TransferManager with its defaults, which over http takes each
body's SHA-256 for the signature and its CRC32, and reads nothing back. Stitch publishes (claim, digests,
create-only uploads whose SHA-256 the server checks, a HEAD of each object for its size and digest, manifest,
head) and fetches as a replica does (verified, synced). The rows on CPU time are of the same rounds: of client
and server, which compete for this machine's cores. What else runs here disturbs them less.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "plugins" / "s3")]

from benchmarks.harness import Row, at_least, at_most, interleaved, median_ratio, run, say  # noqa: E402
from stitch_core.files import PosixFiles  # noqa: E402
from stitch_core.head import Channel, channel_key  # noqa: E402
from stitch_core.host_checkpoint import HostCheckpoint  # noqa: E402
from stitch_core.manifest import Manifest  # noqa: E402
from stitch_core.payload import Boot, Payload  # noqa: E402
from stitch_core.ports import EngineIdentity, KVMode, SystemClock  # noqa: E402
from stitch_core.publisher import Publisher  # noqa: E402
from stitch_core.replica.admission import Gate  # noqa: E402
from stitch_core.replica.fetching import FETCH_THREADS, Fetcher, Wanted  # noqa: E402
from stitch_core.replica.reconciler import Follow, Reconciler  # noqa: E402
from stitch_core.testing.runs import RunBuilder  # noqa: E402
from stitch_core.threads import Threads  # noqa: E402
from stitch_s3.client import connect  # noqa: E402
from stitch_s3.store import S3Store  # noqa: E402
from stitch_s3.testing.server import ACCESS_KEY, SECRET_KEY, SeaweedServer  # noqa: E402
from stitch_s3.url import Location  # noqa: E402


class Counted:
    """A store on ``server`` that counts its requests by operation."""

    def __init__(self, server: SeaweedServer, prefix: str) -> None:
        self.requests: Counter[str] = Counter()
        location = Location(server.bucket, prefix, endpoint=server.endpoint)

        def client() -> Any:
            made = connect(location, 16, credentials=(ACCESS_KEY, SECRET_KEY))
            made.meta.events.register("before-send.s3", self._count)
            return made

        ready = client()  # as the plain side's is, before anything is timed
        self.store = S3Store(location, client=lambda: ready)

    def _count(self, event_name: str, **_: Any) -> None:
        self.requests[event_name.rpartition(".")[2]] += 1


def publisher(store: S3Store, name: str) -> Publisher:
    return Publisher(
        store, name, files=PosixFiles(), clock=SystemClock(), rng=random.Random(),
        nonce=lambda: secrets.token_hex(16), run_blocking=asyncio.to_thread,
    )  # fmt: skip


def cpu_seconds(server: SeaweedServer) -> float:
    """That this process and the server have used. Reads /proc."""
    ticks = 0
    for pid in server.pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # utime and stime, proc(5)
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


class Speed:
    """The same files to the same server and back, both ways."""

    def __init__(self, server: SeaweedServer, scratch: Path, count: int, size: int) -> None:
        self.server, self.scratch = server, scratch
        self.names = [f"model-{number:05d}.safetensors" for number in range(count)]
        self.source = scratch / "source"
        self.source.mkdir()
        for name in self.names:
            (self.source / name).write_bytes(os.urandom(size))
        self.size = size
        self.round = 0
        self.plain_client = self._plain_client()
        self.stitch = Counted(server, "speed/")
        self.threads = Threads(FETCH_THREADS, "fetch")
        self.manifest: Manifest | None = None

    def _plain_client(self) -> Any:
        import boto3

        return boto3.client(
            "s3", endpoint_url=self.server.endpoint, region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY,
        )  # fmt: skip

    def plain_upload(self) -> None:
        from s3transfer.manager import TransferManager

        self.round += 1
        with TransferManager(self.plain_client) as manager:
            sent = [
                manager.upload(str(self.source / name), self.server.bucket, f"plain{self.round}/{name}")
                for name in self.names
            ]
            for one in sent:
                one.result()
        self.plain_round = self.round

    def plain_download(self) -> None:
        from s3transfer.manager import TransferManager

        target = self._target("plain")
        with TransferManager(self.plain_client) as manager:
            got = [
                manager.download(self.server.bucket, f"plain{self.plain_round}/{name}", str(target / name))
                for name in self.names
            ]
            for one in got:
                one.result()

    def stitch_publish(self) -> None:
        self.round += 1
        asyncio.run(self._publish(f"run{self.round}"))

    async def _publish(self, name: str) -> None:
        writer = publisher(self.stitch.store, name)
        await writer.claim(Boot("boot", "sha256:" + "0" * 64))
        before = self.stitch.requests.copy()
        self.manifest = await writer.publish(
            Payload("full", "sha256:" + "1" * 64, self.source, tuple(self.names))
        )
        self.publish_requests = self.stitch.requests - before

    def stitch_fetch(self) -> None:
        asyncio.run(self._fetch())

    async def _fetch(self) -> None:
        assert self.manifest is not None
        target = self._target("stitch")
        wanted = [
            Wanted(self.manifest.file_key(file.name), target / file.name, file.size, file.sha256)
            for file in self.manifest.representation.files
        ]
        await Fetcher(self.stitch.store, PosixFiles(), self.threads, random.Random()).fetch(wanted)

    def _target(self, name: str) -> Path:
        target = self.scratch / f"got-{name}"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        return target

    def check(self) -> None:
        for side in ("plain", "stitch"):
            for name in self.names:
                if (self.scratch / f"got-{side}" / name).read_bytes() != (self.source / name).read_bytes():
                    raise AssertionError(f"{side} fetched wrong bytes for {name}")


def metered(call: Callable[[], None], server: SeaweedServer, spent: list[float]) -> Callable[[], None]:
    """``call``, which notes the CPU seconds that each of its runs took."""

    def run() -> None:
        before = cpu_seconds(server)
        call()
        spent.append(cpu_seconds(server) - before)

    return run


def speed(server: SeaweedServer, scratch: Path, quick: bool, rounds: int) -> Iterable[Row]:
    count, size = (100, 2_000_000) if quick else (1000, 2_000_000)
    sides = Speed(server, scratch, count, size)
    what = f"{count * size / 1e9:g} GB in {count} objects, as a part of plain boto3's speed"
    for id, name, plain, ours, left_out in (
        ("S1", "publish", sides.plain_upload, sides.stitch_publish,
         "encoding; of Stitch it has the claim, every digest and the read-back, of plain boto3 no read-back"),
        ("S2", "fetch", sides.plain_download, sides.stitch_fetch,
         "applying; of Stitch it has every digest and fsync, of plain boto3 neither"),
    ):  # fmt: skip
        cpu: dict[str, list[float]] = {"plain": [], "stitch": []}
        times = interleaved(
            {"plain": metered(plain, server, cpu["plain"]), "stitch": metered(ours, server, cpu["stitch"])},
            rounds,
        )
        for unit, found in (("seconds", times), ("CPU seconds", cpu)):
            say(f"{name}: {unit} { ({side: [round(t, 2) for t in all] for side, all in found.items()}) }")
        yield at_least(id, f"{name} {what}", median_ratio(times["plain"], times["stitch"]), 0.9, left_out)
        yield Row(
            f"{id}c",
            "the same rounds by CPU time of client and server",
            median_ratio(cpu["plain"], cpu["stitch"]),
        )
    sides.check()
    requests = sides.publish_requests
    say(f"requests of one publish: {dict(requests)}")
    extra = requests.total() - 2 * count
    yield at_most("S4", "requests per publish beyond one per object and its read-back", extra, 6)


class Still:
    """An engine that takes whatever it is given: only the requests to the store are counted here."""

    label = "default"

    async def identity(self) -> EngineIdentity:
        return EngineIdentity("i", self.label)

    async def prepare(self, checkpoint: Path, changed: Collection[str]) -> None: ...
    async def pause(self, mode: KVMode) -> None: ...
    async def resume(self) -> None: ...
    async def abort(self, request_id: str) -> None: ...
    async def probe(self) -> None: ...

    async def activate(self, label: str) -> None:
        self.label = label


async def idle_requests(server: SeaweedServer, scratch: Path, follow: Follow, passes: int) -> float:
    """Requests per pass of a replica that has caught up, by the reconciler that replicas run."""
    counted = Counted(server, f"idle-{follow.run or follow.channel}/")
    files, built = PosixFiles(), RunBuilder(scratch / f"run-{follow.run or follow.channel}", PosixFiles())
    writer = publisher(counted.store, "run")
    await writer.claim(Boot("boot", built.versions[0].state))
    version = built.full()
    names = tuple(file.name for file in version.representation.files)
    await writer.publish(Payload("full", version.state, built.directory_of(version), names))
    await counted.store.swap(channel_key("latest"), None, Channel("run").encode())
    clock, blocking = SystemClock(), Threads(1, "replica")
    host = HostCheckpoint(scratch / f"host-{follow.run or follow.channel}", files)
    replica = Reconciler(
        counted.store, Still(), Gate(clock), host, follow, built.boot, files, clock, random.Random(), blocking
    )
    while await replica.reconcile():
        pass
    counted.requests.clear()
    for _ in range(passes):
        if await replica.reconcile():
            raise AssertionError("the replica was not idle")
    await counted.store.close()
    blocking.close()
    return counted.requests.total() / passes


def idle(server: SeaweedServer, scratch: Path) -> Iterable[Row]:
    by_run = asyncio.run(idle_requests(server, scratch, Follow(run="run"), 20))
    by_channel = asyncio.run(idle_requests(server, scratch, Follow(channel="latest"), 20))
    excludes = "the replica's own record, one request in 5 s"
    yield at_most("S3", "requests per idle reconcile pass, following a run", by_run, 1, excludes)
    yield Row("S3c", "the same, following a channel: the channel and its run's head", by_channel)


def measure(options: argparse.Namespace) -> Iterable[Row]:
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 8e9
    with (
        tempfile.TemporaryDirectory(prefix="stitch-bench-") as disk,
        tempfile.TemporaryDirectory(prefix="stitch-bench-", dir=memory if roomy else None) as scratch,
        SeaweedServer(Path(disk), volume_mb=1024) as server,
    ):
        yield from speed(server, Path(scratch), options.quick, options.rounds or 3)
        yield from idle(server, Path(scratch))


if __name__ == "__main__":
    run(
        __doc__ or "", measure,
        lambda parser: parser.add_argument("--rounds", type=int, help="of each comparison (3)"),
    )  # fmt: skip
