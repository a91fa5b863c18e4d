"""In SGLang's scheduler processes: the activation, and KV that never crosses versions.

All of it runs on the scheduler's own thread, between two steps, the same on every rank.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from . import caches, ranks, symbols
from .history import add_rows
from .messages import (
    DONE,
    REFUSED,
    UNCERTAIN,
    StitchActivateReqInput,
    StitchActivateReqOutput,
    StitchStageReqInput,
    StitchStageReqOutput,
)

logger = logging.getLogger(__name__)

# Between our part of a KV key and the client's own. No label has it.
KEY_SEPARATOR = ";"

# What SGLang's disk update says when it failed before it wrote a byte.
NOTHING_WRITTEN = ("Failed to get", "Online weight updates are not supported")


def after_init_request_dispatcher(result: object, scheduler: Any) -> None:
    """Let the scheduler take our messages. Ends the process if a hook of this one is missing."""
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.utils import TypeBasedDispatcher

    missing = [one.target for one in symbols.HOOKED if one.target not in HookRegistry._patched]
    if missing:
        raise SystemExit(f"stitch: SGLang did not apply the hook on {missing[0]}")
    scheduler.stitch_activations = 0
    ranks.join(scheduler)
    handlers: list[tuple[type, Any]] = [
        (StitchActivateReqInput, partial(activate, scheduler)),
        (StitchStageReqInput, partial(stage, scheduler)),
    ]
    scheduler._request_dispatcher += TypeBasedDispatcher(handlers)


def before_handle_generate_request(scheduler: Any, recv_req: Any, **_: Any) -> None:
    """Key the request's KV by the activation under which it is computed."""
    recv_req.extra_key = _key(scheduler, recv_req.extra_key or "")


def stage(scheduler: Any, request: StitchStageReqInput) -> StitchStageReqOutput:
    """See ranks.stage; nothing is begun that could not be activated."""
    if request.action in ("test", "stage") and (why := ranks.obstacle(scheduler)):
        return StitchStageReqOutput(id=request.id, reports=[{"outcome": "failed", "message": why}])
    return ranks.stage(scheduler, request)


def activate(scheduler: Any, request: StitchActivateReqInput) -> StitchActivateReqOutput:
    """Pause, load, label and go on, all before the scheduler's next step: nobody can leave it paused."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    if request.staged is not None and (missing := ranks.not_staged(scheduler, request.staged)):
        return StitchActivateReqOutput(outcome=REFUSED, message=missing)
    loads = request.staged is not None or request.model_path is not None
    if loads and (why := ranks.obstacle(scheduler)):
        return StitchActivateReqOutput(outcome=REFUSED, message=why)
    began = time.monotonic()
    scheduler.pause_generation(PauseGenerationReqInput(mode=request.mode))
    outcome, message, copied, loaded = DONE, "", 0, 0.0
    if loads:
        paused = time.monotonic()
        here = _load(scheduler, request)
        loaded = time.monotonic() - paused
        outcome, message, copied = _agree(scheduler, *here)
    if outcome == UNCERTAIN:
        # Whoever reads the answer ends this server; until then no token is made of these weights.
        return StitchActivateReqOutput(outcome=outcome, message=message)
    if outcome == DONE:
        _relabel(scheduler, request.label, keeps_kv=request.mode == "in_place")
    scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
    return StitchActivateReqOutput(
        outcome=outcome, message=message, pause=time.monotonic() - began, copy=loaded, bytes=copied
    )


def _load(scheduler: Any, request: StitchActivateReqInput) -> tuple[str, str, int]:
    """Outcome, message, bytes of this rank. A forward pass that is in flight reads the old weights."""
    # SGLang's watchdog would take a load that is longer than its 300 s for a batch that hangs, and end us.
    scheduler.cur_batch_for_debug = None
    try:
        _synchronize()
        caches.drop(scheduler.tp_worker.model_runner)
        if request.staged is not None:
            outcome = DONE, "", ranks.copy(scheduler, request.staged)
        else:
            outcome = *_load_from_disk(scheduler, request), 0
        _synchronize()
    except Exception as error:
        logger.exception("stitch: the weight update failed")
        return UNCERTAIN, repr(error), 0
    return outcome


def _load_from_disk(scheduler: Any, request: StitchActivateReqInput) -> tuple[str, str]:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    # The cache is not flushed: its keys keep versions apart, and a flush refuses while requests run.
    update = UpdateWeightFromDiskReqInput(
        model_path=request.model_path, load_format=request.load_format, flush_cache=False
    )
    ranks.forget(scheduler)
    reply, replaced = caches.load_from_disk(
        scheduler.tp_worker.model_runner, lambda: scheduler.weight_updater.update_weights_from_disk(update)
    )
    if replaced:
        ranks.lose_images(scheduler, f"a load from disk has put {replaced} elsewhere")
    if reply.success:
        return DONE, ""
    return REFUSED if reply.message.startswith(NOTHING_WRITTEN) else UNCERTAIN, reply.message


def _agree(scheduler: Any, outcome: str, message: str, copied: int) -> tuple[str, str, int]:
    """One outcome for all ranks: if they differ, some have other weights than others."""
    outcomes = ranks.gather(scheduler, (outcome, message, copied))
    failed = [f"rank {rank}: {said}" for rank, (one, said, _) in enumerate(outcomes) if one != DONE]
    same = len({one for one, _, _ in outcomes}) == 1
    return outcome if same else UNCERTAIN, "; ".join(failed), max(copied for _, _, copied in outcomes)


def _relabel(scheduler: Any, label: str, *, keeps_kv: bool) -> None:
    old = _label()
    in_flight = _in_flight(scheduler) if keeps_kv else []
    if keeps_kv:
        for request in _live(scheduler):
            if not request.output_ids and request.kv.kv_committed_len and request not in in_flight:
                add_rows(request.weight_version_events, old, request.kv.kv_committed_len)
    scheduler.record_weight_version_change(new_version=label)
    scheduler.stitch_activations += 1
    for request in in_flight:
        _own_one_more(request, old)
    for request in _waiting(scheduler):
        request.extra_key = _key(scheduler, request.extra_key.partition(KEY_SEPARATOR)[2])


def _key(scheduler: Any, own: str) -> str:
    """Of run and version, and of the activation: what in-place activations left mixed under a version's key
    must not be found should that version be activated again.
    """
    return f"{_label()}#{scheduler.stitch_activations}{KEY_SEPARATOR}{own}"


def _own_one_more(request: Any, old: str) -> None:
    """The token that a forward pass in flight is about to give comes from the old weights."""
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    events = request.weight_version_events
    if events and events[-1].num_output_tokens == len(request.output_ids) > 0:
        events[-1] = dataclasses.replace(events[-1], num_output_tokens=len(request.output_ids) + 1)
    else:
        events.append(WeightVersionEvent(old_version=old, num_output_tokens=len(request.output_ids) + 1))


def _in_flight(scheduler: Any) -> list[Any]:
    """Requests that a pass which was launched, but not yet read, gives a token."""
    queue = getattr(scheduler, "result_queue", None) if scheduler.enable_overlap else None
    requests = {id(one): one for batch, _ in queue or () for one in batch.reqs if not one.finished()}
    return [one for one in requests.values() if one.inflight_middle_chunks <= 0]


def _live(scheduler: Any) -> set[Any]:
    chunked = [scheduler.chunked_req] if scheduler.chunked_req is not None else []
    return {*scheduler.collect_inflight_reqs(), *chunked, *scheduler.waiting_queue}


def _waiting(scheduler: Any) -> Iterable[Any]:
    """Requests that have no KV yet, those that wait for a grammar included."""
    yield from scheduler.waiting_queue
    for item in scheduler.grammar_manager.grammar_queue:
        yield item[0] if isinstance(item, tuple) else item


def _synchronize() -> None:
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _label() -> str:
    from sglang.srt.runtime_context import get_serving

    label: str = get_serving().weight_version
    return label
