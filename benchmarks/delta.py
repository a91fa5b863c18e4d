"""Deltas beside the public pattern, on one thread: encode, size, receive, fold, many tensors, memory.

REF is that pattern as public trainers and receivers have it: encode is a whole-tensor XOR by numpy, a count
of what changed, zstd level 1 and xxh3-128 of the new bytes; receive reads 2 MiB at a time of the zstd frame,
XORs and hashes them; a fold does that for each version with reused buffers and hashes once.

Synthetic weights change by one unit in the last place at random (BF16 and FP32 normal, FP8 and packed FP4 by
their codes); real ones are steps of benchmarks/traces.py, laid end to end to the same size. Times are thread
CPU time, best of rounds in turns; ratios are of one run. Everything lies in memory (files on /dev/shm where
there is one). Rows beside ``cwtrain`` (benchmarks/cwtrain_peer.py) are there where it is
installed, which takes Python 3.12 or newer; those of a host's copy (benchmarks/host_copy.py) are wall clock.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from benchmarks import cwtrain_peer, host_copy, traces
from benchmarks.harness import Row, at_least, at_most, run, say
from stitch_core.delta import DeltaDirectory, xor
from stitch_core.delta.encoder import DeltaEncoder
from stitch_core.delta.one_pass import apply_in_place
from stitch_core.delta.sparse_apply import apply_sparse
from stitch_core.delta.sparse_encode import Source, encode_sparse
from stitch_core.delta.sparse_file import SparseFile
from stitch_core.files import PosixFiles
from stitch_core.safetensors import Tensor

Bytes = npt.NDArray[np.uint8]
FILES = PosixFiles()
READ = 2 << 20
WIDTHS = {"bf16": 2, "fp32": 4, "fp8": 1, "fp4": 1}


@dataclass(frozen=True)
class Case:
    """One tensor before and after."""

    name: str
    kind: str
    old: Bytes
    new: Bytes

    @property
    def width(self) -> int:
        return WIDTHS[self.kind]


# -------------------------------------------------------------------------------------------------- data


def synthetic(kind: str, density: float, size: int, seed: int = 0) -> Case:
    """``density`` of the elements (nibbles of fp4) move by one code, up or down."""
    rng = np.random.default_rng(seed)
    name = f"{kind} {density:.1%}"
    if kind in ("fp8", "fp4"):
        old = rng.integers(0, 256, size, np.uint8)
        new = old.copy()
        places = 2 if kind == "fp4" else 1
        at = np.flatnonzero(rng.random(size * places, np.float32) < density)
        byte, shift = at // places, (at % places * 4).astype(np.uint8)
        mask = 7 if kind == "fp4" else 0x7E
        code = (old[byte] >> shift) & mask
        moved = np.where(code > 0, code - 1, code + 1) if kind == "fp4" else code ^ 1
        np.bitwise_xor.at(new, byte, ((code ^ moved) << shift).astype(np.uint8))
        return Case(name, kind, old, new)
    values = (rng.standard_normal(size // WIDTHS[kind], np.float32) * 0.02).view(np.uint32)
    words = (values >> 16).astype(np.uint16) if kind == "bf16" else values
    after = words.copy()
    at = np.flatnonzero(rng.random(words.size, np.float32) < density)
    after[at] += (rng.integers(0, 2, at.size) * 2 - 1).astype(words.dtype)
    return Case(name, kind, words.view(np.uint8), after.view(np.uint8))


def real(rate: str, size: int, skip: int = 64) -> Case:
    """Steps of a trace end to end, so that the gaps and values are a real step's."""
    trace = traces.load(rate)
    before: list[Bytes] = []
    after: list[Bytes] = []
    previous = None
    for number, words in enumerate(trace.versions()):
        if number >= skip and sum(map(len, after)) < size and previous is not None:
            before.append(previous.view(np.uint8))
            after.append(words.copy().view(np.uint8))
        previous = words.copy()
    old, new = (np.concatenate(part)[: size // 8 * 8] for part in (before, after))
    return Case(f"real lr {rate}", "bf16", old, new)


def entropy_bound(case: Case) -> float:
    """Bytes of the change if each element changed on its own: positions, and values by their frequencies."""
    words = (case.old ^ case.new).view(f"<u{case.width}")
    values = words[words != 0]
    p = values.size / words.size
    positions = words.size * (-p * math.log2(p) - (1 - p) * math.log2(1 - p))
    counts = np.unique(values, return_counts=True)[1] / values.size
    return float(positions - values.size * (counts * np.log2(counts)).sum()) / 8


# --------------------------------------------------------------------------------------------------- REF


class Ref:
    """The public pattern."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, old: Bytes, new: Bytes) -> tuple[bytes, str]:
        difference = np.bitwise_xor(old, new)
        np.count_nonzero(difference)
        frame: bytes = self._compressor.compress(difference.data)
        return frame, xxhash.xxh3_128_hexdigest(new.data)

    def receive(self, data: Bytes, frame: bytes) -> str:
        hasher = xxhash.xxh3_128()
        for region in self._xor(data, frame):
            hasher.update(region.data)
        return hasher.hexdigest()

    def fold(self, data: Bytes, frames: list[bytes]) -> str:
        for frame in frames:
            for _ in self._xor(data, frame):
                pass
        return xxhash.xxh3_128_hexdigest(data.data)

    def _xor(self, data: Bytes, frame: bytes) -> Iterator[Bytes]:
        reader, at = self._decompressor.stream_reader(frame), 0
        while chunk := reader.read(READ):
            region = data[at : at + len(chunk)]
            np.bitwise_xor(region, np.frombuffer(chunk, np.uint8), out=region)
            at += len(chunk)
            yield region


# ------------------------------------------------------------------------------------------------ timing


def best(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Least thread CPU seconds of each side, taken in turns."""
    least = dict.fromkeys(sides, math.inf)
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
            start = time.thread_time()
            sides[name]()
            least[name] = min(least[name], time.thread_time() - start)
    return least


def sparse_of(case: Case, path: Path) -> SparseFile:
    encode_sparse([source_of(case)], lambda _: path, FILES, workers=1)
    return SparseFile(path, FILES)


def source_of(case: Case) -> Source:
    return Source("weight", case.old, case.new, case.width, "0" * 32, case.kind == "fp4")


# -------------------------------------------------------------------------------------------------- rows


def encode_and_receive(work: Path, size: int, rounds: int, quick: bool) -> Iterator[Row]:
    """D1 to D4: encode, bytes, receive; the targets hold for BF16 at 0.3 to 1 % and the real steps."""
    kinds = [("bf16", 0.003), ("bf16", 0.01), ("bf16", 0.001), ("bf16", 0.05)]
    kinds += [("fp8", 0.006), ("fp4", 0.003), ("fp32", 0.01)]
    made: list[Callable[[], Case]] = [partial(synthetic, kind, density, size) for kind, density in kinds]
    made += [partial(real, rate, size) for rate in traces.RATES]
    found: dict[str, dict[str, float]] = {}
    for make in made[:2] + made[-2:] if quick else made:
        case = make()
        found[case.name] = compare(case, work / "delta.sparse", rounds)
    names = [name for name in found if name in ("bf16 0.3%", "bf16 1.0%") or name.startswith("real")]
    values = {key: [found[name][key] for name in names] for key in ("D1", "D2a", "D2b", "D3")}
    xors = [ratios["D4"] for ratios in found.values()]
    where = "BF16 0.3 to 1 % and real steps, the worst"
    yield at_least(
        "D1", f"sparse encode and hash, x REF ({where})", min(values["D1"]), 1.3, "moving the base"
    )
    yield at_most("D2a", f"sparse bytes / REF bytes ({where})", max(values["D2a"]), 0.55)
    yield at_most("D2b", f"sparse bytes / entropy bound ({where})", max(values["D2b"]), 1.15)
    yield at_least(
        "D3", f"sparse receive and verify, x REF ({where})", min(values["D3"]), 1.2, "the download"
    )
    yield at_least(
        "D4", "xor receive, x REF (median of the cases)", statistics.median(xors), 0.95, "the download"
    )


def compare(case: Case, path: Path, rounds: int) -> dict[str, float]:
    """The ratios of one case, by target."""
    ref = Ref()
    frame, digest = ref.encode(case.old, case.new)
    size, bound = sparse_of(case, path).path.stat().st_size, entropy_bound(case)
    spare = np.empty_like(case.new)
    encode = best({
        "ref": lambda: ref.encode(case.old, case.new),
        "sparse": lambda: encode_sparse([source_of(case)], lambda _: path, FILES, workers=1),
        "memcpy": lambda: np.copyto(spare, case.new),
        "xxh3": lambda: xxhash.xxh3_128_hexdigest(case.new.data),
    }, rounds)  # fmt: skip
    data = {side: case.old.copy() for side in ("ref", "xor", "sparse")}
    received: dict[str, str] = {}

    def receive(side: str) -> None:
        if side == "ref":
            received[side] = ref.receive(data[side], frame)
        elif side == "xor":
            received[side] = xor.apply_hashed(data[side], frame)
        else:
            received[side] = apply_sparse(data[side], "weight", [SparseFile(path, FILES)])

    get = best({side: partial(receive, side) for side in data}, rounds // 2 * 2 + 1)
    assert set(received.values()) == {digest}  # an odd number of XORs: the new bytes
    ratios = {
        "D1": encode["ref"] / encode["sparse"], "D2a": size / len(frame), "D2b": size / bound,
        "D3": get["ref"] / get["sparse"], "D4": get["ref"] / get["xor"],
    }  # fmt: skip
    total = case.new.size
    rates = {f"encode {side}": total / 1e9 / t for side, t in encode.items()}
    rates |= {f"receive {side}": total / 1e9 / t for side, t in get.items()}
    say(
        f"{case.name:13} {size / total:.3%} of the weights, REF {len(frame) / total:.3%}, "
        f"bound {bound / total:.3%}; {', '.join(f'{name} {value:.2f}' for name, value in ratios.items())}; "
        f"GB/s: {', '.join(f'{name} {value:.2f}' for name, value in rates.items())}"
    )
    return ratios


def fold(work: Path, size: int, rounds: int, quick: bool) -> Iterator[Row]:
    """D5: N deltas in one pass. Synthetic ones at 0.3 and 1 %, and real ones."""
    for count in (8, 64):
        worst = 0.0
        for name, chain in chains(count, size, quick):
            ratio = fold_one(work, chain, 1 if quick or count == 64 else rounds // 2)
            say(f"fold of {count} {name}: {ratio:.3f} of the CPU of REF")
            worst = max(worst, ratio)
        yield at_most(
            f"D5.{count}", f"one pass over {count} sparse deltas / REF fold, CPU (worst case)", worst, 0.5,
            "the download; reading tables, once for a model",
        )  # fmt: skip


def fold_one(work: Path, chain: list[Bytes], rounds: int) -> float:
    ref = Ref()
    frames, files = [], []
    for i, (old, new) in enumerate(itertools.pairwise(chain)):
        frames.append(ref.encode(old, new)[0])
        files.append(sparse_of(Case("", "bf16", old, new), work / f"{i}.sparse"))
    a, b = chain[0].copy(), chain[0].copy()
    times = best({
        "ref": lambda: ref.fold(a, frames),
        "sparse": lambda: apply_sparse(b, "weight", files),
    }, rounds // 2 * 2 + 1)  # fmt: skip
    assert np.array_equal(a, chain[-1])
    assert np.array_equal(b, chain[-1])
    return times["sparse"] / times["ref"]


def chains(count: int, size: int, quick: bool) -> Iterator[tuple[str, list[Bytes]]]:
    """Versions of one tensor, ``count`` steps."""
    for density in (0.003, 0.01)[: 1 if quick else 2]:
        first = synthetic("bf16", density, size).old
        rng = np.random.default_rng(1)
        versions = [first]
        for _ in range(count):
            words = versions[-1].view("<u2").copy()
            at = rng.integers(0, words.size, int(words.size * density))
            words[at] += np.uint16(1)
            versions.append(words.view(np.uint8))
        yield f"bf16 {density:.1%}", versions
    for rate in traces.RATES:
        trace = traces.load(rate)
        times = max(1, size // trace.base.nbytes)
        taken = [words.copy() for _, words in zip(range(64 + count + 1), trace.versions(), strict=False)][64:]
        yield f"real lr {rate}", [np.tile(words, times).view(np.uint8) for words in taken]


def many(work: Path, count: int, rounds: int) -> Iterator[Row]:
    """D8: tensors of 4 KiB, as a trainer encodes and a host applies them."""
    rng = np.random.default_rng(0)
    size = 4096
    old = rng.integers(0, 1 << 16, count * size // 2, np.uint16)
    new = old.copy()
    at = np.flatnonzero(rng.random(new.size, np.float32) < 0.01)
    new[at] ^= 1
    names = [f"model.layers.{i // 960:03}.mlp.experts.{i % 960:03}.up_proj.weight" for i in range(count)]
    parts = {
        which: {n: words[i * size // 2 : (i + 1) * size // 2].view(np.uint8) for i, n in enumerate(names)}
        for which, words in (("old", old), ("new", new))
    }
    before, after = (
        {n: Tensor("BF16", (2, size // 4), d.data) for n, d in parts[w].items()} for w in ("old", "new")
    )
    encoder = DeltaEncoder(before, "sparse")
    directory = work / "many"

    def encode() -> None:
        FILES.remove_tree(directory)
        encoder.encode(after, directory, FILES, number=1, base_number=0)

    ref, out = Ref(), old.copy().view(np.uint8)
    gc.collect()
    gc.freeze()  # these weights are 300,000 objects of the benchmark's own: the collector need not walk them
    times = [math.inf, math.inf, math.inf, math.inf]
    for _ in range(rounds):
        start = time.process_time()
        encode()
        times[0] = min(times[0], time.process_time() - start)
        encoder.undo()
        np.copyto(out, old.view(np.uint8))
        start = time.thread_time()
        delta = DeltaDirectory.open(directory, FILES)
        found = {
            n: apply_in_place(out[i * size : (i + 1) * size], n, [delta])
            for i, n in enumerate(names)
            if n in delta.payloads
        }
        times[1] = min(times[1], time.thread_time() - start)
        assert all(found[n] == new_digest for n, (_, new_digest) in delta.changed.items())
        assert np.array_equal(out, new.view(np.uint8))
        start = time.thread_time()
        frames = {n: ref.encode(parts["old"][n], parts["new"][n])[0] for n in names}
        times[2] = min(times[2], time.thread_time() - start)
        np.copyto(out, old.view(np.uint8))
        start = time.thread_time()
        for i, n in enumerate(names):
            ref.receive(out[i * size : (i + 1) * size], frames[n])
        times[3] = min(times[3], time.thread_time() - start)
    micros = [t / count * 1e6 for t in times]
    written = sum(f.stat().st_size for f in directory.iterdir())
    say(
        f"{count} tensors of 4 KiB: encode {micros[0]:.1f} us (REF without files {micros[2]:.1f}), apply "
        f"{micros[1]:.1f} us (REF {micros[3]:.1f}); {written / count:.1f} bytes a tensor on disk"
    )
    what = f"us of CPU for each of {count} tensors of 4 KiB"
    yield at_most("D8a", f"sparse encode, {what}: state, files and moving the base too", micros[0], 15)
    yield at_most(
        "D8b", f"sparse apply, {what}: tables, hash", micros[1], 15, "the journal of the host's copy"
    )


# ------------------------------------------------------------------------------------------------ memory


def memory(work: Path, gigabytes: float) -> Iterator[Row]:
    """D9: what encode and apply take beside the weights, which are files that are mapped."""
    size = int(gigabytes * (1 << 30)) // (1 << 24) * (1 << 24)
    arguments = [sys.executable, "-m", "benchmarks.delta", "--memory-of", str(work), str(size)]
    lines = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.split()
    encode, apply = (int(line) / (1 << 20) for line in lines)
    say(f"{size / 2**30:.1f} GiB of weights: encode takes {encode:.0f} MiB more, apply {apply:.0f} MiB")
    yield at_most(
        "D9", f"MiB beside {size / 2**30:.1f} GiB of mapped weights, the larger of encode and apply",
        max(encode, apply), 256, "pages of the mapped files; the encoder's own copy of the base",
    )  # fmt: skip


def memory_of(work: Path, size: int) -> None:
    """In a process of its own: the growth of anonymous memory at its peak, in bytes, encode then apply."""
    tensors = {"embed": size // 2, **{f"layer.{i}": 16 << 20 for i in range(size // 2 // (16 << 20))}}
    paths = [work / "old.bin", work / "new.bin"]
    part = synthetic("bf16", 0.01, 16 << 20)
    for path, data in zip(paths, (part.old, part.new), strict=True):
        with path.open("wb") as file:
            for _ in range(0, size, data.size):
                file.write(data.data)
    old, new = (np.memmap(path, np.uint8, "r+") for path in paths)
    sources, views, at = [], {}, 0
    for name, nbytes in tensors.items():
        sources.append(
            Source(name, np.asarray(old[at : at + nbytes]), np.asarray(new[at : at + nbytes]), 2, "0" * 32)
        )
        views[name] = old[at : at + nbytes]
        at += nbytes
    del part

    def growth(call: Callable[[], Any]) -> int:
        before = anonymous()
        peak = Peak()
        call()
        return peak.stop() - before

    found: dict[str, Any] = {}

    def encode() -> None:
        found["paths"] = encode_sparse(sources, lambda i: work / f"{i}.sparse", FILES)[0]

    def apply() -> None:
        for path in found["paths"]:
            file = SparseFile(path, FILES)
            for name in file.names:
                apply_sparse(np.asarray(views[name]), name, [file])

    print(growth(encode), growth(apply))
    assert np.array_equal(old[: 1 << 20], new[: 1 << 20])


def anonymous() -> int:
    """Anonymous memory of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


class Peak:
    """Samples ``anonymous`` each millisecond in a thread of its own."""

    def __init__(self) -> None:
        self._most, self._end = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._end.wait(0.001):
            self._most = max(self._most, anonymous())

    def stop(self) -> int:
        self._end.set()
        self._thread.join()
        return max(self._most, anonymous())


def measure(options: argparse.Namespace) -> Iterator[Row]:
    if options.memory_of:
        memory_of(Path(options.memory_of[0]), int(options.memory_of[1]))
        sys.exit(0)
    size = (16 if options.quick else 64) << 20
    rounds = 3 if options.quick else 7
    shared = Path("/dev/shm")
    work = Path(tempfile.mkdtemp(prefix="stitch-delta-", dir=shared if shared.is_dir() else None))
    try:
        yield from encode_and_receive(work, size, rounds, options.quick)
        yield from fold(work, (4 if options.quick else 16) << 20, rounds, options.quick)
        yield from many(work, 6_000 if options.quick else 60_000, 3)
        yield from cwtrain_peer.rows(work, (64 if options.quick else 256) << 20, 2 if options.quick else 4)
        yield from host_copy.rows(work, (128 if options.quick else 512) << 20, 3 if options.quick else 5)
    finally:
        shutil.rmtree(work)
    with tempfile.TemporaryDirectory(prefix="stitch-delta-") as disk:
        yield from memory(Path(disk), 0.5 if options.quick else 2.5)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memory-of", nargs=2, metavar=("DIR", "BYTES"), help=argparse.SUPPRESS)


if __name__ == "__main__":
    run(__doc__ or "", measure, add_options)
