"""Quantized weights: their parts are those of the layout, and what they mean is near what they stand for."""

import numpy as np
import pytest
import torch

from stitch_core.state import ITEM_BITS
from stitch_recipes.layout import formats, quantize, rounding
from stitch_recipes.layout.geometry import Quantization
from stitch_recipes.layout.spec import Tensor
from stitch_recipes.schema import Checkpoint

GROUPS: dict[Quantization, int] = {
    "fp8-channel": 0,
    "fp8-block128": 128,
    "nvfp4-modelopt": 16,
    "mxfp4-packed": 32,
    "int4-packed": 32,
}
RAGGED = (192, 320)  # rows of one and a half blocks of 128, columns of two and a half


def weight(shape: tuple[int, int] = RAGGED) -> rounding.F32:
    values = np.random.default_rng(3).standard_normal(shape, np.float32) * np.float32(0.02)
    values[0, :40] *= 50  # an outlier
    values[:, 64:96] = 0
    return rounding.from_bf16(rounding.to_bf16(values))


@pytest.mark.parametrize("how", GROUPS)
def test_the_parts_are_the_layouts(how: Quantization) -> None:
    checkpoint = Checkpoint(quantization=how, group_size=32 if how == "int4-packed" else None)
    wanted = formats.parts(Tensor("m.weight", "BF16", RAGGED), checkpoint)
    made = quantize.quantize(weight(), how, formats.group_of(checkpoint))
    assert {f"m{end}": array.shape for end, array in made.items()} == {t.name: t.shape for t in wanted}
    for tensor in wanted:
        assert made[tensor.name.removeprefix("m")].dtype.itemsize * 8 == ITEM_BITS[tensor.dtype]


@pytest.mark.parametrize("how", GROUPS)
def test_no_element_is_further_off_than_its_format_allows(how: Quantization) -> None:
    values, group = weight(), GROUPS[how]
    off = np.abs(quantize.dequantize(quantize.quantize(values, how, group), how, group) - values)
    assert (off <= allowed(values, how, group)).all()


def allowed(values: rounding.F32, how: Quantization, group: int) -> rounding.F32:
    """Half a step: relative to the value in FP8, to the largest of the block in 4 bits."""
    size = np.abs(values)
    if how == "fp8-channel":
        smallest = size.max(axis=1, keepdims=True) / 448 * 2.0**-10
        return np.maximum(size * 2.0**-4, smallest) * np.float32(1.001)
    if how == "fp8-block128":
        smallest = np.zeros_like(values)
        for row in range(0, values.shape[0], 128):
            for column in range(0, values.shape[1], 128):
                at = np.s_[row : row + 128, column : column + 128]
                smallest[at] = size[at].max() / 448 * 2.0**-10
        return np.maximum(size * 2.0**-4, smallest) * np.float32(1.001)
    largest = size.reshape(values.shape[0], -1, group).max(axis=2).repeat(group, axis=1)
    if how == "nvfp4-modelopt":
        # A scale of E4M3 is off by 1/16, or by half its smallest step; between 4 and 6 a step is 2 of 6.
        return largest * np.float32(1 / 6 + 1 / 16) + size.max() / np.float32(448 * 2**10)
    if how == "mxfp4-packed":
        return largest * np.float32(1 / 4)  # 8 means 6 where the largest is just below a power of two
    return largest * np.float32(2 / 15 * 0.54)  # half a step, and the scale's own rounding to BF16


@pytest.mark.parametrize("how", GROUPS)
def test_on_average_four_bits_are_off_by_a_tenth_and_eight_by_three_hundredths(how: Quantization) -> None:
    values = np.random.default_rng(5).standard_normal((256, 512), np.float32) * np.float32(0.02)
    back = quantize.dequantize(quantize.quantize(values, how, GROUPS[how]), how, GROUPS[how])
    share = float(np.sqrt(np.mean((back - values) ** 2) / np.mean(values**2)))
    assert share < (0.03 if how.startswith("fp8") else 0.12)


@pytest.mark.parametrize("how", GROUPS)
def test_zeros_stay_zeros(how: Quantization) -> None:
    made = quantize.quantize(np.zeros(RAGGED, np.float32), how, GROUPS[how])
    assert not quantize.dequantize(made, how, GROUPS[how]).any()
    assert all(np.isfinite(array.astype(np.float64)).all() for array in made.values())


def test_blocks_may_be_smaller() -> None:
    checkpoint = Checkpoint(quantization="fp8-block128", group_size=32)
    made = quantize.quantize(weight(), "fp8-block128", formats.group_of(checkpoint))
    scales = made[".weight_scale_inv"]
    wanted = {t.name: t.shape for t in formats.parts(Tensor("m.weight", "BF16", RAGGED), checkpoint)}
    assert scales.shape == wanted["m.weight_scale_inv"] == (6, 10)
    back = quantize.dequantize(made, "fp8-block128", 32)
    assert np.abs(back - weight()).max() <= 0.07 * np.abs(weight()).max()
    assert scales[0, 1] > 10 * scales[0, 3]  # the outlier is in the first two, and in no other


def test_fp8_by_blocks_equals_torch_block_by_block() -> None:
    values = weight()
    made = quantize.quantize(values, "fp8-block128", 128)
    block = torch.from_numpy(values[128:, 256:])
    scale = block.abs().max() / 448
    assert made[".weight_scale_inv"][1, 2] == scale.numpy()
    wanted = (block / scale).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(made[".weight"][128:, 256:], wanted)


def test_int4_is_packed_as_compressed_tensors_does() -> None:
    """Eight values a word, offset by 8, the first lowest (compressed_tensors, pack_to_int32)."""
    values = np.tile(np.arange(-7, 9, dtype=np.float32), (1, 2))
    made = quantize.quantize(values, "int4-packed", 32)
    scale = rounding.from_bf16(made[".weight_scale"].astype(np.uint16))[0, 0]
    steps = np.clip(np.rint(values[0] / scale), -8, 7).astype(np.int64) + 8
    word = sum(int(step) << (4 * place) for place, step in enumerate(steps[:8]))
    assert int(made[".weight_packed"].view("<u4")[0, 0]) == word
    assert made[".weight_shape"].tolist() == [1, 32]


def test_weights_that_share_a_second_scale_are_told_the_largest() -> None:
    values = weight()
    alone, shared = (quantize.quantize(values, "nvfp4-modelopt", 16, one) for one in (None, 8.0))
    assert shared[".weight_scale_2"] == np.float32(8 / (6 * 448))
    assert alone[".weight_scale_2"] == np.float32(np.abs(values).max() / (6 * 448))
