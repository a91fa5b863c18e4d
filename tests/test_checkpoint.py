"""safetensors files and checkpoint directories, against the reference package and against what is broken."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from stitch_core.checkpoint import Checkpoint, CheckpointError
from stitch_core.dialects import INDEX_NAME
from stitch_core.files import PosixFiles
from stitch_core.safetensors import Tensor, encode_header, read_header, write_file
from stitch_core.state import state_digest
from stitch_core.testing.checkpoints import ODD, random_tensors, table_of, write_checkpoint

FILES = PosixFiles()
NUMPY = {"U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "I32": "<i4", "U32": "<u4",
         "F32": "<f4", "F64": "<f8", "I64": "<i8", "U64": "<u8", "BOOL": "?"}  # fmt: skip

NAMES = st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda name: name != "__metadata__")
LAYOUTS = st.dictionaries(
    NAMES,
    st.tuples(st.sampled_from(sorted(NUMPY)), st.lists(st.integers(0, 4), max_size=3).map(tuple)),
    max_size=6,
)


def filled(layout: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, Tensor]:
    rng = np.random.default_rng(0)
    arrays = {n: np.array(rng.integers(0, 2, s)).astype(NUMPY[d]) for n, (d, s) in layout.items()}
    return {n: Tensor(*layout[n], array.tobytes()) for n, array in arrays.items()}


@given(LAYOUTS)
def test_the_writer_writes_what_the_reference_package_writes(
    tmp_path_factory: pytest.TempPathFactory, layout: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "x.safetensors"
    tensors = filled(layout)
    arrays = {n: np.frombuffer(t.data, NUMPY[t.dtype]).reshape(t.shape) for n, t in tensors.items()}
    write_file(path, FILES, tensors)
    assert path.read_bytes() == safetensors.numpy.save(arrays)
    write_file(path, FILES, tensors, {"b": "1", "a": "ü"})
    for name, array in safetensors.numpy.load_file(path).items():
        np.testing.assert_array_equal(array, arrays[name])
    assert read_header(path, FILES).metadata == {"a": "ü", "b": "1"}


@given(LAYOUTS)
def test_the_reader_reads_what_the_reference_package_writes(
    tmp_path_factory: pytest.TempPathFactory, layout: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "y.safetensors"
    tensors = filled(layout)
    arrays = {n: np.frombuffer(t.data, NUMPY[t.dtype]).reshape(t.shape) for n, t in tensors.items()}
    path.write_bytes(safetensors.numpy.save(arrays, {"k": "v"}))
    header = read_header(path, FILES)
    assert header.metadata == {"k": "v"}
    data = path.read_bytes()
    for name, tensor in tensors.items():
        ref = header.tensors[name]
        assert (ref.dtype, ref.shape) == (tensor.dtype, tensor.shape)
        assert data[ref.offset : ref.offset + ref.nbytes] == tensor.data


# ------------------------------------------------------------------------------------------ directories


@pytest.mark.parametrize(("shards", "index"), [(1, True), (1, False), (3, True), (3, False)])
def test_C16_odd_tensors_and_C26_with_or_without_an_index(tmp_path: Path, shards: int, index: bool) -> None:
    tensors = random_tensors(np.random.default_rng(1))
    write_checkpoint(tmp_path, FILES, tensors, shards, index)
    checkpoint = Checkpoint.open(tmp_path, FILES)
    assert checkpoint.table() == table_of(tensors)
    assert checkpoint.state() == state_digest(table_of(tensors))
    assert (checkpoint.index is not None) == index
    for name, tensor in tensors.items():
        assert checkpoint.read(name) == tensor.data
        assert b"".join(checkpoint.chunks(name, 7)) == tensor.data


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        Checkpoint.open(tmp_path / "x", FILES)
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
        Checkpoint.open(tmp_path, FILES)


def numbered(directory: Path, *names: str) -> None:
    """Shards of these names, a tensor of its own in each."""
    for name in names:
        write_file(directory / name, FILES, {name: Tensor("U8", (1,), b"x")})


@pytest.mark.parametrize(
    "names",
    [
        ("model.safetensors",),
        ("any-name.safetensors",),
        ("model-00001-of-00001.safetensors",),
        ("model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"),
        ("pytorch-1-of-2.safetensors", "pytorch-2-of-2.safetensors"),
    ],
)
def test_C26_without_an_index_one_file_or_a_whole_set_is_a_checkpoint(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    numbered(tmp_path, *names)
    numbered(tmp_path, ".model-00002-of-00002.safetensors")  # half written, by its name
    assert Checkpoint.open(tmp_path, FILES).weight_files == names


@pytest.mark.parametrize(
    "names",
    [
        ("model.safetensors", "model-00001-of-00002.safetensors"),
        ("model.safetensors", "other.safetensors"),
        ("model-00001-of-00002.safetensors",),
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
         "model-00003-of-00003.safetensors"),
        ("model-00001-of-00002.safetensors", "other-00002-of-00002.safetensors"),
        ("model-00000-of-00003.safetensors", "model-00001-of-00003.safetensors",
         "model-00003-of-00003.safetensors"),
        ("model-1-of-2.safetensors", "model-01-of-2.safetensors"),
    ],
)  # fmt: skip
def test_C74_without_an_index_files_of_two_attempts_are_refused_by_name(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Each may be of ranks that died: nothing says which of them are one checkpoint."""
    numbered(tmp_path, *names)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path, FILES)
    assert all(name in str(caught.value) for name in names)


def test_C74_with_an_index_other_files_are_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    tensors = random_tensors(np.random.default_rng(1))
    write_checkpoint(tmp_path, FILES, tensors, 2)
    numbered(tmp_path, "model-00003-of-00003.safetensors")
    checkpoint = Checkpoint.open(tmp_path, FILES)
    assert checkpoint.table() == table_of(tensors)
    assert checkpoint.weight_files == tuple(f"model-0000{i}-of-00002.safetensors" for i in (1, 2))


class Broken:
    """A checkpoint of two shards, to be broken."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors = {"a": Tensor("F32", (2,), b"x" * 8), "b": Tensor("BF16", (3,), b"y" * 6)}
        write_checkpoint(directory, FILES, self.tensors, 2)
        self.a, self.b = (directory / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
        self.index = directory / INDEX_NAME

    def edit_index(self, change: Callable[[dict[str, Any]], object]) -> None:
        value = json.loads(self.index.read_text())
        change(value)
        self.index.write_text(json.dumps(value))

    def edit_header(self, change: Callable[[dict[str, Any]], object]) -> None:
        data = self.b.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        self.b.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.b.unlink(), "model-00002-of-00002.safetensors: named by the index, but not there"),
        (lambda c: c.b.write_bytes(c.b.read_bytes()[:-1]), "model-00002-of-.*: .* the header describes"),
        (lambda c: c.b.write_bytes(c.b.read_bytes() + b"x"), "the header describes"),
        (lambda c: c.b.write_bytes(c.b.read_bytes()[:20]), "cut short inside the header"),
        (lambda c: c.b.write_bytes(b"1234"), "cut short, no safetensors header"),
        (lambda c: c.b.write_bytes(struct.pack("<Q", 2**62)), "header of 4611686018427387904 bytes"),
        (lambda c: c.b.write_bytes(struct.pack("<Q", 2) + b"[]"), "does not start with"),
        (lambda c: c.edit_index(lambda v: v["weight_map"].update(c=c.b.name)), "tensor c is missing"),
        (lambda c: c.edit_index(lambda v: v["weight_map"].pop("b")) or c.edit_index(
            lambda v: v["weight_map"].update(c=c.b.name)), "tensor c is missing"),
        (lambda c: c.edit_index(lambda v: v["weight_map"].update(b=c.a.name)), "tensor b is missing"),
        (lambda c: c.edit_index(lambda v: v.update(weight_map={})), "names no tensors"),
        (lambda c: c.edit_index(lambda v: v["metadata"].update(delta_encoding="xor")), "a delta"),
        (lambda c: c.edit_index(lambda v: v["weight_map"].update(b="../x.safetensors")), "not the name of"),
        (lambda c: c.index.write_text("{"), "not valid JSON"),
        (lambda c: c.index.unlink() or c.b.write_bytes(c.a.read_bytes()), "tensor a is also in"),
        (lambda c: c.edit_header(lambda h: h["b"].update(dtype="F32")), "tensor b: 6 bytes, .* takes 12"),
        (lambda c: c.edit_header(lambda h: h["b"].update(dtype="BF17")), "tensor b: unknown dtype 'BF17'"),
        (lambda c: c.edit_header(lambda h: h["b"].update(shape=[4])), "tensor b: 6 bytes, .* takes 8"),
        (lambda c: c.edit_header(lambda h: h["b"].update(shape=[-3])), "tensor b: shape"),
        (lambda c: c.edit_header(lambda h: h["b"].update(shape=None)), "tensor b: shape"),
        (lambda c: c.edit_header(lambda h: h["b"].update(data_offsets=[1, 7])), "tensor b .* leaves a gap"),
        (lambda c: c.edit_header(lambda h: h["b"].update(data_offsets=[6, 0])), "tensor b: data_offsets"),
        (lambda c: c.edit_header(lambda h: h.update(c=h["b"])), "overlaps"),
        (lambda c: c.edit_header(lambda h: h.update(__metadata__=[])), "__metadata__"),
        (lambda c: c.edit_header(lambda h: h.update(b=3)), "tensor b: expected an object"),
        (lambda c: c.edit_header(lambda h: h.update(
            c={"dtype": "F4", "shape": [1], "data_offsets": [6, 6]})), "not a whole number of bytes"),
    ],
)  # fmt: skip
def test_C14_what_is_wrong_is_refused_by_name(
    tmp_path: Path, change: Callable[[Broken], object], words: str
) -> None:
    change(Broken(tmp_path))
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(tmp_path, FILES)


def test_C14_a_tensor_that_the_index_does_not_name(tmp_path: Path) -> None:
    broken = Broken(tmp_path)
    write_file(broken.b, FILES, {"b": broken.tensors["b"], "c": broken.tensors["a"]})
    with pytest.raises(CheckpointError, match="tensor c is extra, the index does not name it"):
        Checkpoint.open(tmp_path, FILES)


def test_C09_a_flipped_byte_is_another_state(tmp_path: Path) -> None:
    broken = Broken(tmp_path)
    state = Checkpoint.open(tmp_path, FILES).state()
    data = bytearray(broken.b.read_bytes())
    data[-1] ^= 1
    broken.b.write_bytes(data)
    assert Checkpoint.open(tmp_path, FILES).state() != state


def test_header_names_must_differ(tmp_path: Path) -> None:
    tensor = b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    text = b"{" + tensor + b"," + tensor + b"}"
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match="'a' appears twice"):
        Checkpoint.open(tmp_path, FILES)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "junk.safetensors"
    for start in (b"", struct.pack("<Q", len(data)), struct.pack("<Q", len(data) + 1) + b"{"):
        path.write_bytes(start + data)
        try:
            assert read_header(path, FILES).tensors == {}
        except CheckpointError:
            continue


# --------------------------------------------------------------------------------------------- over 4 GiB


class SparseFile(PosixFiles):
    """One huge file of zeros with a few bytes set, held as those bytes only."""

    ZEROS = bytes(8 << 20)

    def __init__(self, path: Path, size: int, pieces: dict[int, bytes]) -> None:
        self._path, self._size, self._pieces = path, size, pieces

    def list(self, path: Path) -> list[str]:
        return [self._path.name]

    def size(self, path: Path) -> int:
        return self._size

    def read(self, path: Path, offset: int = 0, length: int | None = None) -> bytes:
        length = self._size - offset if length is None else max(0, min(length, self._size - offset))
        hits = {
            at: data for at, data in self._pieces.items() if at < offset + length and at + len(data) > offset
        }
        if not hits and length <= len(self.ZEROS):
            return self.ZEROS[:length]
        result = bytearray(length)
        for at, data in hits.items():
            begin = max(at, offset)
            piece = data[begin - at : max(0, offset + length - at)]
            result[begin - offset : begin - offset + len(piece)] = piece
        return bytes(result)

    def read_into(self, path: Path, offset: int, out: memoryview) -> int:
        data = self.read(path, offset, len(out))
        out[: len(data)] = data
        return len(data)


def test_C16_a_tensor_over_4_GiB_without_4_GiB_of_memory() -> None:
    huge = (1 << 32) + (1 << 20) + 3
    layout: dict[str, tuple[str, tuple[int, ...]]] = {"huge": ("U8", (huge,)), "tail": ("U8", (5,))}
    header, offsets = encode_header(layout)
    path = Path("/sparse/model.safetensors")
    pieces = {0: header, offsets["huge"] + huge - 2: b"<>", offsets["tail"]: b"after"}
    checkpoint = Checkpoint.open(path.parent, SparseFile(path, offsets["tail"] + 5, pieces))
    assert checkpoint.tensors["huge"].nbytes == huge
    assert checkpoint.tensors["tail"].offset > 1 << 32
    assert checkpoint.read("tail") == b"after"
    expected, position = xxhash.xxh3_128(), 0
    while position < huge - 2:
        piece = SparseFile.ZEROS[: huge - 2 - position]
        expected.update(piece)
        position += len(piece)
    expected.update(b"<>")
    assert checkpoint.table()["huge"].digest == expected.hexdigest()


def test_the_layout_of_the_test_kit_has_every_oddity() -> None:
    assert any(shape == () for _, shape in ODD.values())
    assert any(0 in shape for _, shape in ODD.values())
    assert any(not name.isascii() for name in ODD)
    assert any("/" in name for name in ODD)
