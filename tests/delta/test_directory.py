"""Delta directories: byte-compatible with stock slime and Miles, and read whatever the index claims."""

import json
from pathlib import Path

import pytest
import safetensors.numpy
import xxhash
from safetensors import safe_open

from stitch_core.delta import DeltaDirectory, DeltaEncoder, DeltaError, write_delta, xor
from stitch_core.dialects import INDEX_NAME
from stitch_core.files import PosixFiles
from stitch_core.safetensors import CheckpointError, Tensor, write_file

from .frames import apply_deltas

FILES = PosixFiles()
OLD = {"a": b"old a...", "b": b"old b!!!", "ü.c/d": b"old c???"}
NEW = {"a": b"new a...", "b": b"new b!!!", "ü.c/d": b"new c???"}


def digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


PAYLOADS = {name: (xor.encode(OLD[name], NEW[name]), digest(NEW[name])) for name in OLD}


def shard(path: Path, names: str | list[str], **frames: bytes) -> None:
    payloads = {n: frames.get(n, PAYLOADS[n][0]) for n in names}
    tensors = {n: Tensor("U8", (len(frame),), frame) for n, frame in payloads.items()}
    write_file(path, FILES, tensors, {n: PAYLOADS[n][1] for n in names})


def index(path: Path, weight_map: dict[str, str], **changes: str | None) -> None:
    metadata = {"version": "000007", "base_version": "000006", "delta_encoding": "xor",
                "compression_format": "zstd", "checksum_format": "xxh3-128"} | changes  # fmt: skip
    metadata = {k: v for k, v in metadata.items() if v is not None}
    (path / INDEX_NAME).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


def test_what_is_written_is_what_slime_writes(tmp_path: Path) -> None:
    path = tmp_path / "weight_v000007"
    names = write_delta(path, FILES, PAYLOADS, number=7, base_number=6)
    assert names == ["model-00000-of-00001.safetensors", INDEX_NAME]
    assert (path / INDEX_NAME).read_text() == json.dumps({
        "metadata": {"version": "000007", "base_version": "000006", "delta_encoding": "xor",
                     "compression_format": "zstd", "checksum_format": "xxh3-128"},
        "weight_map": dict.fromkeys(sorted(OLD), names[0]),
    })  # fmt: skip
    with safe_open(path / names[0], "numpy") as file:
        assert file.metadata() == {name: digest(new) for name, new in NEW.items()}
        for name in OLD:
            frame = file.get_tensor(name)
            assert (frame.dtype, frame.ndim) == ("uint8", 1)
            assert apply_deltas(OLD[name], [("xor", frame.tobytes())]).tobytes() == NEW[name]
    one = {"a": safetensors.numpy.load_file(path / names[0])["a"]}
    write_delta(tmp_path / "one", FILES, {"a": PAYLOADS["a"]}, number=1, base_number=0)
    written = (tmp_path / "one" / names[0]).read_bytes()
    assert written == safetensors.numpy.save(one, {"a": PAYLOADS["a"][1]})


def test_it_reads_back_in_any_number_of_shards(tmp_path: Path) -> None:
    for shards, bound in ((1, 1 << 30), (3, 1)):
        path = tmp_path / str(shards)
        names = write_delta(path, FILES, PAYLOADS, number=7, base_number=6, shard_bytes=bound)
        assert len(names) == shards + 1
        assert names[0] == f"model-00000-of-{shards:05d}.safetensors"
        delta = DeltaDirectory.open(path, FILES)
        assert delta.index.version == "000007"
        assert {name: delta.read(name) for name in delta.payloads} == {n: p[0] for n, p in PAYLOADS.items()}
        assert {name: p.checksum for name, p in delta.payloads.items()} == {
            n: p[1] for n, p in PAYLOADS.items()
        }


def test_no_change_is_an_index_alone(tmp_path: Path) -> None:
    path = tmp_path / "v"
    assert write_delta(path, FILES, {}, number=7, base_number=6) == [INDEX_NAME]
    assert [p.name for p in path.iterdir()] == [INDEX_NAME]
    assert DeltaDirectory.open(path, FILES).payloads == {}


def test_what_a_dead_writer_left_is_removed_and_what_a_live_one_finished_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "v"
    path.mkdir()
    shard(path / "model-00001-of-00002.safetensors", "a")
    (path / ".model-00000-of-00002.safetensors.tmp").write_bytes(b"half")
    names = write_delta(path, FILES, {"b": PAYLOADS["b"]}, number=7, base_number=6)
    assert sorted(p.name for p in path.iterdir()) == sorted(names)
    with pytest.raises(DeltaError, match="there is a delta already"):
        write_delta(path, FILES, PAYLOADS, number=7, base_number=6)


@pytest.mark.parametrize("claims", [{}, {"b": "m-0.safetensors"}])
def test_C01_a_payload_counts_whatever_the_index_claims(tmp_path: Path, claims: dict[str, str]) -> None:
    """... where the version's own record names the file; whatever else lies there does not count (C74)."""
    shard(tmp_path / "m-0.safetensors", ["a", "b"])
    index(tmp_path, claims)
    shard(tmp_path / "m-9.safetensors", ["ü.c/d"])
    delta = DeltaDirectory.open(tmp_path, FILES, {"m-0.safetensors", INDEX_NAME})
    assert set(delta.payloads) == {"a", "b"}
    assert delta.names == ("m-0.safetensors", INDEX_NAME)


def test_C01_without_such_a_record_an_index_that_names_nothing_is_no_step_that_changes_nothing(
    tmp_path: Path,
) -> None:
    shard(tmp_path / "m-0.safetensors", ["a", "b"])
    index(tmp_path, {})
    with pytest.raises(DeltaError, match=r"m-0\.safetensors"):
        DeltaDirectory.open(tmp_path, FILES)


@pytest.mark.parametrize("left", ["m-9.safetensors", "m-9.sparse"])
def test_C74_weights_that_the_index_does_not_name_are_refused(tmp_path: Path, left: str) -> None:
    """Ranks that died left them, of tensors that the retry does not change: nobody has had such weights."""
    shard(tmp_path / "m-0.safetensors", ["a", "b"])
    shard(tmp_path / left, ["ü.c/d"])
    index(tmp_path, dict.fromkeys("ab", "m-0.safetensors"))
    with pytest.raises(DeltaError, match=left.replace(".", r"\.")):
        DeltaDirectory.open(tmp_path, FILES)
    (tmp_path / left).rename(tmp_path / f".{left}")  # half written, by its name
    assert set(DeltaDirectory.open(tmp_path, FILES).payloads) == {"a", "b"}


def test_C74_weights_beside_sparse_files_are_refused(tmp_path: Path) -> None:
    encoder = DeltaEncoder({"a": Tensor("U8", (8,), OLD["a"])}, "sparse", workers=1)
    encoder.encode({"a": Tensor("U8", (8,), NEW["a"])}, tmp_path / "v", FILES, number=1, base_number=0)
    shard(tmp_path / "v/m-9.safetensors", ["b"])
    with pytest.raises(DeltaError, match=r"m-9\.safetensors"):
        DeltaDirectory.open(tmp_path / "v", FILES)


def test_C15_an_unnamed_shard_of_nothing_but_copies_is_no_part_of_the_delta(tmp_path: Path) -> None:
    """A pipeline's stage that changed nothing else than what it shares with another."""
    shard(tmp_path / "m-0.safetensors", ["a", "b"])
    shard(tmp_path / "m-1.safetensors", ["b"])
    index(tmp_path, dict.fromkeys("ab", "m-0.safetensors"))
    delta = DeltaDirectory.open(tmp_path, FILES)
    assert set(delta.payloads) == {"a", "b"}
    assert delta.names == ("m-0.safetensors", INDEX_NAME)


def test_C15_a_tensor_in_two_shards_is_applied_once_if_equal(tmp_path: Path) -> None:
    shard(tmp_path / "m-0.safetensors", ["a", "b"])
    shard(tmp_path / "m-1.safetensors", ["b", "ü.c/d"])
    for home in ("m-0.safetensors", "m-1.safetensors"):
        index(tmp_path, {"a": "m-0.safetensors", "b": home, "ü.c/d": "m-1.safetensors"})
        delta = DeltaDirectory.open(tmp_path, FILES)
        assert set(delta.payloads) == set(OLD)
        assert apply_deltas(OLD["b"], [("xor", delta.read("b"))]).tobytes() == NEW["b"]


def test_C15_a_tensor_in_two_shards_is_refused_if_not_equal(tmp_path: Path) -> None:
    shard(tmp_path / "m-0.safetensors", ["a", "b"])
    shard(tmp_path / "m-1.safetensors", ["b"], b=xor.encode(OLD["b"], OLD["a"]))
    index(tmp_path, {"a": "m-0.safetensors", "b": "m-0.safetensors"})
    with pytest.raises(
        DeltaError, match=r"m-1.safetensors: tensor b is also in m-0.safetensors, with another"
    ):
        DeltaDirectory.open(tmp_path, FILES)


@pytest.mark.parametrize("first", [0, 1])
def test_C26_shards_may_be_numbered_from_0_or_1(tmp_path: Path, first: int) -> None:
    names = [f"model-{i + first:05d}-of-00002.safetensors" for i in range(2)]
    shard(tmp_path / names[0], "a")
    shard(tmp_path / names[1], "b")
    index(tmp_path, {"a": names[0], "b": names[1]}, checksum_format="xxh3-128")
    assert set(DeltaDirectory.open(tmp_path, FILES).payloads) == {"a", "b"}


@pytest.mark.parametrize(
    ("weight_map", "changes", "words"),
    [
        ({"a": "m-9.safetensors"}, {}, "m-9.safetensors: named by the index, but not there"),
        ({"x": "m-0.safetensors"}, {}, "tensor x is missing"),
        ({}, {"delta_encoding": None}, "a full checkpoint"),
        ({}, {"delta_encoding": "arc_v2"}, "encoding 'arc_v2'"),
        ({}, {"compression_format": "lz4"}, "compression 'lz4'"),
        ({}, {"checksum_format": "adler32"}, "not 8 hex digits"),
    ],
)
def test_what_disagrees_is_refused(
    tmp_path: Path, weight_map: dict[str, str], changes: dict[str, str | None], words: str
) -> None:
    shard(tmp_path / "m-0.safetensors", ["a", "b"])
    index(tmp_path, weight_map, **changes)
    with pytest.raises(DeltaError, match=words):
        DeltaDirectory.open(tmp_path, FILES)


def test_frames_must_be_flat_bytes_with_a_checksum(tmp_path: Path) -> None:
    index(tmp_path, {})
    path = tmp_path / "m-0.safetensors"
    write_file(path, FILES, {"a": Tensor("F32", (2,), bytes(8))}, {"a": "0" * 32})
    with pytest.raises(DeltaError, match="payload of tensor a is F32"):
        DeltaDirectory.open(tmp_path, FILES)
    write_file(path, FILES, {"a": Tensor("U8", (8,), bytes(8))})
    with pytest.raises(DeltaError, match="tensor a has no xxh3-128 checksum"):
        DeltaDirectory.open(tmp_path, FILES)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"m-0.safetensors"):
        DeltaDirectory.open(tmp_path, FILES)


def test_no_index_is_no_delta(tmp_path: Path) -> None:
    shard(tmp_path / "m-0.safetensors", "a")
    with pytest.raises(DeltaError, match="not a delta"):
        DeltaDirectory.open(tmp_path, FILES)
