"""A host's copy whose tensors take several parts, on several threads, with blame where something is wrong."""

from __future__ import annotations

import dataclasses
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard

from stitch_core.checkpoint import Checkpoint
from stitch_core.delta import fold, segments, wire, xor
from stitch_core.delta.stream import PART_BYTES
from stitch_core.files import PosixFiles
from stitch_core.host_checkpoint import HostCheckpoint, RepresentationInvalid
from stitch_core.journal import Journal, Write
from stitch_core.lineage import Plan, Undo
from stitch_core.safetensors import Tensor, read_header, write_file
from stitch_core.state import state_digest
from stitch_core.testing.checkpoints import table_of
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


@pytest.fixture(params=[False, True], ids=["whole", "segments"])
def segmented(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Tensors of 2 MiB and more are taken by several threads at once, in segments of 1 MiB, or none are."""
    if request.param:
        monkeypatch.setattr(segments, "SEGMENT_BYTES", 1 << 20)
        monkeypatch.setattr(fold, "LARGE_BYTES", 2 << 20)
    return bool(request.param)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("batch_bytes", [pytest.param(1000, marks=pytest.mark.slow), None])
def test_every_encoding_in_one_pass_and_back(
    tmp_path: Path, run: RunBuilder, segmented: bool, workers: int, batch_bytes: int | None
) -> None:
    v = run.versions
    host = HostCheckpoint(tmp_path / "host", FILES, batch_bytes=batch_bytes, workers=workers)
    host.open()
    host.seed(run.boot, v[0])
    back = tuple(Undo(each) for each in reversed(v[1:4]))
    for plan in (
        Plan(v[1], v[0].state, None, (v[1],)),
        Plan(v[0], v[1].state, None, (Undo(v[1]),)),
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


def copied(run: RunBuilder, number: int, target: Path) -> Path:
    target.mkdir()
    for path in run.directory_of(run.versions[number]).iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize("above_a_full", [False, True])
@pytest.mark.parametrize("element", [3, PART_BYTES // 2 + 5, PART_BYTES + 12_344])
def test_a_wrong_change_in_any_part_of_a_sparse_delta_is_blamed_on_it(
    tmp_path: Path, segmented: bool, element: int, above_a_full: bool
) -> None:
    """Threads that wait for the part that is wrong end too.

    Found here: above a full the new bytes of earlier parts were written by then, and so the copy was blamed,
    and the same delta taken again, for ever.
    """
    run = RunBuilder(tmp_path / "run", FILES, layout=LAYOUT)
    if above_a_full:
        run.full()
    right = run.delta(density=0.01, encoding="sparse")
    base, last = run.versions[-2], run.tensors[-1]
    wrong = bytearray(last["big"].data)
    wrong[2 * element] ^= 1
    other = RunBuilder(tmp_path / "other", FILES, layout=LAYOUT)
    other.delta({**last, "big": Tensor("BF16", last["big"].shape, bytes(wrong))}, encoding="sparse")
    directory = copied(other, 1, tmp_path / "wrong")
    path = directory / "model-00000.sparse"
    whole = path.read_bytes()
    digests = [table_of(tensors)["big"].digest for tensors in (other.tensors[1], last)]
    path.write_bytes(retold(whole, *digests))
    host = HostCheckpoint(tmp_path / "host", FILES, workers=3)
    host.open()
    host.seed(run.boot, run.versions[0])
    files = tuple(
        dataclasses.replace(file, size=(directory / file.name).stat().st_size)
        for file in right.representation.files
    )
    right = dataclasses.replace(right, representation=dataclasses.replace(right.representation, files=files))
    plan = Plan(right, None if above_a_full else base.state, base if above_a_full else None, (right,))
    with pytest.raises(RepresentationInvalid, match=r"tensor big in .* becomes") as caught:
        host.apply(plan, lambda source: directory if source is right else run.directory_of(source))
    assert caught.value.manifest_digest == right.digest()
    assert Checkpoint.open(host.directory, FILES).state() == run.versions[0].state
    host.close()


def retold(whole: bytes, before: str, after: str) -> bytes:
    """A sparse file whose tables say another digest."""
    at, stored, raw, *rest = struct.unpack("<6Q", whole[-64:-16])
    tables = zstandard.ZstdDecompressor().decompress(whole[at : at + stored])
    tables = wire.compress(tables.replace(bytes.fromhex(before), bytes.fromhex(after)))
    foot = struct.pack("<6Q", at, len(tables), raw, *rest)
    check = struct.pack("<Q", xxhash.xxh3_64_intdigest(tables + foot))
    return whole[:at] + tables + foot + check + whole[-8:]


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["sparse", "xor", "overwrite"])
def test_the_journal_and_memory_are_bounded_though_all_of_one_large_tensor_changes(
    tmp_path: Path, encoding: str
) -> None:
    """A record ends within a tensor, and no more than a few parts of it and of its frame are in memory."""
    size = 96 << 20
    run = RunBuilder(tmp_path / "run", FILES, layout={"big": ("U8", (size,)), "small": ("F32", (9,))})
    words = np.frombuffer(run.tensors[0]["big"].data, np.uint8) ^ np.random.default_rng(0).integers(
        1, 256, size, np.uint8
    )
    run.delta({**run.tensors[0], "big": Tensor("U8", (size,), words.tobytes())}, encoding=encoding)
    v = run.versions
    host = HostCheckpoint(tmp_path / "host", FILES, batch_bytes=1 << 20, workers=1)
    host.open()
    host.seed(run.boot, v[0])
    run.tensors.clear()
    tracemalloc.start()
    try:
        host.apply(Plan(v[1], v[0].state, None, (v[1],)), run.directory_of)
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "host" / "journal").stat().st_size < (1 << 20) + PART_BYTES + 1000
    assert held < 100 << 20
    assert Checkpoint.open(host.directory, FILES).state() == v[1].state
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
        assert journal.redo("t", tmp_path) is None
        (tmp_path / "journal").write_bytes(whole[:at])
        assert journal.redo("t", tmp_path) is None
    (tmp_path / "journal").write_bytes(whole)
    for _ in range(2):
        assert journal.redo("t", tmp_path) == {}
        assert (tmp_path / "data").read_bytes() == b"xy" + new.tobytes()
    # A page that was not written, and one that was: it comes right all the same.
    torn = bytearray(b"xy" + old.tobytes())
    torn[2000:] = (b"xy" + new.tobytes())[2000:]
    (tmp_path / "data").write_bytes(torn)
    assert journal.redo("t", tmp_path) == {}
    assert (tmp_path / "data").read_bytes() == b"xy" + new.tobytes()
