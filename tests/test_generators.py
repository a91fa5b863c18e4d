"""The checkpoints that tests and the simulator train."""

import numpy as np

from stitch_core.safetensors import Tensor
from stitch_core.testing.checkpoints import step


def test_a_step_from_zero_is_a_number_and_no_nan() -> None:
    """BF16 zero less one unit was 0xFFFF; SGLang answered a null log-probability for such weights."""
    zeros = np.array([0x0000, 0x8000] * 200, dtype="<u2")
    moved = step(np.random.default_rng(0), {"w": Tensor("BF16", (400,), zeros.tobytes())}, density=1.0)["w"]
    assert set(np.frombuffer(moved.data, dtype="<u2")) == {0x0001, 0x8001}
