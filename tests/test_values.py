"""What a tensor's bytes are as numbers."""

import numpy as np
import pytest

from stitch_core.state import ITEM_BITS
from stitch_core.values import element_bytes, to_float64


def test_bf16_and_half() -> None:
    values = to_float64("BF16", np.array([0x3F80, 0xC000, 0x7F80, 0x0001], "<u2").tobytes())
    assert values is not None
    assert values.tolist() == [1.0, -2.0, np.inf, 2.0**-133]
    half = to_float64("F16", np.array([0x3C00, 0xFC00], "<u2").tobytes())
    assert half is not None
    assert half.tolist() == [1.0, -np.inf]


@pytest.mark.parametrize(
    ("dtype", "codes"),
    [
        # byte: number; each the format's largest, smallest and odd ones
        ("F8_E4M3", {0x00: 0.0, 0x38: 1.0, 0x7E: 448.0, 0xFE: -448.0, 0x01: 2.0**-9, 0x7F: None, 0xFF: None}),
        ("F8_E5M2", {0x3C: 1.0, 0x7B: 57344.0, 0x7C: np.inf, 0x01: 2.0**-16, 0x7D: None}),
        ("F8_E4M3FNUZ", {0x40: 1.0, 0x7F: 240.0, 0x01: 2.0**-10, 0x80: None, 0xFF: -240.0}),
        ("F8_E5M2FNUZ", {0x40: 1.0, 0x7F: 57344.0, 0x01: 2.0**-17, 0x80: None}),
        ("F8_E8M0", {0: 2.0**-127, 127: 1.0, 254: 2.0**127, 255: None}),
        ("U8", {0: 0.0, 255: 255.0}),
        ("I8", {0: 0.0, 255: -1.0}),
    ],
)
def test_bytes(dtype: str, codes: dict[int, float | None]) -> None:
    values = to_float64(dtype, bytes(codes))
    assert values is not None
    for got, want in zip(values.tolist(), codes.values(), strict=True):
        assert np.isnan(got) if want is None else got == want


def test_as_torch_reads_them() -> None:
    torch = pytest.importorskip("torch")
    names = {
        "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
    }  # fmt: skip
    for dtype, name in names.items():
        if hasattr(torch, name):
            want = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).to(torch.float64).numpy()
            assert np.array_equal(to_float64(dtype, bytes(range(256))), want, equal_nan=True), dtype


@pytest.mark.parametrize("dtype", ITEM_BITS)
def test_every_dtype_is_known(dtype: str) -> None:
    width, values = element_bytes(dtype), to_float64(dtype, bytes(24))
    assert (width is None) == (values is None) == (dtype in ("F4", "F6_E2M3", "F6_E3M2", "C64"))
    if width is not None and values is not None:
        assert width * 8 == ITEM_BITS[dtype]
        assert values.size * width == 24
