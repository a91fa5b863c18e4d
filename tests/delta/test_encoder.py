"""The encoder: what it writes, what it counts, and that its base moves only with what is published."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch_core.checkpoint import Checkpoint
from stitch_core.delta import DeltaDirectory, DeltaEncoder, DeltaError
from stitch_core.files import PosixFiles
from stitch_core.safetensors import Tensor
from stitch_core.state import state_digest
from stitch_core.testing.checkpoints import random_tensors, step, table_of, write_checkpoint

from .frames import apply_deltas

FILES = PosixFiles()


def held(encoder: DeltaEncoder) -> dict[str, bytes]:
    return {name: bytes(tensor.data) for name, tensor in encoder.tensors()}


def plain(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: bytes(tensor.data) for name, tensor in tensors.items()}


def test_what_is_encoded_applies(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    old = random_tensors(rng)
    new = step(rng, old, 0.1)
    encoder = DeltaEncoder(old)
    encoded = encoder.encode(new, tmp_path / "v", FILES, number=1, base_number=0)
    assert (encoded.base, encoded.state) == (state_digest(table_of(old)), state_digest(table_of(new)))
    assert (encoder.state, encoder.table) == (encoded.state, table_of(new))
    delta = DeltaDirectory.open(tmp_path / "v", FILES)
    assert set(delta.payloads) == set(encoded.changed) == {n for n in old if old[n].data != new[n].data}
    assert sorted(p.name for p in (tmp_path / "v").iterdir()) == sorted(encoded.files)
    for name, (before, after) in encoded.changed.items():
        assert (before, after) == (table_of(old)[name].digest, table_of(new)[name].digest)
        assert delta.payloads[name].checksum == after
        assert apply_deltas(old[name].data, [("xor", delta.read(name))]).tobytes() == new[name].data


def test_a_base_from_disk(tmp_path: Path) -> None:
    tensors = random_tensors(np.random.default_rng(0))
    write_checkpoint(tmp_path / "c", FILES, tensors, 2)
    encoder = DeltaEncoder.from_checkpoint(Checkpoint.open(tmp_path / "c", FILES))
    assert (encoder.state, held(encoder)) == (state_digest(table_of(tensors)), plain(tensors))
    new = step(np.random.default_rng(1), tensors)
    encoder.encode(new, tmp_path / "v", FILES, number=1, base_number=0)
    assert held(encoder) == plain(new)


@pytest.mark.parametrize(
    ("dtype", "old", "new", "elements", "changed"),
    [
        ("BF16", b"\0\0\0\0\0\0", b"\1\1\0\0\0\1", 3, 2),
        ("F32", bytes(8), b"\1\1\1\1\0\0\0\0", 2, 1),
        ("F64", bytes(16), b"\1" + bytes(15), 2, 1),
        ("U8", bytes(3), b"\1\0\1", 3, 2),
        ("F4", bytes(3), b"\x11\x10\x00", 6, 3),
        ("F6_E2M3", bytes(3), b"\x3f\x00\x80", 4, 2),
    ],
)
def test_elements_are_counted_in_the_width_of_the_dtype(
    tmp_path: Path, dtype: str, old: bytes, new: bytes, elements: int, changed: int
) -> None:
    encoder = DeltaEncoder({"a": Tensor(dtype, (elements,), old)})
    encoded = encoder.encode(
        {"a": Tensor(dtype, (elements,), new)}, tmp_path / "v", FILES, number=1, base_number=0
    )
    assert (encoded.elements, encoded.changed_elements) == (elements, changed)
    assert encoded.changed_bytes == sum(a != b for a, b in zip(old, new, strict=True))
    assert encoded.changed_fraction == changed / elements
    assert encoded.payload_bytes == len(DeltaDirectory.open(tmp_path / "v", FILES).read("a"))


@pytest.mark.parametrize("encoding", ["xor", "sparse"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale": None}, "tensor scale is missing"),
        ({"more": Tensor("U8", (1,), b"x")}, "tensor more is extra"),
        ({"scale": Tensor("I32", (), b"1234")}, "tensor scale has dtype I32, expected F32"),
        ({"scale": Tensor("F32", (1,), b"1234")}, "tensor scale has shape"),
        ({"scale": Tensor("F32", (), b"123")}, "tensor scale has 3 bytes"),
    ],
)
def test_another_layout_is_refused_by_name_and_the_base_stays(
    tmp_path: Path, change: dict[str, Tensor | None], words: str, encoding: str
) -> None:
    tensors = random_tensors(np.random.default_rng(0))
    encoder = DeltaEncoder(tensors, encoding)
    new = {n: t for n, t in (step(np.random.default_rng(1), tensors) | change).items() if t is not None}
    with pytest.raises(DeltaError, match=words):
        encoder.encode(new, tmp_path / "v", FILES, number=1, base_number=0)
    assert (held(encoder), encoder.outstanding) == (plain(tensors), 0)
    assert not (tmp_path / "v").exists()


def test_C04_a_failed_write_leaves_the_base(tmp_path: Path) -> None:
    tensors = random_tensors(np.random.default_rng(0))
    encoder = DeltaEncoder(tensors)
    (tmp_path / "v").write_text("in the way")
    with pytest.raises(OSError, match="v"):
        encoder.encode(
            step(np.random.default_rng(1), tensors), tmp_path / "v", FILES, number=1, base_number=0
        )
    assert (held(encoder), encoder.outstanding, encoder.table) == (plain(tensors), 0, table_of(tensors))


@pytest.mark.parametrize("encoding", ["xor", "sparse"])
@given(actions=st.lists(st.sampled_from(["encode", "encode", "commit", "undo"]), max_size=12))
def test_C04_undo_goes_back_to_what_was_committed_last_though_the_directory_is_gone(
    tmp_path_factory: pytest.TempPathFactory, encoding: str, actions: list[str]
) -> None:
    rng = np.random.default_rng(0)
    root = tmp_path_factory.mktemp("v")
    (root / ".7.model.undo").mkdir()  # of an encoder that died
    versions = [random_tensors(rng, {"a": ("BF16", (7,)), "b": ("F32", ())})]
    encoder, committed = DeltaEncoder(versions[0], encoding), 0
    for number, action in enumerate(actions):
        if action == "encode":
            versions.append(step(rng, versions[-1], 0.5))
            encoded = encoder.encode(versions[-1], root / str(number), FILES, number=number, base_number=0)
            FILES.remove_tree(root / str(number))  # as a publisher does, whatever becomes of it
            assert encoded.base == state_digest(table_of(versions[-2]))
        elif action == "undo":
            encoder.undo()
            del versions[committed + 1 :]
        elif committed + 1 < len(versions):
            encoder.commit()
            committed += 1
        else:
            with pytest.raises(DeltaError, match="nothing to commit"):
                encoder.commit()
        assert encoder.outstanding == len(versions) - 1 - committed
        assert held(encoder) == plain(versions[-1])
        assert (encoder.table, encoder.state) == (table_of(versions[-1]), state_digest(encoder.table))
    if encoding == "sparse" and "encode" in actions:
        assert len(list(root.iterdir())) == encoder.outstanding


def test_a_step_that_changes_nothing(tmp_path: Path) -> None:
    tensors = random_tensors(np.random.default_rng(0))
    encoded = DeltaEncoder(tensors).encode(tensors, tmp_path / "v", FILES, number=1, base_number=0)
    assert (encoded.base, encoded.changed, encoded.payload_bytes) == (encoded.state, {}, 0)
    assert encoded.files == ("model.safetensors.index.json",)
