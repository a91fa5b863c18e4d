"""What stands in a replica's way now, and for how long, as its status says it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..ports import Clock


@dataclass(frozen=True)
class Problem:
    """``since`` and ``last`` are wall times; ``began`` is ``since`` on a clock that never jumps, for its age.

    ``count``: how often in a row it came with this message.
    """

    message: str
    since: float
    last: float
    count: int
    began: float

    def shown(self, clock: Clock) -> dict[str, Any]:
        """As status has it, with its ``age`` in seconds."""
        shown = {**asdict(self), "age": clock.monotonic() - self.began}
        del shown["began"]
        return shown


def noted(before: Problem | None, message: str, clock: Clock) -> Problem:
    """What stands in the way after ``message``: since when anything does, whatever its message was."""
    wall, count = clock.time(), before.count if before is not None and before.message == message else 0
    since, began = (before.since, before.began) if before is not None else (wall, clock.monotonic())
    return Problem(message, since, wall, count + 1, began)
