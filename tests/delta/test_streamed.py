"""A delta between two checkpoints on disk: what DeltaEncoder makes of it, with a few tensors in memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from stitch_core.checkpoint import Checkpoint
from stitch_core.delta.directory import DeltaDirectory
from stitch_core.delta.encoder import DeltaEncoder
from stitch_core.delta.prove import prove_delta
from stitch_core.delta.streamed import stream_delta
from stitch_core.delta.wire import DeltaError
from stitch_core.state import state_digest
from stitch_core.testing.checkpoints import ODD, random_tensors, step, table_of, write_checkpoint
from tests.small_run import FILES, Tensors

LARGE = {f"layer.{i}": ("BF16", (1024, 1024)) for i in range(16)}  # 2 MiB each


@pytest.mark.parametrize("encoding", ["xor", "sparse"])
@pytest.mark.parametrize("group_bytes", [1, 1 << 12, 1 << 30])
def test_it_is_what_the_encoder_makes_of_all_at_once(tmp_path: Path, encoding: str, group_bytes: int) -> None:
    rng = np.random.default_rng(0)
    old: Tensors = random_tensors(rng, ODD)
    names = [name for i, name in enumerate(old) if i % 2]
    new = {**old, **step(rng, {name: old[name] for name in names}, 0.3)}
    write_checkpoint(tmp_path / "old", FILES, old, 2)
    done = stream_delta(
        Checkpoint.open(tmp_path / "old", FILES), lambda name, *_: new[name].data, tmp_path / "delta",
        encoding=encoding, number=2, base_number=1, group_bytes=group_bytes,
    )  # fmt: skip
    whole = DeltaEncoder(old, encoding).encode(new, tmp_path / "whole", FILES, number=2, base_number=1)
    assert done.tensors == len(old)
    for field in ("base", "state", "encoding", "changed", "changed_elements", "elements", "changed_bytes"):
        assert getattr(done.delta, field) == getattr(whole, field), field
    delta = DeltaDirectory.open(tmp_path / "delta", FILES)
    changed, state = prove_delta(delta, Checkpoint.open(tmp_path / "old", FILES), table_of(old))
    assert (changed, state) == (dict(whole.changed), state_digest(table_of(new)))
    assert sorted(done.delta.files) == FILES.list(tmp_path / "delta")


def test_another_layout_is_refused(tmp_path: Path) -> None:
    old = random_tensors(np.random.default_rng(0), ODD)
    write_checkpoint(tmp_path / "old", FILES, old)
    with pytest.raises(DeltaError, match="scale"):
        stream_delta(
            Checkpoint.open(tmp_path / "old", FILES),
            lambda name, *_: b"12" if name == "scale" else old[name].data, tmp_path / "delta",
            encoding="xor", number=1, base_number=0,
        )  # fmt: skip


@pytest.mark.parametrize("encoding", ["xor", "sparse"])
def test_c43_neither_model_is_in_memory(tmp_path: Path, encoding: str) -> None:
    rng = np.random.default_rng(0)
    old = random_tensors(rng, LARGE)
    write_checkpoint(tmp_path / "old", FILES, old, 4)
    write_checkpoint(tmp_path / "new", FILES, step(rng, old, 0.001), 4)
    size = sum(len(tensor.data) for tensor in old.values())
    del old
    new = Checkpoint.open(tmp_path / "new", FILES)
    tracemalloc.start()
    try:
        stream_delta(
            Checkpoint.open(tmp_path / "old", FILES), lambda name, *_: new.read(name), tmp_path / "delta",
            encoding=encoding, number=1, base_number=0, group_bytes=1, workers=1,
        )  # fmt: skip
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size / 2
