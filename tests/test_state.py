"""The state digest's byte form, computed here a second time and pinned to one constant."""

import hashlib
import struct

import pytest
import xxhash

from stitch_core.state import (
    TensorInfo,
    changed_tensors,
    layout_difference,
    state_digest,
    tensor_digest,
)

TABLE = {
    "ü/b": TensorInfo("F32", (), tensor_digest(struct.pack("<f", 1.0))),
    "a.weight": TensorInfo("BF16", (2, 3), tensor_digest(bytes(range(12)))),
    "empty": TensorInfo("U8", (0, 4), tensor_digest(b"")),
}


def test_vector() -> None:
    def text(value: str) -> bytes:
        data = value.encode()
        return struct.pack("<I", len(data)) + data

    form = b"stitch-state-1\n" + struct.pack("<Q", 3)
    form += text("a.weight") + text("BF16") + struct.pack("<IQQ", 2, 2, 3)
    form += xxhash.xxh3_128(bytes(range(12))).hexdigest().encode()
    form += text("empty") + text("U8") + struct.pack("<IQQ", 2, 0, 4)
    form += b"99aa06d3014798d86001c324468d497f"
    form += text("ü/b") + text("F32") + struct.pack("<I", 0)
    form += xxhash.xxh3_128(struct.pack("<f", 1.0)).hexdigest().encode()
    assert state_digest(TABLE) == "sha256:" + hashlib.sha256(form).hexdigest()
    assert state_digest(TABLE) == VECTOR


VECTOR = "sha256:f41429577ee98c9c030b51249dd7e821d989a9b6cf8458f436058a780046e87e"


def test_order_of_the_table_does_not_matter_and_everything_in_it_does() -> None:
    assert state_digest(dict(reversed(TABLE.items()))) == VECTOR
    a = TABLE["a.weight"]
    for other in (
        TensorInfo("F16", a.shape, a.digest),
        TensorInfo(a.dtype, (3, 2), a.digest),
        TensorInfo(a.dtype, a.shape, a.digest[:-1] + "0"),
    ):
        assert state_digest(TABLE | {"a.weight": other}) != VECTOR
    renamed = {("c" if name == "empty" else name): info for name, info in TABLE.items()}
    assert state_digest(renamed) != VECTOR
    assert state_digest({}) != VECTOR


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a.weight": None}, "tensor a.weight is missing"),
        ({"new": TensorInfo("U8", (1,), "0" * 32)}, "tensor new is extra"),
        ({"empty": TensorInfo("I8", (0, 4), "0" * 32)}, "tensor empty has dtype I8, expected U8"),
        ({"empty": TensorInfo("U8", (0,), "0" * 32)}, r"tensor empty has shape [0], expected [0, 4]"),
    ],
)
def test_layout_difference_names_the_tensor(change: dict[str, TensorInfo | None], words: str) -> None:
    new = {name: info for name, info in (TABLE | change).items() if info is not None}
    assert layout_difference(TABLE, new) == words
    assert layout_difference(TABLE, dict(TABLE)) is None


def test_changed_tensors_are_those_of_other_bytes() -> None:
    a = TABLE["a.weight"]
    new = TABLE | {"a.weight": TensorInfo(a.dtype, a.shape, "0" * 32)}
    assert changed_tensors(TABLE, new) == ["a.weight"]
