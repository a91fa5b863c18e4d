"""Files that lie, down to the last bit: refused or detected before anything of them is activated."""

from __future__ import annotations

import contextlib
import json
import random
import struct
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import zstandard

from stitch_core.chain import ChainReader
from stitch_core.checkpoint import Checkpoint
from stitch_core.delta import DeltaError, overwrite, wire
from stitch_core.delta.merge import merge_deltas
from stitch_core.dialects import INDEX_NAME, read_index
from stitch_core.files import PosixFiles
from stitch_core.head import Head
from stitch_core.host_checkpoint import HostCheckpoint, HostCheckpointError, RepresentationInvalid
from stitch_core.lineage import Plan
from stitch_core.manifest import FormatError, Manifest, PayloadFile
from stitch_core.pins import Pin
from stitch_core.planner import Planner
from stitch_core.safetensors import CheckpointError, read_header
from stitch_core.testing.faults import FaultPlan, Faults
from stitch_core.testing.process import SimulatedProcess
from stitch_core.testing.runs import RunBuilder
from stitch_core.testing.sim_files import SimulatedMachine
from tests.anchored_run import upload_span
from tests.delta.frames import decompress
from tests.replica.following import Following

FILES = PosixFiles()
LAYOUT: dict[str, tuple[str, tuple[int, ...]]] = {"a": ("BF16", (24,)), "b": ("U8", (9,))}
ENCODINGS = ("xor", "overwrite", "sparse")


class Small:
    """A host at version 0 of a run with one delta, all of it in memory."""

    def __init__(self, encoding: str) -> None:
        faults = Faults(FaultPlan(), random.Random(0), lambda: 0.0)
        process = SimulatedProcess(cast(Any, SimpleNamespace()), "host")
        self.files = SimulatedMachine("host", faults).files(process)
        self.run = RunBuilder(Path("/run"), self.files, layout=LAYOUT, shards=1)
        self.delta = self.run.delta(density=0.3, encoding=encoding)
        self.host = HostCheckpoint(Path("/host"), self.files, workers=1)
        self.host.open()
        self.seed()
        directory = self.run.directory_of(self.delta)
        self.contents = {name: self.files.read(directory / name) for name in self.files.list(directory)}

    def seed(self) -> None:
        self.host.seed(self.run.boot, self.run.versions[0])

    def apply(self, name: str, data: bytes) -> None:
        """With ``data`` in place of one file's, of which only the size is what the manifest says."""
        path = self.run.directory_of(self.delta) / name
        self.files.remove(path)
        self.files.write_new(path, data)
        listed = tuple(
            replace(file, size=len(data)) if file.name == name else file
            for file in self.delta.representation.files
        )
        delta = replace(self.delta, representation=replace(self.delta.representation, files=listed))
        try:
            self.host.apply(Plan(delta, delta.representation.base, None, (delta,)), self.run.directory_of)
        finally:
            self.files.remove(path)
            self.files.write_new(path, self.contents[name])

    def holds(self, number: int) -> bool:
        holding = self.host.holding
        state = Checkpoint.open(self.host.directory, self.files).state()
        return holding is not None and holding.state == state == self.run.versions[number].state


def damaged(data: bytes, step: int) -> Iterator[bytes]:
    """Every ``step``-th cut and flipped bit."""
    yield from (data[:length] for length in range(0, len(data), step))
    for bit in range(0, 8 * len(data), step):
        yield data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]
    yield from (data + b"\0", data + data, b"\0" + data)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_any_damage_to_a_delta_is_refused_or_changes_nothing(encoding: str, step: int) -> None:
    """As if the digests of the files, which find it before, were not there."""
    small, harmless = Small(encoding), 0
    assert len(small.contents) == 2
    for name, data in small.contents.items():
        for bad in damaged(data, step):
            try:
                small.apply(name, bad)
            except (RepresentationInvalid, HostCheckpointError):
                assert small.holds(0)
            else:
                harmless += 1  # a label of the index, or a letter of the header's own names
                assert small.holds(1)
                small.seed()
    assert harmless * step < 8 * sum(map(len, small.contents.values())) // 3


@pytest.fixture
async def following(tmp_path: Path) -> Following:
    """A run at version 4 with a span from 0 to 4."""
    found = Following(tmp_path)
    for _ in range(4):
        await found.publish()
    await upload_span(found.memory, found.root, found.trainer, found.versions[0], found.versions[4])
    return found


@pytest.mark.parametrize("step", [17, pytest.param(1, marks=pytest.mark.slow)])
async def test_a_damaged_span_document_is_never_in_a_plan(following: Following, step: int) -> None:
    objects = following.memory.state.objects
    (key,) = (key for key in objects if key.endswith("/span.json"))
    right, target = objects[key], following.versions[4]

    async def plan() -> Plan:
        reader = ChainReader(following.memory)
        return await Planner(following.memory, reader, piece_cost=0).plan(
            target, {following.versions[0].state}
        )

    assert [source.digest() for source in (await plan()).sources] != [
        manifest.digest() for manifest in following.versions[1:5]
    ]
    for bad in damaged(right, step):
        objects[key] = bad
        assert [source.digest() for source in (await plan()).sources] == [
            manifest.digest() for manifest in following.versions[1:5]
        ]


async def follow(following: Following) -> Plan:
    """What a replica at version 1 does."""
    reader, run = ChainReader(following.memory), following.versions[0].run
    newest = await reader.manifest(run, (await reader.head(run))[0])
    planner = Planner(following.memory, reader, piece_cost=0)
    return await planner.plan(newest, {following.versions[1].state})


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("step", [17, pytest.param(1, marks=pytest.mark.slow)])
async def test_a_damaged_manifest_is_never_read(following: Following, number: int, step: int) -> None:
    """Neither the head's own, nor one that its history names."""
    objects = following.memory.state.objects
    (key,) = (key for key in objects if f"/manifests/{number:06d}." in key)
    right = objects[key]
    assert len((await follow(following)).sources) == 3
    for bad in damaged(right, step):
        objects[key] = bad
        with pytest.raises(FormatError):
            await follow(following)


# ---------------------------------------------------------------------------------------------- bombs


def from_file(data: bytes) -> wire.FrameFile:
    return wire.FrameFile(lambda offset, count: data[offset : offset + count], len(data))


@cache
def frames() -> dict[str, bytes]:
    """Payloads for a tensor of 3 MiB, of more than one read each; "right" is the only right one."""
    size = 3 << 20
    noise = np.random.default_rng(0).bytes(size)
    streamed = zstandard.ZstdCompressor(level=1).compressobj()
    right = wire.compress(noise)
    return {
        "right": right,
        "without size": streamed.compress(noise) + streamed.flush(),
        "with checksum": zstandard.ZstdCompressor(level=1, write_checksum=True).compress(noise),
        "two frames": right + wire.compress(b"x"),
        "junk": right + bytes(2 << 20),
        "cut": right[:-1],
        "cut in the middle": right[: len(right) // 2],
        "too long": wire.compress(noise + b"x"),
        "too short": wire.compress(noise[:-1]),
        "a bomb": wire.compress(noise[: 1 << 20] + bytes(64 << 20)),
        "no frame": noise,
    }


FINE = ("right", "without size", "with checksum")


@pytest.mark.parametrize("name", frames())
def test_a_large_frame_is_read_from_its_file_as_strictly_as_from_memory(name: str) -> None:
    frame, size = frames()[name], 3 << 20
    right = decompress(frames()["right"], size)
    found, errors = [], []
    tracemalloc.start()
    try:
        for source in (frame, from_file(frame)):
            out = np.zeros(size, np.uint8)
            try:
                reader = wire.FrameReader(source)
                reader.read_into(out)
                reader.finish()
                found.append(out)
            except DeltaError as error:
                errors.append(str(error))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert (len(found), len(errors)) == ((2, 0) if name in FINE else (0, 2))
    assert all(np.array_equal(out, right) for out in found)


def test_a_walk_in_pieces_of_any_size_ends_where_the_frame_does() -> None:
    data = b"".join(struct.pack("<I", i // 3) for i in range(60_000))
    for level, checksum in ((1, False), (19, True)):
        frame = zstandard.ZstdCompressor(level=level, write_checksum=checksum).compress(data)
        for piece in (1, 2, 3, 7, 1000, len(frame)):
            walk = wire._Walk()
            for at in range(0, len(frame), piece):
                walk.feed(frame[at : at + piece])
            walk.feed(b"more")
            assert walk.end == len(frame) == wire.frame_length(frame + b"more")


@pytest.mark.parametrize(
    "positions",
    [[3, 2], [1, 1], [5, 1 << 21], [0, 8 << 20], [*range(300_000), 5], [*range(300_000), 8 << 20]],
)
def test_overwrite_positions_that_do_not_ascend_within_the_tensor_are_found_in_any_part(
    positions: list[int],
) -> None:
    n, size = len(positions), 8 << 20
    frame = wire.compress(struct.pack("<I", n) + np.array(positions, "<u4").tobytes() + bytes(n))
    data = np.ones(size, np.uint8)
    if positions == [5, 1 << 21]:
        overwrite.apply(data, frame)
        assert np.flatnonzero(data == 0).tolist() == positions
        return
    with pytest.raises(DeltaError, match="ascending"):
        overwrite.apply(data, frame)


def test_an_overwrite_says_how_many_before_it_is_believed() -> None:
    for count, words in ((101, "101 bytes in a tensor of 100"), (100, "early"), (0, "more bytes")):
        frame = wire.compress(struct.pack("<I", count) + b"\1")
        with pytest.raises(DeltaError, match=words):
            overwrite.apply(np.zeros(100, np.uint8), frame)


# ---------------------------------------------------------------------------------- names and numbers

NAMES = ("../../x", "/etc/stitch", "a\0b", "." * 300, "..", "n" * 70_000, "c\\d", "line\nbreak", "ü/权")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_names_are_names_and_never_paths(tmp_path: Path, encoding: str) -> None:
    run = RunBuilder(tmp_path / "run", FILES, layout=dict.fromkeys(NAMES, ("BF16", (40,))))
    for _ in range(2):
        run.delta(density=0.5, encoding=encoding)
    v = run.versions
    host = HostCheckpoint(tmp_path / "host", FILES, workers=2)
    host.open()
    host.seed(run.boot, v[0])
    host.apply(Plan(v[2], v[0].state, None, (v[1], v[2])), run.directory_of)
    assert Checkpoint.open(host.directory, FILES).state() == v[2].state
    host.close()
    with contextlib.suppress(DeltaError):  # of what only goes forwards
        merge_deltas(v[1:3], run.directory_of, tmp_path / "merged", FILES, number=2, base_number=0)
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert all(
        name in ("marker.json", "journal", "lock", "config.json", INDEX_NAME)
        or name.endswith((".safetensors", ".sparse"))
        for name in names
    )
    assert {path.name for path in tmp_path.iterdir()} <= {"run", "host", "merged"}


def header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def test_numbers_and_names_that_would_take_for_ever_are_refused_at_once(tmp_path: Path) -> None:
    """Found here: millions of sizes were multiplied out, and of many names each was counted."""
    sizes = ",".join([str(2**62)] * 400_000)
    names = ",".join(f'"{i}":{{}}' for i in range(200_000))
    path = tmp_path / "model.safetensors"
    for text in (
        f'{{"a":{{"dtype":"U8","shape":[{sizes}],"data_offsets":[0,1]}}}}',
        f'{{{names},"199999":{{}}}}',
        '{"a":{"dtype":"U8","shape":[' + "1" * 4000 + '],"data_offsets":[0,1]}}',
        '{"a":{"dtype":"U8","shape":[' + "1" * 9000 + '],"data_offsets":[0,1]}}',
        '{"a":' + "[" * 100_000,
        '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"data_offsets":[0,1]}}',
        '{"__metadata__":{"a":"1","a":"2"}}',
    ):
        path.write_bytes(header(text.encode()) + b"x")
        start = time.process_time()
        with pytest.raises(CheckpointError, match=r"model\.safetensors") as caught:
            read_header(path, FILES)
        assert time.process_time() - start < 5
        assert len(str(caught.value)) < 10_000


@pytest.mark.parametrize(
    "text",
    [
        '{"metadata":{"version":' + "1" * 5000 + '},"weight_map":{}}',
        '{"metadata":{"delta_encoding":"xor","delta_encoding":"sparse"},"weight_map":{}}',
        '{"metadata":{"delta_encoding":"xor"},"metadata":{},"weight_map":{}}',
        '{"metadata":' + '{"a":' * 50_000 + "1" + "}" * 50_001,
        '{"weight_map":{},"metadata":{"delta_encoding":"sparse","sparse_files":["../x.sparse"]}}',
        '{"weight_map":{},"metadata":{"delta_encoding":"sparse","sparse_files":["a\\u0000.sparse"]}}',
        '{"weight_map":{},"metadata":{"delta_encoding":"sparse","sparse_files":{"a.sparse":1}}}',
    ],
)
def test_an_index_that_is_no_honest_one_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="index"):
        read_index(text.encode(), "index")


def test_an_index_with_a_file_name_that_no_disk_takes(tmp_path: Path) -> None:
    """It is looked for among the names that are there, and never opened."""
    metadata = {
        "delta_encoding": "sparse",
        "compression_format": "zstd",
        "sparse_files": ["n" * 5000 + ".sparse"],
    }
    (tmp_path / INDEX_NAME).write_text(json.dumps({"metadata": metadata, "weight_map": {}}))
    run = RunBuilder(tmp_path / "run", FILES, layout=LAYOUT)
    delta = run.delta(encoding="sparse")
    host = HostCheckpoint(tmp_path / "host", FILES)
    host.open()
    host.seed(run.boot, run.versions[0])
    index = PayloadFile(INDEX_NAME, (tmp_path / INDEX_NAME).stat().st_size, "")
    lie = replace(delta, representation=replace(delta.representation, files=(index,)))
    with pytest.raises(RepresentationInvalid, match=r"nnn\.sparse: named by the index"):
        host.apply(Plan(lie, run.versions[0].state, None, (lie,)), lambda _: tmp_path)
    host.close()


def test_a_manifest_with_a_number_that_is_too_large(tmp_path: Path) -> None:
    data = RunBuilder(tmp_path / "run", FILES, layout=LAYOUT).versions[0].encode()
    for number in ("9" * 5000, "1e400", "-1", "1.0"):
        with pytest.raises(FormatError):
            Manifest.decode(data.replace(b'"number":0', b'"number":' + number.encode()), "x")


@pytest.mark.parametrize("time", [10**400, -(10**400), 1e12, True, "1"])
def test_a_time_that_nothing_can_reckon_with(time: Any) -> None:
    """A head of the year 10**392 ended 'stitch status' and a collector with an OverflowError."""
    digest, key = "sha256:" + "0" * 64, "manifests/000001.e0001.json"
    head, pin = Head(1, 1, key, digest, "w", time), Pin("r", 1, digest, time)
    for decode, data in ((Head.decode, head.encode()), (Pin.decode, pin.encode())):
        with pytest.raises(FormatError, match="time must be a number of seconds"):
            decode(data, "x")
