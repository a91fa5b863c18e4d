"""``--custom-async-data-buffer-path stitch_miles.buffer.StitchDataBuffer``, with ``--fully-async``."""

from __future__ import annotations

import copy
from typing import Any

from miles.rollout.fully_async_data_buffer import DefaultDataBuffer, iter_samples

from stitch_core.trainers.rollout import attributed
from stitch_core.trainers.settings import read_settings
from stitch_core.trainers.signatures import probe, require

from .symbols import BUFFER


class StitchDataBuffer(DefaultDataBuffer):
    """Miles' own buffer, which takes no sample that nobody can attribute and always bounds staleness.

    ``stitch_max_staleness``: versions by which a group's oldest may be behind the head when it is trained on.
    Miles measures from the head when the batch was asked for, and asks for each batch but the first while it
    trains on the one before, so one version is added. With ``--max-weight-staleness`` its measure stays.
    """

    def __init__(self, input: Any) -> None:
        """Raises ValueError unless one of the two bounds is given, and not below what the loop can keep.

        Raises FrameworkChanged where Miles has another buffer than the one that is known.
        """
        require("stitch_miles", probe(BUFFER))
        strict, miles = read_settings(input.args).max_staleness, input.args.max_weight_staleness
        if (strict is None) == (miles is None):
            raise ValueError("set stitch_max_staleness or --max-weight-staleness, one: this buffer bounds it")
        if strict == 0:
            raise ValueError(
                "stitch_max_staleness must be at least 1 with --fully-async: each batch is collected while "
                "the one before it is trained on"
            )
        # Miles' own arguments stay as they are: others read them too.
        args = copy.copy(input.args)
        args.max_weight_staleness = miles if strict is None else strict
        super().__init__(type(input)(args, input.unused_handler_fn))
        self._strict = strict is not None
        self._ahead = 0

    async def put(self, input: Any) -> None:
        for sample in iter_samples(input.group):
            attributed(sample)
        await super().put(input)

    async def get(self, current_version: int | None = None, **context: Any) -> Any:
        """As Miles': ``current_version`` is the head when the batch was asked for."""
        at = None if current_version is None else current_version + self._ahead
        return await super().get(current_version=at, **context)

    def get_metrics(self) -> dict[str, float]:
        """As Miles', which asks once a batch is complete."""
        self._ahead = 1 if self._strict else 0
        metrics: dict[str, float] = super().get_metrics()
        return metrics
