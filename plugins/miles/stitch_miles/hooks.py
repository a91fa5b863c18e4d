"""Hooks on the trainer's side, named by Miles' flags (see MILES_FORK.md for the whole list)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from stitch_core.trainers import hooks
from stitch_core.trainers.group import ProcessGroup
from stitch_core.trainers.signatures import probe, require, resolve, table

from . import symbols

logger = logging.getLogger("stitch")

STOCK_POSTPROCESSOR = "miles.rollout.session.v2.postprocessor_hub.default_postprocess"

post_write = hooks.post_write
before_train_step = hooks.before_train_step
post_save = hooks.post_save


class Misconfigured(ValueError):
    """Miles' own flags do not fit publishing; the message says which to set."""


def megatron_init(args: Any) -> None:
    """``--custom-megatron-init-path``: check everything before a model is built. Called on every rank."""
    import torch.distributed
    from miles.utils.distributed_utils import get_gloo_group

    group = ProcessGroup(torch.distributed, get_gloo_group)
    hooks.set_up(args, group, "miles", lambda: _preflight(args, group.rank))
    if symbols.writes_deltas():
        hooks.start_through_stitch(resolve(symbols.UPDATER), _repair_zero_dim)
    else:
        from miles.backends.megatron_utils import actor

        from .updater import updater_class

        actor.UpdateWeightFromDistributed = updater_class()


def _preflight(args: Any, rank: int) -> None:
    own = not symbols.writes_deltas()
    findings = probe((*symbols.COMMON, *(symbols.GATHER if own else symbols.DELTA)))
    title = "stitch_miles" + (": Stitch's own encoder, this Miles has none" if own else "")
    if rank == 0:
        logger.info("%s", table(title, findings))
    require(title, findings)
    check_flags(args, own)


def check_flags(args: Any, own: bool) -> None:
    """Raises Misconfigured with every flag that has to change."""
    wanted = {"update_weight_transfer_mode": "broadcast", "colocate": False}
    if not own:
        wanted = {
            "update_weight_transfer_mode": "disk-delta",
            "update_weight_delta_checksum": hooks.delta_checksum(args),
            "custom_update_weight_post_write_path": "stitch_miles.hooks.post_write",
        }
    wrong = [
        f"--{key.replace('_', '-')} {value} (it is {getattr(args, key, None)})"
        for key, value in wanted.items()
        if getattr(args, key, value if own else None) != value
    ]
    buffered = getattr(args, "fully_async", False) and getattr(args, "custom_async_data_buffer_path", None)
    if getattr(args, "stitch_max_staleness", None) is not None and not buffered:
        wrong.append(
            "--fully-async with --custom-async-data-buffer-path stitch_miles.buffer.StitchDataBuffer, which "
            "stitch_max_staleness is for (or leave that out)"
        )
    wrong += _session_server(args)
    if wrong:
        raise Misconfigured(f"set {', '.join(wrong)}")


def _session_server(args: Any) -> list[str]:
    server = getattr(args, "use_session_server", False)
    if not server:
        return []
    if server != "v2":
        return ["--use-session-server v2, since v1 has no place where an answer's versions could be kept"]
    if getattr(args, "session_sample_postprocessor_path", None) == STOCK_POSTPROCESSOR:
        return [
            "--session-sample-postprocessor-path stitch_miles.session.postprocess, without which nothing "
            "says which versions made an agent's samples"
        ]
    return []


def _repair_zero_dim(updater: type) -> None:
    original = updater._for_each_hf_bucket  # type: ignore[attr-defined]

    def buckets(self: Any, bucket_func: Callable[..., None]) -> None:
        def repaired(bucket: list[tuple[str, Any]], *rest: Any) -> None:
            bucket_func([(name, hooks.at_least_1d(tensor)) for name, tensor in bucket], *rest)

        original(self, repaired)

    updater._for_each_hf_bucket = buckets  # type: ignore[attr-defined]
