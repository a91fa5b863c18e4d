"""Hooks on the rollout's side. All of Miles' own generation stays; what is added is in stitch_core."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.generate_hub import single_turn
from miles.utils import http_utils
from miles.utils.misc import load_function

from stitch_core.trainers.rollout import (
    attributed,
    begin_episode,
    forget_abandoned,
    from_session,
    record,
    record_session,
    session_of,
)
from stitch_core.trainers.rollout_side import RolloutSide
from stitch_core.trainers.signatures import probe, require

from .inner import adding
from .symbols import ROLLOUT

GENERATE = "miles.rollout.generate_hub.single_turn.generate"
LEGACY_ROLLOUT = "miles.rollout.sglang_rollout.generate_rollout"
ROLLOUT_CLASS = "miles.rollout.inference_rollout.inference_rollout_common.InferenceRolloutFn"


@functools.cache
def _side() -> RolloutSide:
    require("stitch_miles", probe(ROLLOUT))
    return RolloutSide(http_utils, "miles")


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    """``--custom-generate-function-path``: Miles' own generation (or ``stitch_inner_generate``), recorded.

    What an agent asked through the session server comes with its record (see ``session.py``). Raises
    Unattributed.
    """
    args, sample = input.args, input.sample
    side = _side()
    side.set_up(args)
    forget_abandoned(sample)
    episode = begin_episode(input.evaluation, session_of(sample))
    inner = getattr(args, "stitch_inner_generate", None)
    output = await (load_function(inner) if inner else single_turn.generate)(input)
    made = output.samples
    for one in made if isinstance(made, list) else [made]:
        if from_session(one):
            record_session(one, side.run)
        else:
            record(one, episode)
        attributed(one)
    return output


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """``--rollout-function-path`` where Miles takes a function: its own, from the head as it is now."""
    _side().begin(args, evaluation)
    inner = getattr(args, "stitch_inner_rollout", None) or LEGACY_ROLLOUT
    return load_function(inner)(args, rollout_id, data_source, evaluation=evaluation)


class StitchRolloutFn:
    """``--rollout-function-path`` where Miles takes a class: its own, from the head as it is now."""

    def __init__(self, input: Any) -> None:
        self._args = input.args
        inner = load_function(getattr(self._args, "stitch_inner_rollout", None) or ROLLOUT_CLASS)
        self._inner = inner(input)

    async def __call__(self, input: Any) -> Any:
        _side().begin(self._args, input.evaluation)
        output = self._inner(input)
        return await output if inspect.isawaitable(output) else output


# Miles looks here for flags of the functions that it is given.
for _function, _setting, _default in (
    (generate, "inner_generate", GENERATE),
    (generate_rollout, "inner_rollout", LEGACY_ROLLOUT),
    (StitchRolloutFn, "inner_rollout", ROLLOUT_CLASS),
):
    setattr(_function, "add_arguments", adding(_setting, _default))  # noqa: B010
