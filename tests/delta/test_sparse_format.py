"""The sparse format: golden files that an independent reader decodes, and files that lie."""

import itertools
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash

from stitch_core.delta.sparse_block import MAX_BLOCK_BYTES, decode_block, encode_block
from stitch_core.delta.sparse_file import SparseFile
from stitch_core.delta.sparse_layout import Block, Changed
from stitch_core.delta.sparse_tables import read_tables
from stitch_core.delta.sparse_writer import SparseWriter
from stitch_core.delta.wire import DeltaError, compress
from stitch_core.files import PosixFiles
from stitch_core.state import tensor_digest

from .sparse_cases import FILES, Weights, delta, moved
from .sparse_reader import read_sparse

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def weights() -> tuple[Weights, Weights, dict[str, int]]:
    """Two versions of tensors of every width, with gaps for every shift, from a generator of our own."""
    rng = random.Random(20240607)
    sizes = {"w8": (3000, 8), "w4": (60_000, 4), "w2.dense": (2000, 2), "gewicht/ü权": (70_000, 1)}
    sizes |= {"large": (160_000, 2), "x/../y": (5, 2), "same": (9, 2)}
    old = {name: rng.randbytes(count * width) for name, (count, width) in sizes.items()}
    density = {
        "w8": 0.012,
        "w4": 0.00003,
        "w2.dense": 0.9,
        "large": 0.004,
        "gewicht/ü权": 0.001,
        "x/../y": 1.0,
    }
    new = {}
    for name, (count, width) in sizes.items():
        words = np.frombuffer(old[name], f"<u{width}").copy()
        for i in range(count):
            if rng.random() < density.get(name, 0.0):
                words[i] ^= rng.choice([1, 1, 3, 7, 1 << 8 * width - 1])
        new[name] = words.tobytes()
    return old, new, {name: width for name, (_, width) in sizes.items()}


def test_golden_files_are_read_by_another_reader_and_are_still_what_is_written(tmp_path: Path) -> None:
    old, new, widths = weights()
    golden = GOLDEN / "model-00000.sparse"
    found = read_sparse(golden)
    assert found.keys() == {name for name in old if old[name] != new[name]}
    for name, (width, before, after, changes) in found.items():
        words = np.frombuffer(old[name], f"<u{widths[name]}").copy()
        assert (width, before) == (widths[name], tensor_digest(old[name]))
        for element, value in changes.items():
            words[element] ^= value
        assert (words.tobytes(), after) == (new[name], tensor_digest(new[name]))
    (written,) = delta(tmp_path / "d", old, new, widths)
    ours = SparseFile(golden, FILES)
    assert written.tensors == ours.tensors
    for name in ours.names:  # the frames may differ between releases of zstd, what they hold may not
        pieces = [(p.positions.tolist(), p.values.tolist()) for p in ours.pieces(name)]
        assert pieces == [(p.positions.tolist(), p.values.tolist()) for p in written.pieces(name)]
    tables, data = read_tables(golden, FILES), golden.read_bytes()
    coded = [data[at:end] for at, end in itertools.pairwise(tables.offsets.tolist())]
    blocks = list(zip(coded, tables.widths.tolist(), tables.changes.tolist(), strict=True))
    assert {width for block, width, _ in blocks if block} == {1, 2, 4, 8}
    assert {block[4] for block, _, _ in blocks if block} == {0, 4, 8, 16}
    assert any(block and struct.unpack_from("<I", block)[0] > changes for block, _, changes in blocks)


class InMemory(PosixFiles):
    """Every file has the bytes ``data``."""

    data = b""

    def size(self, path: Path) -> int:
        return len(self.data)

    def read(self, path: Path, offset: int = 0, length: int | None = None) -> bytes:
        return self.data[offset:][:length]


def read_all(path: Path, files: PosixFiles = FILES) -> None:
    file = SparseFile(path, files)
    for name in file.names:
        assert list(file.pieces(name))


def test_every_truncation_and_every_flipped_bit_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    old = {"a": rng.bytes(300), "b": rng.bytes(64), "c": rng.bytes(8)}
    new = {name: moved(rng, data, 0.2, 2) for name, data in old.items()}
    (small,) = delta(tmp_path / "d", old, new, {"a": 2, "b": 1, "c": 4})
    data, files, path = small.path.read_bytes(), InMemory(), Path("bad.sparse")
    wrong = [data[:length] for length in range(len(data))]
    wrong += [data + b"\0", data + data, b"\0" + data]
    for bit in range(8 * len(data)):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        wrong.append(bytes(bad))
    for files.data in wrong:
        with pytest.raises(DeltaError, match=r"bad\.sparse"):
            read_all(path, files)
    files.data = data
    read_all(path, files)


class Forger:
    """Writes files whose checksums are right and whose contents lie."""

    def __init__(self) -> None:
        self.block = encode_block(np.array([1, 3], np.int64), np.array([5, 6], "<u2"))
        self.names = [b"a"]
        self.sizes = [16]
        self.covered, self.counts, self.widths = [16], [2], [2]
        self.raw: int | None = None
        self.tensors: int | None = None
        self.extra = b""

    def write(self, path: Path) -> None:
        count = len(self.names)
        tables = b"".join([
            struct.pack(f"<{count}I", *map(len, self.names)), *self.names,
            struct.pack(f"<{count}Q", *self.sizes), bytes(32 * count),
            *(struct.pack(f"<{len(c)}I", *c) for c in (self.covered, self.counts)),
            struct.pack(f"<{len(self.covered)}I", *[len(self.block)] * len(self.covered)),
            bytes(self.widths),
            struct.pack("<Q", xxhash.xxh3_64_intdigest(self.block)) * len(self.covered), self.extra,
        ])  # fmt: skip
        stored = compress(tables)
        blocks = b"STSPARSE" + struct.pack("<II", 1, 0) + self.block * len(self.covered)
        foot = struct.pack(
            "<6Q", len(blocks), len(stored), len(tables) if self.raw is None else self.raw,
            count if self.tensors is None else self.tensors, len(self.covered), sum(self.counts),
        )  # fmt: skip
        check = struct.pack("<Q", xxhash.xxh3_64_intdigest(stored + foot))
        path.write_bytes(blocks + stored + foot + check + b"STSPEND1")


def bomb(forger: Forger) -> None:
    forger.extra = bytes(1 << 26)
    forger.raw = 1 << 20


LIES: list[tuple[Callable[[Forger], object], str]] = [
    (lambda f: setattr(f, "raw", 1 << 60), "tables of"),
    (lambda f: setattr(f, "raw", 200 << 20), "says that it holds"),
    (lambda f: setattr(f, "tensors", 1 << 60), "tables of"),
    (lambda f: setattr(f, "tensors", 3), "tables of"),
    (lambda f: setattr(f, "extra", b"x"), "tables have"),
    (lambda f: f.sizes.__setitem__(0, 0), "without bytes"),
    (lambda f: f.sizes.__setitem__(0, 1 << 63), "too many"),
    (lambda f: f.sizes.__setitem__(0, 17), "do not cover"),
    (lambda f: f.sizes.__setitem__(0, 8), "do not cover"),
    (lambda f: f.covered.__setitem__(0, 0), "covers nothing"),
    (lambda f: (f.covered.__setitem__(0, 9 << 20), f.sizes.__setitem__(0, 9 << 20)), "more than"),
    (lambda f: f.counts.__setitem__(0, 9), "does not fit"),
    (lambda f: f.counts.__setitem__(0, 1 << 31), "does not fit"),
    (lambda f: f.counts.__setitem__(0, 1), r"changes has 2 gap symbols|has 1 gaps|gaps for 1|streams|stream"),
    (lambda f: f.counts.__setitem__(0, 3), "gap symbols"),
    (lambda f: f.widths.__setitem__(0, 3), "width"),
    (lambda f: f.widths.__setitem__(0, 0), "width"),
    (lambda f: f.widths.__setitem__(0, 4), "cut short"),
    (lambda f: (f.sizes.__setitem__(0, 6), f.covered.__setitem__(0, 6)), "changes element 3 of 3"),
    (lambda f: (f.names.append(b"a"), setattr(f, "sizes", [8, 8])), "twice"),
    (lambda f: (f.names.insert(0, b"b"), setattr(f, "sizes", [8, 8])), "not in its place"),
    (lambda f: f.names.__setitem__(0, b"\xff"), "UTF-8"),
    (lambda f: (f.names.append(b"b"), setattr(f, "sizes", [7, 9])), "element"),
    (
        lambda f: (f.covered.append(16), f.counts.append(2), f.widths.append(4), f.sizes.__setitem__(0, 32)),
        "order of their widths",
    ),
    (
        lambda f: (f.covered.append(16), f.counts.append(2), f.widths.append(1), f.sizes.__setitem__(0, 32)),
        "two widths",
    ),
    (lambda f: setattr(f, "block", f.block + b"x"), "streams end"),
    (lambda f: setattr(f, "block", b"\xff" * 4 + f.block[4:]), "gap symbols"),
    (lambda f: setattr(f, "block", f.block[:4] + b"\x05" + f.block[5:]), "shift 5"),
    (lambda f: setattr(f, "block", f.block[:5] + b"\x07" + f.block[6:]), "kind 7"),
    (lambda f: setattr(f, "block", b""), "cut short"),
    (bomb, "says that it holds"),
]


@pytest.mark.parametrize(("lie", "words"), LIES)
def test_a_file_that_lies_is_refused_within_bounds(
    tmp_path: Path, lie: Callable[[Forger], object], words: str
) -> None:
    path = tmp_path / "bad.sparse"
    forger = Forger()
    forger.write(path)
    read_all(path)
    lie(forger)
    forger.write(path)
    forger.extra = b""
    tracemalloc.start()
    try:
        with pytest.raises(DeltaError, match=rf"bad\.sparse.*({words})"):
            read_all(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_block_never_takes_more_than_it_may_cover() -> None:
    """A frame that holds a gigabyte of zeros, where some bytes are expected."""
    huge = compress(bytes(1 << 28))
    honest = encode_block(np.array([1, 3], np.int64), np.array([5, 6], "<u2"))
    heads = struct.pack("<IB", 2, 0) + struct.pack("<BI", 0, 0) + struct.pack("<BI", 1, len(huge))
    tracemalloc.start()
    try:
        with pytest.raises(DeltaError, match=f"says that it holds {1 << 28} bytes, not 2"):
            decode_block(heads + honest[15:25] + huge, 2, 2, 8)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_names_are_names_and_never_paths(tmp_path: Path) -> None:
    names = ["../../x", "/etc/passwd", "a\0b", "." * 300]
    writer = SparseWriter(tmp_path / "a", FILES)
    block = encode_block(np.arange(4, dtype=np.int64) * 8, np.ones(4, np.uint8))
    writer.add_block(Block(block, 32, 1, 4))
    writer.finish({name: Changed(8, 1, "0" * 32, "1" * 32) for name in sorted(names)})
    file = SparseFile(tmp_path / "a", FILES)
    assert sorted(file.tensors) == sorted(names)
    assert [p.positions.tolist() for name in file.names for p in file.pieces(name)] == [[0]] * 4
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_60000_tensors_take_binary_tables(tmp_path: Path) -> None:
    count = 60_000
    tensors = {f"model.layers.{i // 960:02}.mlp.experts.{i % 960:03}.up_proj.weight": i for i in range(count)}
    writer = SparseWriter(tmp_path / "a", FILES)
    for _ in range(count // 1000):
        writer.add_block(Block(b"", 1000 * 4096, 2, 0))
    digests = np.random.default_rng(0).bytes(count * 32).hex()
    rows = {
        n: Changed(4096, 2, digests[64 * i : 64 * i + 32], digests[64 * i + 32 : 64 * i + 64])
        for n, i in tensors.items()
    }
    writer.finish(rows)
    assert (tmp_path / "a").stat().st_size < 2_300_000
    assert SparseFile(tmp_path / "a", FILES).tensors == rows
    assert MAX_BLOCK_BYTES >= 1000 * 4096
