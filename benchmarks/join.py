"""Joining a run of real steps at any version, and what the compactor spends on it.

A trainer's encoder makes a run of each trace of benchmarks/traces.py (256 steps, sparse deltas; the trace end
to end several times, so that what a file costs does not count for much), and the real compactor looks after
every version, on files. D6: for every version the planner's own choice for a host that has the boot
checkpoint: pieces, and bytes of all files of the plan beside the model's bytes. D7: CPU of the compactor
beside the public alternative, an aggregate from version 0 that is refreshed at each step (zstd level 1 of
the XOR, streamed with reused buffers, one decode and one encode of an aggregate each); both per version, on
one thread. Joins are also carried out and timed (fetched files to verified weights), and the redo journal of
a host's copy is measured for a step. ``piece``: what PIECE_COST should be for a directory store.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard

from benchmarks import traces
from benchmarks.harness import Row, at_most, run, say
from stitch_core.chain import ChainReader
from stitch_core.compactor import Compactor
from stitch_core.delta.directory import DeltaDirectory
from stitch_core.delta.encoder import DeltaEncoder
from stitch_core.delta.one_pass import apply_in_place
from stitch_core.delta.stream import PART_BYTES
from stitch_core.files import PosixFiles
from stitch_core.host_checkpoint import HostCheckpoint
from stitch_core.in_place import BATCH_SHARE
from stitch_core.lineage import Plan
from stitch_core.manifest import Manifest, bytes_digest
from stitch_core.planner import PIECE_COST, Planner
from stitch_core.ports import SystemClock
from stitch_core.publisher import Boot, Payload, Publisher
from stitch_core.replica.staging import Stager
from stitch_core.safetensors import ByteArray, Tensor
from stitch_core.state import TensorInfo, state_digest, tensor_digest
from stitch_core.stores.local import LocalStore
from stitch_core.stores.memory import MemoryStore
from stitch_core.stores.transfer import download
from stitch_core.testing.checkpoints import random_tensors, step, write_checkpoint

TENSORS = 4


class Files(PosixFiles):
    """Without fsync: what is measured is CPU."""

    def sync(self, path: Path) -> None:
        pass


FILES = Files()
LIMITS = {"1e-6": 22.0, "3e-6": 40.0}


async def inline(function: Any, /, *args: Any) -> Any:
    return function(*args)


@dataclass
class Join:
    """The plan of a joiner at one version."""

    number: int
    pieces: int
    percent: float


@dataclass
class Spent:
    """CPU seconds, all versions together."""

    compactor: float = 0.0
    refresh: float = 0.0


class Trial:
    """One trace, as a run in a store."""

    def __init__(self, rate: str, steps: int, size: int, work: Path) -> None:
        self.trace = traces.load(rate)
        self.steps, self.work = steps, work
        self.times = max(1, size // self.trace.base.nbytes)
        self.size = self.trace.base.nbytes * self.times
        self.store = MemoryStore()
        self.chain: list[Manifest] = []
        self.joins: list[Join] = []
        self.spent = Spent()
        self.raw: list[Any] = []

    def tensors(self, words: traces.Words) -> dict[str, Tensor]:
        parts = np.array_split(np.tile(words, self.times), TENSORS)
        return {f"layer.{i}": Tensor("BF16", (part.size,), part.tobytes()) for i, part in enumerate(parts)}

    async def play(self) -> None:
        """Publish every version, compact after each, and plan a join to each."""
        versions = self.trace.versions()
        first = self.tensors(next(versions))
        encoder = DeltaEncoder(first, "sparse")
        table = {n: TensorInfo(t.dtype, t.shape, tensor_digest(t.data)) for n, t in first.items()}
        publisher = Publisher(
            self.store, "r", files=FILES, clock=SystemClock(), rng=random.Random(0),
            nonce=lambda: f"{random.getrandbits(64):x}", run_blocking=inline,
        )  # fmt: skip
        self.chain.append(await publisher.claim(Boot("boot", state_digest(table))))
        compactor = Compactor(
            self.store, "r", self.work / "compactor", "benchmark", files=FILES, clock=SystemClock(),
            rng=random.Random(0), run_blocking=inline,
        )  # fmt: skip
        self.refresher = Refresher(b"".join(bytes(t.data) for t in first.values()))
        for words in versions:
            number = len(self.chain)
            if number > self.steps:
                break
            after = self.tensors(words)
            directory = self.work / f"v{number}"
            encoded = encoder.encode(after, directory, FILES, number=number, base_number=number - 1)
            encoder.commit()
            payload = Payload("delta", encoded.state, directory, encoded.files, encoded.base, "sparse", {})
            self.chain.append(await publisher.publish(payload, publisher.reserve()))
            FILES.remove_tree(directory)
            start = time.thread_time()
            await compactor.compact()
            self.spent.compactor += time.thread_time() - start
            self.refresher.prepare(b"".join(bytes(t.data) for t in after.values()))
            start = time.thread_time()
            self.refresher.refresh()
            self.spent.refresh += time.thread_time() - start
            await self._join(number)

    async def _join(self, number: int) -> None:
        plan = await self.plan(number, PIECE_COST * self.size // MODEL)
        self.joins.append(Join(number, len(plan.sources), 100 * plan.bytes / self.size))

    async def plan(self, number: int, piece_cost: int) -> Plan:
        planner = Planner(self.store, ChainReader(self.store), piece_cost=piece_cost)
        return await planner.plan(self.chain[number], {self.chain[0].state})


MODEL = 60 << 30
"""Bytes of the model that the trace stands for: PIECE_COST is for such."""


class Refresher:
    """The public alternative: version 0 XOR now as one zstd-1 frame, XORed with each delta."""

    CHUNK = 1 << 20

    def __init__(self, base: bytes) -> None:
        self._before = np.frombuffer(base, np.uint8)
        self._compressor, self._decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
        self._frame = self._compressor.compress(bytes(len(base)))
        self._delta = b""

    @property
    def bytes(self) -> int:
        return len(self._frame)

    def prepare(self, after: bytes) -> None:
        """The new version's own delta, which the trainer made."""
        now = np.frombuffer(after, np.uint8)
        self._delta = self._compressor.compress((self._before ^ now).tobytes())
        self._before = now

    def refresh(self) -> None:
        size = self._before.size
        a, b = (self._decompressor.stream_reader(frame) for frame in (self._frame, self._delta))
        b = zstandard.ZstdDecompressor().stream_reader(self._delta)
        out = self._compressor.compressobj(size=size)
        parts, total, chunk = [], bytearray(self.CHUNK), bytearray(self.CHUNK)
        for at in range(0, size, self.CHUNK):
            length = min(self.CHUNK, size - at)
            for reader, buffer in ((a, total), (b, chunk)):
                done = 0
                while done < length:
                    done += reader.readinto(memoryview(buffer)[done:length])
            merged = np.frombuffer(total, np.uint8, length) ^ np.frombuffer(chunk, np.uint8, length)
            parts.append(out.compress(merged.data))
        self._frame = b"".join([*parts, out.flush()])


def join_cpu(trial: Trial, number: int) -> tuple[float, float]:
    """CPU seconds per GB of weights to apply and verify: the joiner's plan, and the refreshed aggregate."""
    plan = asyncio.run(trial.plan(number, 0))
    deltas = []
    for i, source in enumerate(plan.sources):
        directory = trial.work / f"join-{i}"
        FILES.remove_tree(directory)
        directory.mkdir(parents=True)
        for file in source.representation.files:
            (directory / file.name).write_bytes(trial.store.state.objects[source.file_key(file.name)])
        deltas.append(DeltaDirectory.open(directory, FILES))
    base = trial.tensors(trial.trace.base)
    weights = {name: np.frombuffer(bytes(t.data), np.uint8).copy() for name, t in base.items()}

    def ours() -> str:
        return "".join(
            apply_in_place(data, name, [d for d in deltas if name in d.payloads])
            for name, data in weights.items()
        )

    whole: ByteArray = np.concatenate(list(weights.values()))
    frame = trial.refresher._frame

    def theirs() -> str:
        reader, at = zstandard.ZstdDecompressor().stream_reader(frame), 0
        while chunk := reader.read(2 << 20):
            region = whole[at : at + len(chunk)]
            np.bitwise_xor(region, np.frombuffer(chunk, np.uint8), out=region)
            at += len(chunk)
        return xxhash.xxh3_128_hexdigest(whole.data)

    best = [float("inf")] * 2
    for _ in range(7):  # an odd number of XORs
        for i, side in enumerate((ours, theirs)):
            start = time.thread_time()
            side()
            best[i] = min(best[i], time.thread_time() - start)
    assert np.array_equal(np.concatenate(list(weights.values())), trial.refresher._before)
    if number == trial.steps:
        assert np.array_equal(whole, trial.refresher._before)
    return best[0] / trial.size * 1e9, best[1] / trial.size * 1e9


def journal(trial: Trial, since: int) -> tuple[float, float]:
    """The redo journal when a host's copy goes from a version to the last, in percent of the model.

    What it takes at most, and all that is written into it. The bound is the one for large models.
    """
    peak = journal_file(trial, since, trial.size // BATCH_SHARE, 1 << 17)
    return peak, journal_file(trial, since, trial.size, PART_BYTES)


def journal_file(trial: Trial, since: int, batch_bytes: int, part_bytes: int) -> float:
    root, target, start = trial.work / f"host-{since}", trial.chain[-1], trial.chain[since]
    planner = Planner(trial.store, ChainReader(trial.store), piece_cost=0)
    boot, words = root / "boot", next(itertools.islice(trial.trace.versions(), since, None))
    write_checkpoint(boot, FILES, trial.tensors(words))
    host = HostCheckpoint(root / "copy", FILES, batch_bytes=batch_bytes, part_bytes=part_bytes, workers=1)
    host.open()
    host.seed(boot, start)
    plan = asyncio.run(planner.plan(target, {start.state}))
    for source in plan.sources:
        directory = root / source.digest()[-16:]
        directory.mkdir()
        for file in source.representation.files:
            (directory / file.name).write_bytes(trial.store.state.objects[source.file_key(file.name)])
    host.apply(plan, lambda source: root / source.digest()[-16:])
    size = (root / "copy" / "journal").stat().st_size
    host.close()
    FILES.remove_tree(root)
    return 100 * size / trial.size


def scratch() -> Path:
    """In RAM, where there is some."""
    shared = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="stitch-join-", dir=shared if shared.is_dir() else None))


async def piece_cost(rounds: int) -> float:
    """Staging 65 small deltas beside one, and fetching 64 MiB, from a directory; in MiB."""
    work = scratch()
    try:
        store = LocalStore(work / "store")
        rng = np.random.default_rng(0)
        tensors = random_tensors(rng, {f"layer.{i}": ("BF16", (64, 64)) for i in range(200)})
        write_checkpoint(work / "boot", FILES, tensors)
        publisher = Publisher(
            store, "r", files=FILES, clock=SystemClock(), rng=random.Random(0),
            nonce=lambda: f"{random.getrandbits(64):x}", run_blocking=inline,
        )  # fmt: skip
        encoder = DeltaEncoder(tensors, "sparse")
        chain = [await publisher.claim(Boot("boot", encoder.state))]
        for number in range(1, 66):
            tensors = {**tensors, **step(rng, tensors, 0.01)}
            directory = work / f"v{number}"
            encoded = encoder.encode(tensors, directory, FILES, number=number, base_number=number - 1)
            encoder.commit()
            payload = Payload("delta", encoded.state, directory, encoded.files, encoded.base, "sparse", {})
            chain.append(await publisher.publish(payload, publisher.reserve()))

        async def stage(number: int, name: str) -> float:
            host = HostCheckpoint(work / name, FILES)
            stager = Stager(
                store, ChainReader(store), host, work / "boot", files=FILES, clock=SystemClock(),
                rng=random.Random(0), run_blocking=inline, activity=lambda _: None,
            )  # fmt: skip
            start = time.perf_counter()
            await stager.stage(chain[number])
            host.close()
            return time.perf_counter() - start

        many = min([await stage(65, f"many{i}") for i in range(rounds)])
        one = min([await stage(1, f"one{i}") for i in range(rounds)])
        large = rng.integers(0, 256, 64 << 20, np.uint8).tobytes()
        await store.create("large", large)
        digest, seconds = bytes_digest(large), []
        for i in range(rounds):
            start = time.perf_counter()
            await download(store, "large", FILES, work / f"large{i}", len(large), digest, run_blocking=inline)
            seconds.append(time.perf_counter() - start)
        each, rate = (many - one) / 64, len(large) / min(seconds)
        say(f"one more piece takes {1000 * each:.1f} ms, in which {each * rate / 2**20:.2f} MiB are fetched")
        return each * rate / 2**20
    finally:
        shutil.rmtree(work)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    steps, size = (36, 12 << 20) if options.quick else (traces.STEPS, 24 << 20)
    worst_ratio, ratios = 0.0, {}
    for letter, rate in zip("ab", traces.RATES, strict=True):
        work = scratch()
        try:
            trial = Trial(rate, steps, size, work)
            asyncio.run(trial.play())
            ours, theirs = join_cpu(trial, steps)
            peak, written = journal(trial, steps - 1)
        finally:
            shutil.rmtree(work)
        worst = max(trial.joins, key=lambda join: join.percent)
        most = max(join.pieces for join in trial.joins)
        mean = statistics.mean(join.percent for join in trial.joins)
        chain = 100 * sum(m.representation.bytes for m in trial.chain) / trial.size
        per_gb = trial.size * steps / 1e9
        ratios[rate] = trial.spent.compactor / trial.spent.refresh
        say(
            f"lr {rate}, {steps} versions of {trial.size / 1e6:.1f} MB: joins take {mean:.1f} % on average, "
            f"{worst.percent:.1f} % at worst (version {worst.number}), at most {most} pieces; the chain of "
            f"sparse deltas is {chain:.0f} %, one refreshed zstd aggregate "
            f"{100 * trial.refresher.bytes / trial.size:.1f} %; compaction "
            f"{trial.spent.compactor / per_gb:.2f} CPU s per GB and version, refreshing "
            f"{trial.spent.refresh / per_gb:.2f}; join at {steps}: "
            f"{ours:.2f} CPU s per GB, refreshed zstd aggregate {theirs:.2f}"
        )
        where = f"join at any version up to {steps}, lr {rate}"
        yield at_most(f"D6{letter}", f"% of model bytes, {where}", worst.percent, LIMITS[rate])
        yield at_most(f"D6{letter}.pieces", f"pieces, {where}", most, 7)
        what = f"CPU of a join at {steps} / one refreshed zstd aggregate's, lr {rate}"
        yield Row(f"join.{rate}", what, ours / theirs, excludes="the download")
        what = f"% of model bytes, the redo journal of a step at lr {rate}"
        yield at_most(f"journal.{letter}", f"{what}, at most at any time", peak, 1.0)
        yield Row(f"journal.{letter}.sum", f"{what}, all that is written", written)
    for rate, ratio in ratios.items():
        say(f"compaction / refresh, lr {rate}: {ratio:.3f}")
        worst_ratio = max(worst_ratio, ratio)
    yield at_most(
        "D7", f"compaction CPU / refreshing one zstd aggregate a version (worst of two, {steps} steps)",
        worst_ratio, 0.25, "fsync",
    )  # fmt: skip
    cost = asyncio.run(piece_cost(2 if options.quick else 3))
    yield Row("piece", "MiB that are fetched in the time that one more piece takes", cost)


if __name__ == "__main__":
    run(__doc__ or "", measure)
