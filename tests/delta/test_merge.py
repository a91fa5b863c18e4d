"""Merging XOR deltas without their base: promise 1, the merged one does exactly what they do one by one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from stitch_core.checkpoint import Checkpoint
from stitch_core.delta import wire
from stitch_core.delta.directory import DeltaDirectory
from stitch_core.delta.fold import RepresentationInvalid
from stitch_core.delta.merge import compose, merge_deltas, merge_frames, prove_merged
from stitch_core.delta.wire import CHUNK_BYTES, DeltaError
from stitch_core.lineage import Source, Undo
from stitch_core.testing.checkpoints import random_tensors, table_of, write_checkpoint
from stitch_core.testing.runs import RunBuilder
from tests.delta.frames import decompress
from tests.small_run import FILES, LAYOUT


@pytest.fixture
def run(tmp_path: Path) -> RunBuilder:
    return RunBuilder(tmp_path, FILES, layout=LAYOUT)


def merged(run: RunBuilder, deltas: list[Source], out: str = "merged", **how: int) -> DeltaDirectory:
    path = run.root / out

    def directory_of(source: Source) -> Path:
        manifest = source.source if isinstance(source, Undo) else source
        return run.directory_of(manifest)  # type: ignore[arg-type]

    done = merge_deltas(deltas, directory_of, path, FILES, number=9, base_number=8, **how)
    assert sorted(done.files) == sorted(FILES.list(path))
    assert done.changed == compose(deltas)
    directory = DeltaDirectory.open(path, FILES)
    assert set(directory.payloads) == set(done.changed)
    assert {n: p.checksum for n, p in directory.payloads.items()} == {
        n: p[1] for n, p in done.changed.items()
    }
    return directory


def check(run: RunBuilder, directory: DeltaDirectory, deltas: list[Source], before: int, after: int) -> None:
    """Applied to ``before`` it gives ``after``, and the other way round."""
    for number in (before, after):
        where = run.root / f"full-{number}"
        write_checkpoint(where, FILES, run.tensors[number])
        prove_merged(directory, compose(deltas), Checkpoint.open(where, FILES), table_of(run.tensors[number]))


def test_any_piece_of_the_chain_forwards_and_backwards(run: RunBuilder) -> None:
    for _ in range(5):
        run.delta(density=0.05)
    for first, last in ((1, 5), (2, 4), (3, 3)):
        forward: list[Source] = list(run.versions[first : last + 1])
        check(run, merged(run, forward, f"f{first}{last}"), forward, first - 1, last)
        backward: list[Source] = [Undo(m) for m in reversed(run.versions[first : last + 1])]
        check(run, merged(run, backward, f"b{first}{last}"), backward, last, first - 1)


def test_there_and_back_is_nothing(run: RunBuilder) -> None:
    run.delta()
    run.delta()
    steps: list[Source] = [run.versions[1], run.versions[2], Undo(run.versions[2]), Undo(run.versions[1])]
    assert merged(run, steps).payloads == {}
    assert merged(run, [], "none").payloads == {}


def test_a_tensor_that_one_delta_changes_keeps_its_frame(run: RunBuilder) -> None:
    some = {**run.tensors[0], "b": random_tensors(np.random.default_rng(7), LAYOUT)["b"]}
    run.delta(some)
    run.delta()
    directory = merged(run, list(run.versions[1:]))
    run_b = DeltaDirectory.open(run.directory_of(run.versions[2]), FILES)
    only = set(run_b.payloads) - set(run.versions[1].representation.changed)
    assert only
    for name in only:
        assert directory.read(name) == run_b.read(name)


def test_shards_are_bounded(run: RunBuilder) -> None:
    run.delta()
    run.delta()
    directory = merged(run, list(run.versions[1:]), shard_bytes=1)
    assert len({payload.frame.file for payload in directory.payloads.values()}) == len(directory.payloads) > 1
    check(run, directory, list(run.versions[1:]), 0, 2)


def test_what_does_not_follow_is_refused(run: RunBuilder) -> None:
    for _ in range(3):
        run.delta()
    one, two, three = run.versions[1:]
    with pytest.raises(RepresentationInvalid, match="weight_v000003: starts from"):
        merged(run, [one, three])
    forged = replace(three, representation=replace(three.representation, base=one.state))
    with pytest.raises(RepresentationInvalid, match="weight_v000003: tensor a must be"):
        merged(run, [one, forged])
    assert not (run.root / "merged").exists()
    overwrite = run.delta(encoding="overwrite")
    with pytest.raises(DeltaError, match="weight_v000004: overwrite is not XOR"):
        merged(run, [three, overwrite])
    # The payload of another version: its shards say what they become.
    FILES.remove_tree(run.directory_of(two))
    (run.directory_of(three)).rename(run.directory_of(two))
    with pytest.raises(RepresentationInvalid, match="weight_v000002: tensor a becomes"):
        merged(run, [one, two])


def test_a_merged_delta_of_other_bytes_is_caught(run: RunBuilder) -> None:
    run.delta()
    where = run.root / "full"
    write_checkpoint(where, FILES, run.tensors[0])
    directory = merged(run, [run.versions[1]])
    changed = compose([run.versions[1]])
    wrong = {**changed, "a": (changed["a"][0], "0" * 32)}
    with pytest.raises(DeltaError, match=r"tensor a becomes .* where it must become 0000"):
        prove_merged(directory, wrong, Checkpoint.open(where, FILES), table_of(run.tensors[0]))
    wrong = {**changed, "a": ("1" * 32, "0" * 32)}
    with pytest.raises(DeltaError, match="neither 1111"):
        prove_merged(directory, wrong, Checkpoint.open(where, FILES), table_of(run.tensors[0]))


def unsized(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


@given(st.lists(st.binary(min_size=9, max_size=9), min_size=1, max_size=4), st.data())
def test_frames_of_all_kinds(parts: list[bytes], data: st.DataObject) -> None:
    frames = [data.draw(st.sampled_from((wire.compress, unsized)))(part) for part in parts]
    expected = np.bitwise_xor.reduce([np.frombuffer(part, np.uint8) for part in parts])
    out = merge_frames(frames)
    assert bytes(decompress(out, 9)) == expected.tobytes()
    assert zstandard.frame_content_size(out) == 9


def test_frames_longer_than_a_chunk() -> None:
    parts = np.random.default_rng(0).integers(0, 256, (3, 2 * CHUNK_BYTES + 5), np.uint8)
    out = merge_frames([wire.compress(part.data) for part in parts])
    assert (decompress(out, parts.shape[1]) == np.bitwise_xor.reduce(parts)).all()
    assert bytes(decompress(merge_frames([wire.compress(b""), unsized(b"")]), 0)) == b""


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (wire.compress(b"12345678"), "ends 1 bytes early"),
        (wire.compress(b"1234567890"), "ends 1 bytes early"),
        (unsized(b"1234567890"), "holds more bytes"),
        (b"junk", "cut short|not a zstd frame"),
        (wire.compress(b"123456789") + b"x", "is not one zstd frame"),
    ],
)
def test_frames_that_do_not_fit(other: bytes, why: str) -> None:
    with pytest.raises(DeltaError, match=re.compile(why)):
        merge_frames([wire.compress(b"123456789"), other])
