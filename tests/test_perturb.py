"""The other version of a checkpoint that `stitch profile --perturb` publishes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stitch_core.checkpoint import Checkpoint
from stitch_core.files import PosixFiles
from stitch_core.perturb import perturb
from stitch_core.safetensors import Tensor
from stitch_core.testing.checkpoints import write_checkpoint

FILES = PosixFiles()
RNG = np.random.default_rng(1)


def every_number(dtype: str, width: int) -> Tensor:
    """All that there are of 8 and 16 bits, a sample of wider ones."""
    words = np.arange(1 << 8 * width) if width < 4 else RNG.integers(0, 1 << 8 * width, 4096, np.uint64)
    return Tensor(dtype, (words.size,), words.astype(f"<u{width}").tobytes())


def values(tensor: Tensor) -> np.ndarray:
    torch = pytest.importorskip("torch")
    kinds = {
        "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    }  # fmt: skip
    data = torch.frombuffer(bytearray(tensor.data), dtype=kinds[tensor.dtype])
    found: np.ndarray = data.double().numpy()
    return found


def other(tmp_path: Path, tensors: dict[str, Tensor], seed: int = 0) -> tuple[dict[str, Tensor], list[str]]:
    write_checkpoint(tmp_path / "boot", FILES, tensors, shards=2)
    (tmp_path / "boot" / "tokenizer.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path / "boot", FILES)
    same = perturb(checkpoint, tmp_path / "other", np.random.default_rng(seed))
    found = Checkpoint.open(tmp_path / "other", FILES)
    assert (tmp_path / "other" / "tokenizer.json").read_text() == "{}"
    assert {n: (r.dtype, r.shape) for n, r in found.tensors.items()} == {
        n: (t.dtype, t.shape) for n, t in tensors.items()
    }
    return {n: Tensor(r.dtype, r.shape, found.read(n)) for n, r in found.tensors.items()}, same


def test_about_half_of_all_numbers_change_a_little_and_none_becomes_infinite(tmp_path: Path) -> None:
    widths = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
    narrow = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
    given = {name: every_number(name, width) for name, width in (widths | dict.fromkeys(narrow, 1)).items()}
    found, same = other(tmp_path, given)
    assert same == []
    for name, tensor in given.items():
        old, new = values(tensor), values(found[name])
        assert np.array_equal(np.isfinite(old), np.isfinite(new)), name
        ordinary = np.isfinite(old) & (old != 0)
        with np.errstate(all="ignore"):
            moved = np.abs(new / old - 1)[ordinary]
        assert np.max(moved) <= (0.5 if name in narrow else 2**-6), name
        assert 0.3 < np.mean(moved > 0) < 0.6, name
        assert np.array_equal(old[old == 0], new[old == 0]), name


def test_codes_move_by_one_and_sizes_and_tables_stay(tmp_path: Path) -> None:
    codes = Tensor("U8", (64, 64), RNG.bytes(4096))
    fixed = {
        "g_idx": Tensor("I32", (256,), RNG.bytes(1024)),
        "routes": Tensor("I64", (16, 8), RNG.bytes(1024)),
        "mask": Tensor("BOOL", (64,), bytes(64)),
        "sizes": Tensor("U8", (64,), RNG.bytes(64)),
    }
    found, same = other(tmp_path, {"packed": codes, **fixed})
    assert sorted(same) == sorted(fixed)
    assert all(found[name] == tensor for name, tensor in fixed.items())
    difference = np.frombuffer(codes.data, np.uint8) ^ np.frombuffer(found["packed"].data, np.uint8)
    assert set(difference) == {0, 1}


def test_each_time_another_version(tmp_path: Path) -> None:
    """Of the version that is served already nothing would be loaded."""
    given = {"a": Tensor("BF16", (8, 8), RNG.bytes(128)), "empty": Tensor("F32", (0,), b"")}
    one, _ = other(tmp_path / "1", given, seed=1)
    two, _ = other(tmp_path / "2", given, seed=2)
    assert one["a"] != two["a"]
