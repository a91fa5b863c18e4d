"""Small number formats, against torch where torch has them and against their definition where not."""

import numpy as np
import pytest
import torch

from stitch_recipes.layout import rounding


@pytest.fixture(scope="module")
def values() -> rounding.F32:
    """Of many magnitudes, with every tie between two E4M3 values and the edges of its range."""
    rng = np.random.default_rng(7)
    spread = [rng.standard_normal(20_000) * scale for scale in (1e-3, 0.02, 1, 30, 200)]
    codes = rounding.from_e4m3(np.arange(127, dtype=np.uint8))
    ties = (codes[1:] + codes[:-1]) / 2
    edges = [0, -0.0, 448, 460, 464, 465, 1e4, 2.0**-6, 2.0**-9, 2.0**-10, 1.5 * 2.0**-10]
    found = np.concatenate([*spread, ties, np.nextafter(ties, 0), edges]).astype(np.float32)
    return np.concatenate([found, -found])


def test_e4m3_is_what_torch_rounds_to(values: rounding.F32) -> None:
    wanted = torch.from_numpy(values.clip(-448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(rounding.to_e4m3(values), wanted)


def test_every_e4m3_code_means_what_torch_says() -> None:
    codes = np.arange(256, dtype=np.uint8)
    wanted = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(rounding.from_e4m3(codes), wanted, equal_nan=True)


def test_bf16_is_what_torch_rounds_to_and_comes_back(values: rounding.F32) -> None:
    codes = rounding.to_bf16(values)
    wanted = torch.from_numpy(values).bfloat16()
    assert np.array_equal(codes, wanted.view(torch.uint16).numpy())
    assert np.array_equal(rounding.from_bf16(codes), wanted.float().numpy())


def test_e2m1_takes_the_nearest_value_and_the_even_code_at_ties() -> None:
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
    assert rounding.from_e2m1(rounding.to_e2m1(ties)).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert rounding.from_e2m1(rounding.to_e2m1(-ties)).tolist() == [0, -1, -1, -2, -2, -4, -4]
    values = np.random.default_rng(1).uniform(-7, 7, 50_000).astype(np.float32)
    table = rounding.E2M1_VALUES
    nearest = np.abs(table[None, :] - values.clip(-6, 6)[:, None]).min(axis=1)
    assert np.array_equal(np.abs(rounding.from_e2m1(rounding.to_e2m1(values)) - values.clip(-6, 6)), nearest)
    assert np.array_equal(rounding.to_e2m1(table), np.arange(16))


def test_e8m0_puts_the_largest_value_between_four_and_eight() -> None:
    largest = np.array([1e-30, 0.02, 0.5, 1, 3.999, 4, 6, 7.999, 8, 1e30], np.float32)
    scaled = largest / rounding.from_e8m0(rounding.e8m0_for(largest))
    assert ((scaled >= 4) & (scaled < 8)).all()
    assert rounding.e8m0_for(np.zeros(1, np.float32)).tolist() == [127]


def test_nibbles_are_packed_even_column_low() -> None:
    codes = np.arange(16, dtype=np.uint8).reshape(2, 8)
    data = rounding.packed(codes)
    assert data[0].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert np.array_equal(rounding.unpacked(data), codes)
