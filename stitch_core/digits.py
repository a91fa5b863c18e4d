"""Numbers as people and scripts write them: ASCII digits, and nothing else.

``int`` and ``float`` also take blanks around a number, signs, underscores in it, and the digits of every
script, so that a slip of the hand is another number instead of an error.
"""

from __future__ import annotations

import math
import re

_WHOLE = re.compile(r"[0-9]{1,19}\Z")
_DECIMAL = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\Z")
LARGEST = 2**63 - 1
"""What manifests and indexes hold."""


def whole(text: str, least: int = 0, most: int = LARGEST) -> int:
    """``text`` as a number from ``least`` to ``most``, both 0 or more. Raises ValueError."""
    if not _WHOLE.match(text) or not least <= int(text) <= most:
        raise ValueError(f"expected a whole number from {least} to {most}, got {text!r}")
    return int(text)


def decimal(text: str) -> float:
    """``text`` as a finite number from 0 on, such as 3, 0.5 or 1e-3. Raises ValueError."""
    if not _DECIMAL.match(text) or not math.isfinite(float(text)):
        raise ValueError(f"expected a number from 0 on, got {text!r}")
    return float(text)
