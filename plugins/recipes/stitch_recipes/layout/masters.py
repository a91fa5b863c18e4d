"""Seeded weights of a model, and how training moves them.

Every tensor is made from the seed and its name, so that one can be made without the others. Updates are
those of Adam once its averages have settled, for gradients that are mostly noise: moving averages with
``beta1 = 0.9`` over the root of a mean square of 1. With weights of std 0.02 that comes near to what was
measured of RL at low learning rates, 0.8 % of the BF16 elements a step at 1e-6 (benchmarks/rl_traces; PULSE,
arXiv 2602.03839, about 1 %), mostly the same small ones again.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator

import numpy as np

from .rounding import F32
from .spec import Tensor

STD = 0.02
BETA1 = 0.9

_NORM = re.compile(r"(norm|norm[01]|layernorm)\.weight$")
_UNIT = np.float32(np.sqrt((1 - BETA1) / (1 + BETA1)))
"""Root mean square of a moving average of unit noise."""


def generator(seed: int, name: str, purpose: int = 0) -> np.random.Generator:
    """Random numbers of one tensor, or of whatever ``name`` is the name of."""
    return np.random.Generator(np.random.SFC64([seed, purpose, zlib.crc32(name.encode())]))


def initial(tensor: Tensor, seed: int) -> F32:
    """The weights that training starts from, with more digits than the checkpoint has."""
    rng = generator(seed, tensor.name)
    noise: F32 = rng.standard_normal(tensor.shape, np.float32)
    noise *= np.float32(STD)
    if _NORM.search(tensor.name):
        return noise + np.float32(1)
    if tensor.name.endswith(".A_log"):  # decays between 1 and 16, as the layer initializes them
        return np.log(rng.uniform(1, 16, tensor.shape)).astype(np.float32)
    return noise


def trained(tensor: Tensor, seed: int, rate: float) -> Iterator[F32]:
    """The weights after 0, 1, 2, ... steps at learning rate ``rate``, without end."""
    weights, rng = initial(tensor, seed), generator(seed, tensor.name, purpose=1)
    average = rng.standard_normal(tensor.shape, np.float32) * _UNIT
    while True:
        yield weights
        noise = rng.random(tensor.shape, np.float32)  # of variance 1/12, four times faster than normal
        noise -= np.float32(0.5)
        noise *= np.float32((1 - BETA1) * np.sqrt(12))
        average *= np.float32(BETA1)
        average += noise
        weights = weights - average * np.float32(rate)
