"""Transcoding between ``xor`` and ``sparse`` without the base, and merging sparse directories."""

from pathlib import Path

import numpy as np
import pytest
import zstandard

from stitch_core.checkpoint import Checkpoint
from stitch_core.delta import DeltaDirectory, DeltaEncoder, DeltaError, write_delta, xor
from stitch_core.delta.merge import merge_deltas, prove_merged
from stitch_core.delta.sparse_encode import BLOCK_BYTES
from stitch_core.delta.sparse_layout import width_of
from stitch_core.delta.transcode import sparse_to_xor, xor_to_sparse
from stitch_core.dialects import INDEX_NAME
from stitch_core.files import PosixFiles
from stitch_core.lineage import Source, Undo
from stitch_core.safetensors import Tensor
from stitch_core.testing.checkpoints import ODD, random_tensors, step, table_of, write_checkpoint
from stitch_core.testing.runs import RunBuilder

from .frames import apply_deltas

FILES = PosixFiles()
LAYOUT = ODD | {"large": ("BF16", (BLOCK_BYTES // 2 + 1000,)), "mid": ("F32", (90_000,))}


@pytest.fixture
def versions() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    rng = np.random.default_rng(0)
    old = random_tensors(rng, LAYOUT)
    return old, step(rng, old, 0.003)


@pytest.mark.parametrize("file_bytes", [1 << 30, 1])
def test_there_and_back_without_the_base(
    tmp_path: Path, versions: tuple[dict[str, Tensor], dict[str, Tensor]], file_bytes: int
) -> None:
    old, new = versions
    widths = {name: width_of(tensor.dtype) for name, tensor in old.items()}
    encoded = DeltaEncoder(old).encode(new, tmp_path / "xor", FILES, number=7, base_number=6)
    DeltaEncoder(old, "sparse").encode(new, tmp_path / "direct", FILES, number=7, base_number=6)
    stock = DeltaDirectory.open(tmp_path / "xor", FILES)
    how = {"number": 7, "base_number": 6}
    names = xor_to_sparse(
        stock, encoded.changed, widths, tmp_path / "sparse", FILES, file_bytes=file_bytes, **how
    )
    sparse = DeltaDirectory.open(tmp_path / "sparse", FILES)
    assert sorted(names) == sorted(FILES.list(tmp_path / "sparse"))
    assert sparse.changed == encoded.changed
    if file_bytes > 1:
        for name in names:
            assert (tmp_path / "direct" / name).read_bytes() == (tmp_path / "sparse" / name).read_bytes()
    sparse_to_xor(sparse, tmp_path / "back", FILES, shard_bytes=file_bytes, **how)
    back = DeltaDirectory.open(tmp_path / "back", FILES)
    assert back.payloads.keys() == encoded.changed.keys()
    for name in back.payloads:
        assert back.payloads[name].checksum == stock.payloads[name].checksum
        assert zstandard.frame_content_size(back.read(name)) == len(old[name].data)
        assert apply_deltas(old[name].data, [("xor", back.read(name))]).tobytes() == new[name].data


def test_frames_without_a_content_size_and_without_known_widths(tmp_path: Path) -> None:
    old, new = bytes(5000), bytes(4000) + b"\1" * 1000
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    frame = compressor.compress(new) + compressor.flush()
    tables = [table_of({"a": Tensor("BF16", (2500,), data)})["a"].digest for data in (old, new)]
    write_delta(tmp_path / "xor", FILES, {"a": (frame, tables[1])}, number=1, base_number=0)
    delta = DeltaDirectory.open(tmp_path / "xor", FILES)
    changed = {"a": (tables[0], tables[1])}
    xor_to_sparse(delta, changed, {}, tmp_path / "s", FILES, number=1, base_number=0)
    file = DeltaDirectory.open(tmp_path / "s", FILES).sparse["a"]
    assert (file.tensors["a"].width, file.changes) == (1, 1000)


def test_a_damaged_frame_is_refused(tmp_path: Path) -> None:
    for i, frame in enumerate((b"junk", b"junk junk", xor.encode(bytes(9), b"123456789")[:-1])):
        write_delta(tmp_path / f"x{i}", FILES, {"a": (frame, "1" * 32)}, number=1, base_number=0)
        delta = DeltaDirectory.open(tmp_path / f"x{i}", FILES)
        with pytest.raises(DeltaError, match="zstd frame"):
            xor_to_sparse(
                delta, {"a": ("0" * 32, "1" * 32)}, {}, tmp_path / "s", FILES, number=1, base_number=0
            )
    assert not (tmp_path / "s").exists()


def test_only_the_encoding_that_is_there_is_read(tmp_path: Path) -> None:
    old = {"a": Tensor("U8", (3,), b"abc")}
    encoded = DeltaEncoder(old).encode(
        {"a": Tensor("U8", (3,), b"abd")}, tmp_path / "v", FILES, number=1, base_number=0
    )
    delta = DeltaDirectory.open(tmp_path / "v", FILES)
    with pytest.raises(DeltaError, match="encoding is xor, not sparse"):
        sparse_to_xor(delta, tmp_path / "s", FILES, number=1, base_number=0)
    with pytest.raises(DeltaError, match="3 bytes has no elements of 2 bytes"):
        xor_to_sparse(delta, encoded.changed, {"a": 2}, tmp_path / "s", FILES, number=1, base_number=0)


def test_sparse_directories_merge_forwards_and_backwards(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path / "run", FILES)
    for _ in range(4):
        run.delta(encoding="sparse")

    def directory_of(source: Source) -> Path:
        return run.directory_of(source.source if isinstance(source, Undo) else source)  # type: ignore[arg-type]

    v = run.versions
    forward: list[Source] = list(v[1:5])
    backward: list[Source] = [Undo(v[4]), Undo(v[3])]
    for i, (deltas, start, end) in enumerate(((forward, 0, 4), (backward, 4, 2))):
        path = tmp_path / f"m{i}"
        merged = merge_deltas(deltas, directory_of, path, FILES, number=9, base_number=8)
        assert merged.files == ("model-00000.sparse", INDEX_NAME)
        a, b = table_of(run.tensors[start]), table_of(run.tensors[end])
        assert merged.changed == {n: (a[n].digest, b[n].digest) for n in a if a[n] != b[n]}
        write_checkpoint(tmp_path / f"c{i}", FILES, run.tensors[start])
        prove_merged(
            DeltaDirectory.open(path, FILES), merged.changed, Checkpoint.open(tmp_path / f"c{i}", FILES), a
        )
