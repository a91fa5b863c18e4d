"""Many tensors of 4 KiB: what each costs, beside the bytes. Part of delta.py."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.delta_sides import FILES, Ref
from benchmarks.harness import Row, at_most, say
from stitch_core.delta import DeltaDirectory
from stitch_core.delta.encoder import DeltaEncoder
from stitch_core.delta.one_pass import apply_in_place
from stitch_core.safetensors import Tensor


def rows(work: Path, count: int, rounds: int) -> Iterator[Row]:
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
