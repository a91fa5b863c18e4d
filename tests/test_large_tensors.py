"""A host's copy whose tensors take several parts, on several threads, with blame where something is wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from stitch_core.checkpoint import Checkpoint
from stitch_core.delta import xor
from stitch_core.delta.stream import PART_BYTES
from stitch_core.files import PosixFiles
from stitch_core.host_checkpoint import HostCheckpoint, RepresentationInvalid
from stitch_core.journal import Journal, Write
from stitch_core.lineage import Plan, Undo
from stitch_core.safetensors import Tensor, read_header, write_file
from stitch_core.state import state_digest
from stitch_core.testing.runs import RunBuilder

FILES = PosixFiles()
LAYOUT: dict[str, tuple[str, tuple[int, ...]]] = {
    "big": ("BF16", (PART_BYTES + 12_345,)), "wide": ("F32", (PART_BYTES // 4 + 1,)), "bytes": ("U8", (77,)),
    **{f"norm.{i}": ("BF16", (513,)) for i in range(40)},
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunBuilder:
    run = RunBuilder(tmp_path_factory.mktemp("run"), FILES, layout=LAYOUT)
    for encoding, density in (
        ("sparse", 0.01),
        ("xor", 0.3),
        ("sparse", 0.4),
        ("overwrite", 0.01),
        ("xor", 0.01),
    ):
        run.delta(density=density, encoding=encoding)
    return run


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("batch_bytes", [1000, None])
def test_every_encoding_in_one_pass_and_back(
    tmp_path: Path, run: RunBuilder, workers: int, batch_bytes: int | None
) -> None:
    v = run.versions
    host = HostCheckpoint(tmp_path / "host", FILES, batch_bytes=batch_bytes, workers=workers)
    host.open()
    host.seed(run.boot, v[0])
    back = tuple(Undo(each) for each in reversed(v[1:4]))
    for plan in (
        Plan(v[3], v[0].state, None, tuple(v[1:4])),
        Plan(v[0], v[3].state, None, back),
        Plan(v[5], v[0].state, None, tuple(v[1:])),
    ):
        host.apply(plan, run.directory_of)
        checkpoint = Checkpoint.open(host.directory, FILES)
        tensors = run.tensors[plan.target.number]
        assert all(checkpoint.read(name) == bytes(tensor.data) for name, tensor in tensors.items())
    host.close()
    assert host.open() is not None
    host.close()


def test_a_wrong_byte_in_a_later_part_is_blamed_on_its_delta(tmp_path: Path, run: RunBuilder) -> None:
    """Some parts were given by then: none of it is written."""
    v = list(run.versions)
    directory = tmp_path / "wrong"
    directory.mkdir()
    for name in FILES.list(run.directory_of(v[2])):
        (directory / name).write_bytes((run.directory_of(v[2]) / name).read_bytes())
    (shard,) = directory.glob("*.safetensors")
    header, data = read_header(shard, FILES), shard.read_bytes()
    frames = {n: data[r.offset : r.offset + r.nbytes] for n, r in header.tensors.items()}
    new = bytearray(run.tensors[2]["big"].data)
    new[-3] ^= 1
    frames["big"] = xor.encode(run.tensors[1]["big"].data, bytes(new))
    write_file(
        shard, FILES, {n: Tensor("U8", (len(f),), f) for n, f in frames.items()}, dict(header.metadata)
    )
    files = tuple(
        dataclasses.replace(f, size=shard.stat().st_size) if f.name == shard.name else f
        for f in v[2].representation.files
    )
    how = dataclasses.replace(v[2].representation, files=files)
    v[2] = dataclasses.replace(v[2], representation=how)
    host = HostCheckpoint(tmp_path / "host", FILES, workers=2)
    host.open()
    host.seed(run.boot, v[0])

    def directory_of(source: object) -> Path:
        return directory if source is v[2] else run.directory_of(source)  # type: ignore[arg-type]

    with pytest.raises(RepresentationInvalid, match=r"tensor big in .* becomes") as caught:
        host.apply(Plan(v[3], v[0].state, None, tuple(v[1:4])), directory_of)
    assert caught.value.manifest_digest == v[2].digest()
    assert host.holding is not None
    assert state_digest(Checkpoint.open(host.directory, FILES).table()) == v[0].state
    host.close()


def test_read_into_fills_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abcdef")
    out = bytearray(b"......")
    assert FILES.read_into(tmp_path / "f", 4, memoryview(out)) == 2
    assert out == b"ef...."
    assert FILES.read_into(tmp_path / "f", 9, memoryview(out)) == 0


def test_a_redo_journal_has_new_values_only_and_any_flipped_byte_voids_it(tmp_path: Path) -> None:
    old = np.random.default_rng(0).integers(0, 256, 4000, np.uint8)
    new = old.copy()
    new[[6, 7, 2000, 3999]] ^= 0x55
    (tmp_path / "data").write_bytes(b"xy" + old.tobytes())
    journal = Journal(tmp_path / "journal", FILES)
    journal.create()
    write = Write.difference("data", 2, old, new, 2)
    assert write is not None
    assert Write.difference("data", 2, old, old, 2) is None
    record = journal.record("t")
    record.add([write])
    record.seal()
    whole = (tmp_path / "journal").read_bytes()
    assert len(whole) < 200
    for at in range(len(whole)):
        (tmp_path / "journal").write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert not journal.redo("t", tmp_path)
        (tmp_path / "journal").write_bytes(whole[:at])
        assert not journal.redo("t", tmp_path)
    (tmp_path / "journal").write_bytes(whole)
    for _ in range(2):
        assert journal.redo("t", tmp_path)
        assert (tmp_path / "data").read_bytes() == b"xy" + new.tobytes()
    # A page that was not written, and one that was: it comes right all the same.
    torn = bytearray(b"xy" + old.tobytes())
    torn[2000:] = (b"xy" + new.tobytes())[2000:]
    (tmp_path / "data").write_bytes(torn)
    assert journal.redo("t", tmp_path)
    assert (tmp_path / "data").read_bytes() == b"xy" + new.tobytes()
