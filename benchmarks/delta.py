"""Deltas beside the public pattern, on one thread: encode, size, receive, fold, many tensors, memory.

REF is that pattern as public trainers and receivers have it: encode is a whole-tensor XOR by numpy, a count
of what changed, zstd level 1 and xxh3-128 of the new bytes; receive reads 2 MiB at a time of the zstd frame,
XORs and hashes them; a fold does that for each version with reused buffers and hashes once.

Synthetic weights change by one unit in the last place at random (BF16 and FP32 normal, FP8 and packed FP4 by
their codes); real ones are steps of benchmarks/traces.py, laid end to end to the same size. Times are thread
CPU time, best of rounds in turns; ratios are of one run. Everything lies in memory (files on /dev/shm where
there is one). Rows beside ``cwtrain`` (benchmarks/cwtrain_peer.py) are there where it is installed, which
takes Python 3.12 or newer; those of a host's copy (benchmarks/host_copy.py) are wall clock.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from benchmarks import cwtrain_peer, delta_many, delta_memory, host_copy, traces
from benchmarks.delta_cases import Bytes, Case, chains, entropy_bound, real, synthetic
from benchmarks.delta_sides import FILES, Ref, best, source_of, sparse_of
from benchmarks.harness import Row, at_least, at_most, run, say
from stitch_core.delta import xor
from stitch_core.delta.sparse_apply import apply_sparse
from stitch_core.delta.sparse_encode import encode_sparse
from stitch_core.delta.sparse_file import SparseFile


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


def measure(options: argparse.Namespace) -> Iterator[Row]:
    size = (16 if options.quick else 64) << 20
    rounds = 3 if options.quick else 7
    shared = Path("/dev/shm")
    work = Path(tempfile.mkdtemp(prefix="stitch-delta-", dir=shared if shared.is_dir() else None))
    try:
        yield from encode_and_receive(work, size, rounds, options.quick)
        yield from fold(work, (4 if options.quick else 16) << 20, rounds, options.quick)
        yield from delta_many.rows(work, 6_000 if options.quick else 60_000, 3)
        yield from cwtrain_peer.rows(work, (64 if options.quick else 256) << 20, 2 if options.quick else 4)
        yield from host_copy.rows(work, (128 if options.quick else 512) << 20, 3 if options.quick else 5)
    finally:
        shutil.rmtree(work)
    with tempfile.TemporaryDirectory(prefix="stitch-delta-") as disk:
        yield from delta_memory.rows(Path(disk), 0.5 if options.quick else 2.5)


if __name__ == "__main__":
    run(__doc__ or "", measure)
