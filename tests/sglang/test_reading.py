"""A checkpoint's tensors over its own pages, and what proves which one it was."""

from __future__ import annotations

import json
import os
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from stitch_core.checkpoint import Checkpoint, CheckpointError
from stitch_core.files import PosixFiles
from stitch_core.safetensors import Tensor
from stitch_core.testing.checkpoints import ODD, random_tensors, write_checkpoint
from stitch_sglang.reading import Reader
from stitch_sglang.survey import Unfit

FILES = PosixFiles()


class CalledOff(Exception):
    pass


def go_on() -> None:
    pass


def write(path: Path, tensors: dict[str, Tensor], shards: int = 2) -> Checkpoint:
    write_checkpoint(path, FILES, tensors, shards=shards)
    return Checkpoint.open(path, FILES)


@pytest.mark.parametrize("workers", [1, 3])
def test_every_tensor_and_the_state_of_all(tmp_path: Path, workers: int) -> None:
    tensors = random_tensors(np.random.default_rng(0), ODD)
    checkpoint = write(tmp_path, tensors)
    reader = Reader(tmp_path, go_on, workers)
    read = {name: (tensor.clone(), tuple(tensor.shape)) for name, tensor in reader}
    assert read.keys() == tensors.keys()
    for name, (tensor, shape) in read.items():
        assert shape == tensors[name].shape
        assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == bytes(tensors[name].data)
    assert reader.state() == checkpoint.state()
    assert reader.bytes == sum(ref.nbytes for ref in checkpoint.tensors.values())


def test_what_a_loader_writes_to_a_tensor_stays_out_of_the_file(tmp_path: Path) -> None:
    """Some add one to their norms in place."""
    write(tmp_path, random_tensors(np.random.default_rng(0), {"norm": ("F32", (8,)), "w": ("BF16", (4, 4))}))
    before = {path: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    reader = Reader(tmp_path, go_on)
    for _, tensor in reader:
        tensor.add_(1)
    assert {path: path.read_bytes() for path in before} == before


def test_a_tensor_at_an_odd_place_in_its_file(tmp_path: Path) -> None:
    """Other writers do not align the data; torch looks at no four bytes from an odd one on."""
    values = np.arange(3, dtype="<f4")
    header = json.dumps({
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "x": {"dtype": "F32", "shape": [3], "data_offsets": [3, 15]},
    }).encode()  # fmt: skip
    data = struct.pack("<Q", len(header)) + header + b"abc" + values.tobytes()
    (tmp_path / "model.safetensors").write_bytes(data)
    reader = Reader(tmp_path, go_on)
    read = dict(reader)
    assert read["x"].tolist() == [0.0, 1.0, 2.0]
    assert reader.state() == Checkpoint.open(tmp_path, FILES).state()


def test_a_file_that_is_cut_meanwhile_is_named(tmp_path: Path) -> None:
    tensors = {f"t{i}": Tensor("U8", (1 << 14,), bytes(1 << 14)) for i in range(4)}
    shard = write(tmp_path, tensors, shards=1).tensors["t3"].file
    reading = iter(Reader(tmp_path, go_on))
    next(reading)
    with open(shard, "r+b") as file:
        file.truncate(shard.stat().st_size - (1 << 14))
    with pytest.raises(CheckpointError, match=f"{shard.name}: tensor t3 is cut short"):
        list(reading)


def test_a_file_that_is_written_to_between_hashing_and_copying_is_told(tmp_path: Path) -> None:
    """A stage that is called off may read on, while the next version is applied to the same files."""
    checkpoint = write(tmp_path, random_tensors(np.random.default_rng(0), ODD))
    ref = next(ref for ref in checkpoint.tensors.values() if ref.nbytes)
    status = ref.file.stat()
    os.utime(ref.file, ns=(status.st_atime_ns, status.st_mtime_ns - 10**9))
    reader = Reader(tmp_path, go_on)
    for name, tensor in reader:
        if name == next(iter(checkpoint.tensors)):
            FILES.write_at(ref.file, ref.offset, bytes([FILES.read(ref.file, ref.offset, 1)[0] ^ 1]))
        tensor.clone()
    with pytest.raises(CheckpointError, match=f"{ref.file.name} was changed while it was loaded"):
        reader.state()


@pytest.mark.parametrize("workers", [1, 3])
def test_a_reader_that_is_called_off_ends_with_its_threads(tmp_path: Path, workers: int) -> None:
    write(tmp_path, random_tensors(np.random.default_rng(0), ODD))
    calls: list[int] = []

    def stop() -> None:
        calls.append(1)
        if len(calls) > 2:
            raise CalledOff

    with pytest.raises(CalledOff):
        list(Reader(tmp_path, stop, workers))
    assert not [one for one in threading.enumerate() if one.name.startswith("stitch-parallel")]


def test_a_loader_that_stops_early_is_told(tmp_path: Path) -> None:
    write(tmp_path, random_tensors(np.random.default_rng(0), ODD))
    reader = Reader(tmp_path, go_on)
    next(iter(reader))
    with pytest.raises(Unfit, match="stopped before tensor"):
        reader.state()
