"""What forward passes keep of weights: dropped before other weights are served, or none are activated.

For the scheduler's thread, between two passes. ``runner`` is SGLang's ModelRunner. What is kept where no
survey of the model looks (in a global of a module, say) is found by `stitch profile`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from .plugin import current_settings
from .survey import Survey, bump

logger = logging.getLogger(__name__)

NAMED = 4


def before_init_cuda_graphs(runner: Any, *_: Any, **__: Any) -> None:
    """The model is loaded and whole, and no forward pass was made: SGLang calls this at each start."""
    try:
        runner.stitch_survey = _survey(runner)
    except Exception as error:
        logger.exception("stitch: the model cannot be surveyed")
        raise SystemExit(f"stitch: the model cannot be surveyed: {error!r}") from error


def obstacle(runner: Any) -> str:
    """Why no other weights may be loaded into the live model, by whatever way; "" if they may."""
    survey = runner.stitch_survey
    moved = survey.moved()
    if moved:
        return (
            f"a forward pass has moved {_named(moved)} to other memory, where no load would reach what is "
            "computed with: this model cannot be updated while it serves"
        )
    if _has_graphs(runner) and (made := survey.made()):
        return (
            f"a forward pass has made {_named(made)}, which may be of the weights, and captured graphs go on "
            "reading it: start with --disable-cuda-graph, or, if it holds nothing of weights, name it in "
            "STITCH_CONSTANTS"
        )
    return ""


def drop(runner: Any) -> None:
    """Take away what forward passes made, before other weights are loaded."""
    dropped = runner.stitch_survey.drop()
    if dropped:
        logger.info("stitch: dropped, to be made anew of the next weights: %s", _named(dropped))


def load_from_disk(runner: Any, load: Callable[[], Any]) -> tuple[Any, str]:
    """What ``load`` answers, SGLang's own load into the live model; which tensors it put elsewhere, if any.

    Raises Replaced.
    """
    before = _survey(runner)
    reply = load()
    after = runner.stitch_survey = _survey(runner)
    bump(one.tensor for one in after.tensors.values())
    replaced = _named(before.moved(after))
    if replaced and _has_graphs(runner):
        raise Replaced(f"the load has replaced {replaced}, which captured graphs go on reading")
    return reply, replaced


class Replaced(Exception):
    """The weights that are computed with are partly old."""


def _survey(runner: Any) -> Survey:
    return Survey(runner.model, current_settings().constants)


def _has_graphs(runner: Any) -> bool:
    """Whether passes are replayed, which run no code of the model that could make a cache anew."""
    eager = runner.eager_runner
    runners = (runner.decode_cuda_graph_runner, runner.prefill_cuda_graph_runner)
    return any(one is not None and one is not eager for one in runners)


def _named(paths: list[str]) -> str:
    more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
    return ", ".join(paths[:NAMED]) + more
