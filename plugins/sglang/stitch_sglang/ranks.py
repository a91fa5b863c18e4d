"""Staging on every rank or on none: runs on the scheduler's thread, in the same order on all ranks.

What ranks say to each other goes over a group of our own: SGLang's groups are for its own steps.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from stitch_core.replica.room import available_memory, gib

from . import caches
from .messages import StitchStageReqInput, StitchStageReqOutput

logger = logging.getLogger(__name__)

Report = dict[str, Any]

# Seconds: torch's own for a group, and what is added to an update's.
LEAST_WAIT, SLACK = 1800.0, 60.0


def join(scheduler: Any) -> None:
    """Make the group. Called once by each rank, when nothing else is said over the network."""
    import torch
    from sglang.srt.runtime_context import get_parallel

    from .plugin import current_settings

    parallel = get_parallel()
    scheduler.stitch_stager = scheduler.stitch_group = None
    scheduler.stitch_no_images = ""
    if parallel.tp_size > 1:
        # One rank waits here for another that still loads, for as long as an update may take.
        seconds = max(LEAST_WAIT, current_settings().update_timeout + SLACK)
        scheduler.stitch_group = torch.distributed.new_group(
            parallel.tp_group.ranks, backend="gloo", timeout=timedelta(seconds=seconds)
        )


def gather(scheduler: Any, value: Any) -> list[Any]:
    """Every rank's value."""
    import torch

    group = scheduler.stitch_group
    if group is None:
        return [value]
    values: list[Any] = [None] * _count(scheduler)
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def _count(scheduler: Any) -> int:
    import torch

    group = scheduler.stitch_group
    return 1 if group is None else torch.distributed.get_world_size(group)


def stage(scheduler: Any, request: StitchStageReqInput) -> StitchStageReqOutput:
    """Begin, look at or end a stage; the answer has all ranks' reports."""
    if request.action in ("test", "stage"):
        problems = [one for one in gather(scheduler, _open(scheduler)) if one is not None]
        report = problems[0] if problems else _begin(scheduler, request)
    elif scheduler.stitch_stager is None:
        report = {"outcome": "failed", "message": "nothing was begun"}
    else:
        if request.action == "cancel":
            scheduler.stitch_stager.cancel(request.id)
        report = scheduler.stitch_stager.report(request.id)
    return StitchStageReqOutput(id=request.id, reports=gather(scheduler, report))


def not_staged(scheduler: Any, id: str) -> str:
    """Which ranks cannot copy that stage, and "" if all can."""
    stager = scheduler.stitch_stager
    ready = gather(scheduler, stager is not None and stager.staged(id) is not None)
    missing = [str(rank) for rank, one in enumerate(ready) if not one]
    return f"what was staged is not there any more on rank {', '.join(missing)}" if missing else ""


def copy(scheduler: Any, id: str) -> int:
    """The bytes that this rank copied into its weights."""
    copied: int = scheduler.stitch_stager.copy(id)
    return copied


def forget(scheduler: Any) -> None:
    """The weights are about to be loaded by other means."""
    if scheduler.stitch_stager is not None:
        scheduler.stitch_stager.forget()


def obstacle(scheduler: Any) -> str:
    """Why no other weights may be loaded, said by the ranks that know of something."""
    said = gather(scheduler, caches.obstacle(scheduler.tp_worker.model_runner))
    many = len(said) > 1
    return "; ".join(f"rank {rank}: {one}" if many else one for rank, one in enumerate(said) if one)


def lose_images(scheduler: Any, why: str) -> None:
    """What images hold would be copied to where nothing is computed with it: there are none any more."""
    forget(scheduler)
    scheduler.stitch_stager, scheduler.stitch_no_images = None, why


def _open(scheduler: Any) -> Report | None:
    """Make this rank's stager, if there is none; what stands in the way."""
    from .stager import RankStager
    from .survey import Unfit

    if scheduler.stitch_stager is not None:
        return None
    try:
        if scheduler.stitch_no_images:
            raise Unfit(scheduler.stitch_no_images)
        runner = scheduler.tp_worker.model_runner
        _check(runner.model)
        scheduler.stitch_stager = RankStager(
            runner.model, runner.stitch_survey, _loader(runner), pin=runner.device == "cuda",
            ranks=_count(scheduler),
        )  # fmt: skip
    except Unfit as error:
        return {"outcome": "unfit", "message": str(error)}
    except Exception as error:
        logger.exception("stitch: the model cannot be staged")
        return {"outcome": "unfit", "message": repr(error)}
    return None


def _begin(scheduler: Any, request: StitchStageReqInput) -> Report:
    """All ranks measure before any of them takes memory."""
    stager = scheduler.stitch_stager
    seen = gather(scheduler, (stager.layout.nbytes, available_memory()))
    need, room = sum(size for size, _ in seen), min(free for _, free in seen)
    if request.action == "test" and need > room:
        message = (
            f"the images of {len(seen)} ranks take {gib(need)} of memory ({need} bytes), {gib(room)} "
            f"({room} bytes) are available"
        )
        return {"outcome": "unfit", "message": message}
    test = request.action == "test"
    try:
        stager.begin(request.id, Path(request.path), request.state, test=test, second=need <= room)
        report: Report = stager.report(request.id)
    except Exception as error:  # the other ranks wait for this one's word
        report = {"outcome": "failed", "message": repr(error)}
    return report


def _check(model: Any) -> None:
    from sglang.srt.model_executor.model_runner_components.weight_updater import (
        _unsupported_derived_weight_cache_error,
    )

    from .survey import Unfit

    error = _unsupported_derived_weight_cache_error(model)
    if error is not None:
        raise Unfit(error)
    if getattr(model, "secondary_weights", ()):
        raise Unfit("the model loads weights from a second checkpoint")


def _loader(runner: Any) -> Any:
    """As SGLang's disk update loads, without its default dtype, which is one for all threads."""
    import torch
    from sglang.srt.model_loader.loader import DefaultModelLoader

    device = torch.device(runner.device)

    def load(model: Any, tensors: Any) -> None:
        with _side_stream(runner):
            DefaultModelLoader.restore_weights_before_loading(model, device)
            DefaultModelLoader.load_weights_only(model, tensors, device)
            DefaultModelLoader.postprocess_weights(model, device)

    return load


@contextlib.contextmanager
def _side_stream(runner: Any) -> Iterator[None]:
    """Post-processing on a GPU must not wait for what serves, nor the other way round."""
    import torch

    if runner.device != "cuda":
        yield
        return
    with torch.cuda.device(runner.gpu_id), torch.cuda.stream(torch.cuda.Stream()) as stream:
        yield
        stream.synchronize()
