"""A delta to a successor that is never written: bounded memory, the same by seed, densities as asked for."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stitch_core.checkpoint import Checkpoint as Stored
from stitch_core.delta.directory import DeltaDirectory
from stitch_core.delta.prove import prove_delta
from stitch_core.files import PosixFiles
from stitch_core.safetensors import Tensor as Data
from stitch_core.safetensors import write_file
from stitch_core.state import state_digest
from stitch_recipes import catalogue
from stitch_recipes.layout.spec import Tensor
from stitch_recipes.layout.synthetic import Bytes, densities
from stitch_recipes.profile import changes
from stitch_recipes.profile.bases import made
from stitch_recipes.profile.streaming import Streamed, stream_delta
from stitch_recipes.schema import Checkpoint

FILES = PosixFiles()
AIR = "glm-4.5-air/fp8-serve"


def normal_bf16(count: int, seed: int = 0) -> Bytes:
    """Weights of std 0.02, as models have."""
    values = np.random.default_rng(seed).standard_normal(count).astype(np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def write_model(directory: Path, tensors: int, elements: int) -> None:
    directory.mkdir()
    for index in range(tensors):
        name = f"model.layers.{index}.mlp.gate_proj.weight"
        data = {name: Data("BF16", (elements,), normal_bf16(elements, index).data)}
        write_file(directory / f"model-{index:05d}-of-{tensors:05d}.safetensors", FILES, data)


def stream(base: Path, into: Path, change: changes.Change, encoding: str = "xor", **more: int) -> Streamed:
    return stream_delta(base, change, into, encoding=encoding, base_number=0, **more)


@pytest.fixture(scope="module")
def air(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Checkpoint]:
    """The FP8 checkpoint with a layer that is not trained, scaled down."""
    base = made(catalogue.load(AIR), "small", tmp_path_factory.mktemp("air") / "base")
    return base.directory, base.checkpoint


@pytest.mark.parametrize("encoding", ["xor", "sparse"])
def test_the_delta_leads_from_the_base_to_the_state_that_it_names(
    air: tuple[Path, Checkpoint], tmp_path: Path, encoding: str
) -> None:
    base, checkpoint = air
    change = changes.synthetic(checkpoint, densities(checkpoint.quantization, {}), 1)
    done = stream(base, tmp_path / "delta", change, encoding, group_bytes=1 << 20)
    table = Stored.open(base, FILES).table()
    assert done.payload.base == state_digest(table)
    delta = DeltaDirectory.open(tmp_path / "delta", FILES)
    changed, state = prove_delta(delta, Stored.open(base, FILES), table)
    assert state == done.payload.state
    assert set(changed) == set(done.payload.changed)
    assert set(done.payload.files) == {file.name for file in (tmp_path / "delta").iterdir()}
    assert done.delta_bytes == sum(file.stat().st_size for file in (tmp_path / "delta").iterdir())
    assert done.tensors == len(table)


def test_what_is_immutable_stays_and_all_else_changes(air: tuple[Path, Checkpoint], tmp_path: Path) -> None:
    base, checkpoint = air
    assert checkpoint.immutable
    for kind in (
        changes.synthetic(checkpoint, densities(checkpoint.quantization, {}), 1),
        changes.training(checkpoint, 1e-4, 1),
    ):
        done = stream(base, tmp_path / str(id(kind)), kind)
        fixed = tuple(checkpoint.immutable)
        assert not any(name.startswith(fixed) for name in done.payload.changed)
        sizes = {name: ref.nbytes for name, ref in Stored.open(base, FILES).tensors.items()}
        large = {name for name, size in sizes.items() if size > 10_000 and not name.startswith(fixed)}
        assert large <= set(done.payload.changed)


def test_the_same_seed_is_the_same_delta_in_any_grouping_and_another_seed_another(
    air: tuple[Path, Checkpoint], tmp_path: Path
) -> None:
    base, checkpoint = air

    def state(name: str, seed: int, group: int, workers: int = 1) -> str:
        change = changes.training(checkpoint, 1e-5, seed)
        done = stream(base, tmp_path / name, change, group_bytes=group, workers=workers)
        return done.payload.state

    one = state("one", 1, 1 << 18)
    assert one == state("again", 1, 1 << 30)
    assert one == state("threads", 1, 1 << 18, 4)
    assert one != state("other", 2, 1 << 30)


def fraction(change: changes.Change, tensor: Tensor, data: Bytes, width: int) -> float:
    different = (change(tensor, data) != data).reshape(-1, width).any(axis=1)
    return float(different.mean())


COUNT = 400_000


@pytest.mark.parametrize(
    ("dtype", "width", "quantization", "name", "expected"),
    [
        ("BF16", 2, "bf16", "model.norm.weight", 0.01),
        ("F32", 4, "bf16", "model.layers.1.mlp.gate.e_score_correction_bias", 0.01),
        ("F8_E4M3", 1, "fp8-channel", "model.layers.0.mlp.down_proj.weight", 0.006),
        ("U8", 1, "nvfp4-modelopt", "model.layers.5.mlp.experts.0.down_proj.weight", 1 - (1 - 0.003) ** 2),
        ("U8", 1, "mxfp4-packed", "model.layers.5.block_sparse_moe.experts.0.w1.weight_packed", 1 - 0.997**2),
    ],
)
def test_synthetic_densities_are_those_of_the_public_table_for_each_dtype(
    dtype: str, width: int, quantization: str, name: str, expected: float
) -> None:
    """Of bytes with two values in them either may have changed."""
    data = np.random.default_rng(3).integers(0, 0x7E, COUNT * width, np.uint8)
    checkpoint = Checkpoint.model_validate({"quantization": quantization})
    change = changes.synthetic(checkpoint, densities(checkpoint.quantization, {}), 5)
    found = fraction(change, Tensor(name, dtype, (COUNT, 1)), data, width)
    assert found == pytest.approx(expected, rel=0.1)


def test_training_moves_as_many_bf16_weights_as_low_learning_rates_do() -> None:
    """0.8 % of the elements at 1e-6, more in proportion at 3e-6; mostly by one unit in the last place."""
    checkpoint, data = Checkpoint(), normal_bf16(2_000_000)
    tensor = Tensor("model.layers.0.mlp.down_proj.weight", "BF16", (2000, 1000))
    slow, fast = (fraction(changes.training(checkpoint, rate, 7), tensor, data, 2) for rate in (1e-6, 3e-6))
    assert 0.005 < slow < 0.011
    assert 2.0 < fast / slow < 3.2
    after = changes.training(checkpoint, 1e-6, 7)(tensor, data).view(np.uint16).astype(np.int32)
    moved = np.abs(after - data.view(np.uint16).astype(np.int32))
    assert np.mean(moved[moved > 0] == 1) > 0.7
    assert np.array_equal(changes.training(checkpoint, 0.0, 7)(tensor, data), data)


@pytest.mark.parametrize(
    ("quantization", "dtype", "expected"),
    [("fp8-block128", "F8_E4M3", 0.00078), ("nvfp4-modelopt", "U8", 0.0001)],
)
def test_training_changes_as_many_quantized_values_as_were_measured(
    quantization: str, dtype: str, expected: float
) -> None:
    data = np.random.default_rng(3).integers(0, 0x7E, 4_000_000, np.uint8)
    checkpoint = Checkpoint.model_validate({"quantization": quantization})
    tensor = Tensor("model.layers.5.mlp.experts.0.down_proj.weight", dtype, (2000, 2000))
    assert fraction(changes.training(checkpoint, 1e-6, 1), tensor, data, 1) == pytest.approx(
        expected, rel=0.1
    )
    faster = fraction(changes.training(checkpoint, 3e-6, 1), tensor, data, 1)
    assert faster == pytest.approx(3 * expected, rel=0.1)


@pytest.mark.parametrize("make", [
    lambda: changes.synthetic(Checkpoint(), densities("bf16", {}), 1),
    lambda: changes.training(Checkpoint(), 1e-6, 1),
], ids=["synthetic", "training"])  # fmt: skip
def test_memory_is_that_of_some_tensors_however_many_there_are(
    tmp_path: Path, make: Callable[[], changes.Change]
) -> None:
    """24 tensors of 1 MiB, 2 a group: a group's old, base and new bytes, and what one tensor is made with."""
    write_model(tmp_path / "base", 24, 1 << 19)
    tracemalloc.start()
    try:
        done = stream(tmp_path / "base", tmp_path / "delta", make(), group_bytes=2 << 20, workers=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert done.bytes == 24 << 20
    assert peak < 20 << 20
