"""Sparse deltas: whatever was encoded applies, merges and goes back, in any width, size and density."""

import itertools
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch_core.delta.scan import scan
from stitch_core.delta.sparse_apply import apply_sparse
from stitch_core.delta.sparse_block import MAX_BLOCK_BYTES, decode_block, encode_block
from stitch_core.delta.sparse_encode import TASK_BYTES, Source, encode_sparse
from stitch_core.delta.sparse_file import SparseFile
from stitch_core.delta.sparse_layout import Block, Changed, width_of
from stitch_core.delta.sparse_merge import merge_sparse
from stitch_core.delta.sparse_writer import SparseWriter
from stitch_core.delta.wire import DeltaError
from stitch_core.state import ITEM_BITS, tensor_digest

from .sparse_cases import FILES, Weights, chains, delta, moved, rows


def applied(old: Weights, *deltas: list[SparseFile]) -> Weights:
    """``old`` after ``deltas``, each tensor in one pass; its digest must be that of the bytes."""
    new = {}
    for name, data in old.items():
        buffer = np.frombuffer(bytearray(data), np.uint8)
        homes = [file for files in deltas for file in files if name in file.tensors]
        assert apply_sparse(buffer, name, homes) == tensor_digest(buffer.data)
        new[name] = buffer.tobytes()
    return new


@given(chains(1))
def test_what_is_encoded_applies(
    tmp_path_factory: pytest.TempPathFactory, chain: tuple[list[Weights], dict[str, int]]
) -> None:
    (old, new), widths = chain
    files = delta(tmp_path_factory.mktemp("d") / "d", old, new, widths)
    assert applied(old, files) == new
    assert applied(new, files) == old


@settings(max_examples=max(20, settings.default.max_examples // 4))
@given(chains(4))
def test_deltas_merge_in_any_order_and_apply_in_one_pass(
    tmp_path_factory: pytest.TempPathFactory, chain: tuple[list[Weights], dict[str, int]]
) -> None:
    versions, widths = chain
    root = tmp_path_factory.mktemp("d")
    steps = [
        delta(root / str(i), old, new, widths) for i, (old, new) in enumerate(itertools.pairwise(versions))
    ]
    assert applied(versions[0], *steps) == versions[-1]

    def merge(name: str, *deltas: list[SparseFile]) -> list[SparseFile]:
        paths, changed = merge_sparse(deltas, lambda i: root / f"{name}-{i}", FILES)
        files = [SparseFile(path, FILES) for path in paths]
        assert {n: row for file in files for n, row in file.tensors.items()} == changed
        return files

    whole = merge("whole", *steps)
    assert [file.tensors for file in whole] == ([rows(versions[0], versions[-1], widths)] if whole else [])
    assert applied(versions[0], whole) == versions[-1]
    left = merge("left", merge("ab", *steps[:2]), merge("cd", *steps[2:]))
    right = merge("right", steps[0], merge("bcd", *steps[1:]))
    direct = delta(root / "direct", versions[0], versions[-1], widths)
    for files in (left, right, direct):
        assert [f.path.read_bytes() for f in files] == [f.path.read_bytes() for f in whole]
    back = merge("back", [SparseFile(file.path, FILES, backwards=True) for file in whole])
    assert applied(versions[-1], back) == versions[0]
    assert merge("nothing", whole, back) == []


@given(st.sampled_from([1, 2, 4, 8]), st.data())
def test_blocks_read_back(width: int, data: st.DataObject) -> None:
    gaps = data.draw(st.lists(st.integers(0, data.draw(st.sampled_from([3, 300, 70_000]))), max_size=50))
    positions = np.cumsum(np.array([g + 1 for g in gaps], np.int64)) - 1
    elements = int(positions[-1]) + 1 if gaps else 0
    values = np.array(
        data.draw(st.lists(st.integers(1, (1 << 8 * width) - 1), min_size=len(gaps), max_size=len(gaps))),
        f"<u{width}",
    )
    coded = encode_block(positions, values)
    again = decode_block(coded, width, len(gaps), elements)
    assert (again[0].tolist(), again[1].tolist(), again[1].dtype) == (
        positions.tolist(),
        values.tolist(),
        values.dtype,
    )
    for wrong in (coded[:-1], coded + b"x", coded[1:]):
        with pytest.raises(DeltaError):
            decode_block(wrong, width, len(gaps), elements) if gaps else decode_block(b"x", width, 0, 0)
    if gaps:
        with pytest.raises(DeltaError, match="changes element"):
            decode_block(coded, width, len(gaps), elements - 1)


def test_a_NaN_is_bytes_like_any_other(tmp_path: Path) -> None:
    old = np.array([np.nan, 1.0, np.nan, 0.0, -0.0], "<f4")
    new = old.copy()
    new.view("<u4")[[0, 2]] ^= 5
    new[4] = 0.0
    weights = {"a": old.tobytes()}, {"a": new.tobytes()}
    files = delta(tmp_path / "d", *weights, {"a": 4})
    assert files[0].changes == 3
    assert applied(weights[0], files) == weights[1]


def test_an_unchanged_tensor_leaves_no_trace_and_no_change_no_file(tmp_path: Path) -> None:
    old = {n: bytes(size) for n, size in (("a", 10), ("b", 3 << 20), ("c", 40), ("d", 1 << 20))}
    widths = dict.fromkeys(old, 1)
    assert delta(tmp_path / "none", old, dict(old), widths) == []
    one = delta(tmp_path / "one", old, old | {"c": b"x" * 40}, widths)
    assert one[0].names == ["c"]
    alone = delta(tmp_path / "alone", {"c": old["c"]}, {"c": b"x" * 40}, widths)
    assert one[0].path.read_bytes() == alone[0].path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_large_tensors_are_split_between_threads_and_files_are_bounded(tmp_path: Path, workers: int) -> None:
    rng = np.random.default_rng(0)
    size = 2 * TASK_BYTES + 12_345 * 2
    old = {"big": rng.bytes(size), "big.same": bytes(size), "mid": rng.bytes(300_000), "small": rng.bytes(64)}
    new = {n: moved(rng, d, 0.001, 2) if n != "big.same" else d for n, d in old.items()}
    tail = bytearray(old["big"])
    tail[-2] ^= 1
    for name, version in (
        ("all", new),
        ("last", old | {"big": bytes(tail)}),
        ("first", old | {"big": b"x" + old["big"][1:]}),
    ):
        files = delta(tmp_path / name, old, version, dict.fromkeys(old, 2), workers=workers)
        assert applied(old, files) == version
    files = delta(tmp_path / "small", old, new, dict.fromkeys(old, 2), workers=workers, file_bytes=1000)
    assert [file.names for file in files][:2] == [["big"], ["mid"]]
    assert applied(old, files) == new
    paths, _ = merge_sparse([files], lambda i: tmp_path / f"m{i}", FILES, file_bytes=1000)
    assert len(paths) > 1
    assert applied(old, [SparseFile(path, FILES) for path in paths]) == new


@pytest.mark.slow
@pytest.mark.parametrize("density", [0.01, 1.0])
def test_memory_is_bounded_whatever_changes(tmp_path: Path, density: float) -> None:
    rng = np.random.default_rng(0)
    sizes = {"large": 80 << 20, "mid": 24 << 20, **{f"small{i:02}": 200_000 for i in range(99)}}
    old = {name: np.zeros(size, np.uint8) for name, size in sizes.items()}
    new = {name: (rng.random(size, np.float32) < density).astype(np.uint8) for name, size in sizes.items()}
    sources = [Source(name, old[name], new[name], 1, "0" * 32) for name in sizes]
    tracemalloc.start()
    try:
        encode_sparse(sources, lambda i: tmp_path / str(i), FILES, workers=8)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
        tracemalloc.reset_peak()
        file = SparseFile(tmp_path / "0", FILES)
        for name in file.names:
            apply_sparse(old[name], name, [file])
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
    assert all(np.array_equal(old[name], new[name]) for name in sizes)


def test_C16_positions_over_4_GiB(tmp_path: Path) -> None:
    """A tensor of 12 GiB that is never in memory: only its first and its last block change."""
    size, word = 3 << 32, 4
    count = size // MAX_BLOCK_BYTES
    writer = SparseWriter(tmp_path / "a", FILES)
    change = encode_block(np.array([7], np.int64), np.array([9], "<u4"))
    for i in range(count):
        data = change if i in (0, count - 1) else b""
        writer.add_block(Block(data, MAX_BLOCK_BYTES, word, len(data) and 1))
    writer.finish({"a": Changed(size, word, "0" * 32, "1" * 32)})
    file = SparseFile(tmp_path / "a", FILES)
    found = [int(p) for piece in file.pieces("a") for p in piece.positions]
    assert found == [7, (size - MAX_BLOCK_BYTES) // word + 7]
    assert found[1] * word > 1 << 33
    writer = SparseWriter(tmp_path / "b", FILES)
    for i in range(count):
        writer.add_block(Block(change if i == 1 else b"", MAX_BLOCK_BYTES, word, int(i == 1)))
    writer.finish({"a": Changed(size, word, "1" * 32, "2" * 32)})
    merged = merge_sparse([[file], [SparseFile(tmp_path / "b", FILES)]], lambda _: tmp_path / "m", FILES)[0]
    positions = [int(p) for piece in SparseFile(merged[0], FILES).pieces("a") for p in piece.positions]
    assert positions == [7, MAX_BLOCK_BYTES // word + 7, found[1]]


def test_what_does_not_follow_is_not_merged(tmp_path: Path) -> None:
    a, b, c = ({"a": bytes([i]) * 8} for i in range(3))
    first, second = delta(tmp_path / "1", a, b, {"a": 2}), delta(tmp_path / "2", b, c, {"a": 2})
    with pytest.raises(DeltaError, match=r"2/0.sparse: tensor a .* must be "):
        merge_sparse([second, second], lambda _: tmp_path / "m", FILES)
    wide = delta(tmp_path / "3", b, c, {"a": 4})
    with pytest.raises(DeltaError, match="width 4, must be"):
        merge_sparse([first, wide], lambda _: tmp_path / "m", FILES)
    with pytest.raises(DeltaError, match="also in another file"):
        merge_sparse([[*first, *first]], lambda _: tmp_path / "m", FILES)
    assert not (tmp_path / "m").exists()


def test_a_tensor_of_another_size_is_refused_before_it_is_touched(tmp_path: Path) -> None:
    files = delta(tmp_path / "d", {"a": bytes(8)}, {"a": b"x" * 8}, {"a": 2})
    data = np.zeros(10, np.uint8)
    with pytest.raises(DeltaError, match="has 8 bytes there, 10 here"):
        apply_sparse(data, "a", files)
    assert not data.any()


def test_a_write_that_fails_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    old, new = np.zeros(300_000, np.uint8), np.ones(300_000, np.uint8)
    sources = [Source(name, old, new, 2, "0" * 32) for name in "ab"]
    with pytest.raises(OSError, match="1"):
        encode_sparse(sources, lambda i: tmp_path / str(i), FILES, file_bytes=1)
    assert [p.name for p in tmp_path.iterdir()] == ["1"]


def test_elements_have_the_width_of_their_dtype() -> None:
    widths = {dtype: width_of(dtype) for dtype in ITEM_BITS}
    assert {d for d, w in widths.items() if w == 1} == {d for d, bits in ITEM_BITS.items() if bits <= 8}
    assert (widths["BF16"], widths["F32"], widths["C64"], widths["F64"]) == (2, 4, 4, 8)


@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 4000), st.floats(0, 1), st.integers(0, 9))
def test_the_scan_finds_what_differs(width: int, count: int, density: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.bytes(count * width)
    new = moved(rng, old, density, width)
    a, b = (np.frombuffer(data, f"<u{width}") for data in (old, new))
    positions, values = scan(a.view(np.uint8), b.view(np.uint8), width)
    assert positions.tolist() == np.flatnonzero(a != b).tolist()
    assert values.tolist() == (a ^ b)[a != b].tolist()
