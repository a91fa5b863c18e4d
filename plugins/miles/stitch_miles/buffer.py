"""``--custom-async-data-buffer-path stitch_miles.buffer.StitchDataBuffer``, with ``--fully-async``."""

from __future__ import annotations

import copy
from typing import Any

from miles.rollout.fully_async_data_buffer import DefaultDataBuffer, iter_samples

from stitch_core.trainers.rollout import attributed
from stitch_core.trainers.settings import read_settings


class StitchDataBuffer(DefaultDataBuffer):
    """Miles' own buffer, which takes no sample that nobody can attribute and always bounds staleness.

    The bound is ``--max-weight-staleness``, or the YAML's ``stitch_max_staleness`` where that is not given;
    Miles measures from the oldest version in a group, which is complete with Stitch's record.
    """

    def __init__(self, input: Any) -> None:
        settings = read_settings(input.args)
        if input.args.max_weight_staleness is None and settings.max_staleness is not None:
            # Miles' own arguments stay as they are: others read them too.
            args = copy.copy(input.args)
            args.max_weight_staleness = settings.max_staleness
            input = type(input)(args, input.unused_handler_fn)
        super().__init__(input)
        if input.args.max_weight_staleness is None:
            raise ValueError("set stitch_max_staleness (or --max-weight-staleness): this buffer bounds it")

    async def put(self, input: Any) -> None:
        for sample in iter_samples(input.group):
            attributed(sample)
        await super().put(input)
