"""How long a publish keeps the trainer, beside what frameworks do to bring weights to a disk.

T1: stock slime's delta writer, with and without Stitch's hook behind it. Needs a checkout of slime (--slime,
or STITCH_SLIME) and the environment of miles-rl: `$(python3.11 scripts/venv.py path miles)/bin/python`.
T2, T3: Stitch's own encoder for frameworks that write no deltas, beside a full checkpoint written to a disk.
These two need neither.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.harness import Row, interleaved, median_ratio, run, say
from stitch_core.files import PosixFiles
from stitch_core.safetensors import Tensor
from stitch_core.testing.checkpoints import write_checkpoint
from stitch_core.trainers.group import Solo
from stitch_core.trainers.own_delta import OwnDelta
from stitch_core.trainers.publication import GroupPublisher
from stitch_core.trainers.settings import TrainerSettings

DENSITY = 0.01
FILES = PosixFiles()


def policy(rng: np.random.Generator, megabytes: int) -> dict[str, np.ndarray]:
    """BF16 matrices as 16-bit integers, 16 MiB each."""
    return {
        f"model.layers.{i}.mlp.up_proj.weight": rng.integers(0, 1 << 16, (2048, 4096), np.uint16)
        for i in range(megabytes // 16)
    }


def learn(rng: np.random.Generator, weights: dict[str, np.ndarray]) -> None:
    """About one element in a hundred moves by one unit in the last place."""
    for value in weights.values():
        value.reshape(-1)[rng.integers(0, value.size, int(value.size * DENSITY))] ^= 1


def tensors(weights: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: Tensor("BF16", value.shape, value.tobytes()) for name, value in weights.items()}


def own_encoder(root: Path, megabytes: int, rounds: int) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    weights = policy(rng, megabytes)
    write_checkpoint(root / "boot", FILES, tensors(weights))
    settings = TrainerSettings("bench", f"file:{root}/store", root / "boot", root / "work")
    publisher = GroupPublisher(settings, Solo())
    publisher.claim()
    delta = OwnDelta(publisher, FILES)
    delta.publish(tensors(weights))
    full: list[float] = []
    ours: list[float] = []
    for number in range(rounds):
        learn(rng, weights)
        now = tensors(weights)
        directory = root / f"full-{number}"
        times = interleaved(
            {
                "full": lambda directory=directory, now=now: write_checkpoint(directory, FILES, now),
                "ours": lambda now=now: delta.publish(now),
            },
            1,
        )
        full += times["full"]
        ours += times["ours"]
        FILES.remove_tree(directory)
    publisher.close()
    stored = sum(f.stat().st_size for f in root.glob("store/runs/bench/e*/*/*")) / rounds
    yield Row(
        "T2", f"ratio: a publish by Stitch's own encoder to a full checkpoint's write ({megabytes} MB)",
        median_ratio(ours, full), excludes="the framework's gather, which both need",
    )  # fmt: skip
    yield Row(
        "T3", f"seconds of that publish; {stored / 1e6:.1f} MB went to the store", statistics.median(ours)
    )


def slime_writer(checkout: str, quick: bool) -> Iterator[Row]:
    """The stock writer, in a process of its own: it needs stand-ins that nothing else here does."""
    script = Path(__file__).with_name("_slime_writer.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), checkout, *(["--quick"] if quick else [])],
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"T1 failed; it needs the environment of miles-rl (see --help), this is {sys.executable}")
    ratio, stock, ours, megabytes = (float(word) for word in done.stdout.split()[-4:])
    yield Row(
        "T1", f"ratio: stock slime's delta update with Stitch's hook to one without ({megabytes:.0f} MB; "
        f"medians {ours:.2f} s and {stock:.2f} s)", ratio,
        excludes="the engines: stock slime waits for each to pull, Stitch's replicas follow by themselves",
    )  # fmt: skip


def measure(options: argparse.Namespace) -> Iterator[Row]:
    if options.slime:
        yield from slime_writer(options.slime, options.quick)
    else:
        say("T1 is left out: it needs a checkout of slime (--slime) and the environment of miles-rl")
    with tempfile.TemporaryDirectory(prefix="stitch-bench-") as root:
        yield from own_encoder(Path(root), 64 if options.quick else 256, 3 if options.quick else 7)


def main() -> None:
    assert __doc__ is not None
    run(
        __doc__, measure,
        lambda parser: parser.add_argument(
            "--slime", metavar="CHECKOUT", default=os.environ.get("STITCH_SLIME"),
            help="a checkout of slime (STITCH_SLIME)",
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main()
