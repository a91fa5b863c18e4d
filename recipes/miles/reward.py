"""A reward for the tiny policy: random, which is enough for gradients."""

from __future__ import annotations

import random
from typing import Any


async def reward(args: Any, sample: Any, **_: Any) -> float:
    return random.random()
