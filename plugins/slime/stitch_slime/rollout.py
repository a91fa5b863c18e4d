"""Hooks on the rollout's side. All of slime's own generation stays; what is added is in stitch_core."""

from __future__ import annotations

import functools
from typing import Any

from slime.rollout import sglang_rollout
from slime.utils import http_utils
from slime.utils.misc import load_function

from stitch_core.trainers.rollout import attributed, current_episode, evaluating, record
from stitch_core.trainers.rollout_side import RolloutSide, one_episode, recording
from stitch_core.trainers.signatures import probe, require

from .symbols import ROLLOUT


@functools.cache
def _side() -> RolloutSide:
    require("stitch_slime", probe(ROLLOUT))
    # slime's generate_and_rm looks it up here for each sample.
    sglang_rollout.generate = recording(sglang_rollout.generate)
    sglang_rollout.generate_and_rm = one_episode(sglang_rollout.generate_and_rm)
    return RolloutSide(http_utils, "slime")


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """``--rollout-function-path``: slime's own, or the one that ``stitch_inner_rollout`` names."""
    _side().begin(args, evaluation)
    inner = getattr(args, "stitch_inner_rollout", None)
    function = load_function(inner) if inner else sglang_rollout.generate_rollout
    return function(args, rollout_id, data_source, evaluation=evaluation)


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """``--custom-generate-function-path``, where the rollout function is not ours: slime's own, or the one
    that ``stitch_inner_generate`` names."""
    _side().set_up(args)
    evaluating.set(evaluation)
    inner = getattr(args, "stitch_inner_generate", None)
    function = recording(load_function(inner)) if inner else sglang_rollout.generate
    return await function(args, sample, sampling_params)


def record_version(args: Any, sample: Any, *, rollout_id: int | None = None, evaluation: bool = False) -> Any:
    """``--rollout-sample-hook-path``: records what is not recorded yet (the requests of a generate function
    of the user's own), and refuses a sample that nobody can attribute."""
    for one in sample if isinstance(sample, list) else [sample]:
        episode = current_episode()
        if episode is not None:
            record(one, episode)
        attributed(one)
    return sample
