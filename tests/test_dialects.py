"""C26: the index file of every public dialect, and what none of them may contain."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch_core.dialects import Index, read_index, version_number
from stitch_core.safetensors import CheckpointError

DELTA = {"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": "xxh3-128"}


def read(metadata: Any, weight_map: Any = None) -> Index:
    weight_map = {} if weight_map is None else weight_map
    return read_index(json.dumps({"metadata": metadata, "weight_map": weight_map}).encode(), "index")


@pytest.mark.parametrize(
    ("version", "label", "number"),
    [
        (7, "7", 7),
        ("000007", "000007", 7),
        ("1234567", "1234567", 1234567),
        ("weight_v000007", "weight_v000007", 7),
        ("run-3/weight_v000007", "run-3/weight_v000007", 7),
        ("a3f9c0d2-snapshot", "a3f9c0d2-snapshot", None),
        (None, None, None),
    ],
)
def test_C26_versions(version: Any, label: str | None, number: int | None) -> None:
    index = read({**DELTA, "version": version, "base_version": version})
    assert (index.version, index.base_version) == (label, label)
    assert version_number(index.version) == number


@pytest.mark.parametrize(
    ("spelling", "normal"),
    [
        ("xxh3-128", "xxh3-128"), ("xxh3_128", "xxh3-128"), ("adler32", "adler32"), ("adler-32", "adler32"),
        ("alder32", "adler32"), ("ADLER32", "adler32"), ("blake3", "blake3"), (None, None),
    ],
)  # fmt: skip
def test_C26_checksums(spelling: str | None, normal: str | None) -> None:
    assert read({**DELTA, "checksum_format": spelling}).checksum == normal


def test_C26_slime() -> None:
    data = (
        b'{"metadata": {"version": "000001", "base_version": "000000", "delta_encoding": "xor", '
        b'"compression_format": "zstd", "checksum_format": "xxh3-128"}, '
        b'"weight_map": {"model.norm.weight": "model-00000-of-00001.safetensors"}}'
    )
    weight_map = {"model.norm.weight": "model-00000-of-00001.safetensors"}
    assert read_index(data, "x") == Index("delta", "000001", "000000", "xor", "zstd", "xxh3-128", weight_map)


@pytest.mark.parametrize("metadata", [{}, None, {"total_size": 12}, {"version": "000003"}, {"total": 1.5}])
def test_C26_without_an_encoding_it_is_a_full(metadata: Any) -> None:
    index = read(metadata, {"a": "model-00001-of-00001.safetensors"})
    assert (index.kind, index.encoding, index.base_version) == ("full", None, None)


def test_C26_an_empty_weight_map() -> None:
    assert read(DELTA).weight_map == {}
    assert read(DELTA).kind == "delta"


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "a/b.safetensors", "/x.safetensors", "..", ".x.safetensors", "a\\b.safetensors",
     "x.bin", "", "x\x00.safetensors", None, 3],
)  # fmt: skip
def test_unsafe_shard_names_are_refused(name: Any) -> None:
    with pytest.raises(CheckpointError, match="index: tensor a"):
        read(DELTA, {"a": name})


@pytest.mark.parametrize(
    "metadata",
    [
        [], "x", {**DELTA, "version": 1.5}, {**DELTA, "version": True}, {**DELTA, "version": -1},
        {**DELTA, "base_version": []}, {**DELTA, "checksum_format": "crc7"}, {"delta_encoding": None},
        {"delta_encoding": ""}, {"delta_encoding": 3}, {**DELTA, "compression_format": 1},
    ],
)  # fmt: skip
def test_malformed_metadata_is_refused(metadata: Any) -> None:
    with pytest.raises(CheckpointError, match="index"):
        read(metadata)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"[]", b"null", b"{}", b'{"weight_map": []}', b'{"weight_map": {}} x', b"[" * 100_000,
     b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
     b'{"weight_map": {"\\ud800": "x.safetensors"}}'],
)  # fmt: skip
def test_what_is_no_index_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="index"):
        read_index(data, "index")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda c: st.dictionaries(
    st.sampled_from(["metadata", "weight_map", "version", "delta_encoding"]), c)))  # fmt: skip
def test_any_json_is_an_index_or_an_error(value: Any) -> None:
    with contextlib.suppress(CheckpointError):
        assert read_index(json.dumps(value).encode(), "index").kind in ("full", "delta")
