"""Hooks on the trainer's side, named by slime's flags (see MILES_FORK.md for the whole list)."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from typing import Any

from stitch_core.trainers import hooks
from stitch_core.trainers.group import ProcessGroup
from stitch_core.trainers.signatures import probe, require, resolve, table

from .symbols import TRAINER, UPDATER

logger = logging.getLogger("stitch")

post_write = hooks.post_write
before_train_step = hooks.before_train_step


class Misconfigured(ValueError):
    """slime's own flags do not fit publishing; the message says which to set."""


def megatron_init(args: Any) -> None:
    """``--custom-megatron-init-path``: check everything before a model is built. Called on every rank."""
    import torch.distributed
    from slime.utils.distributed_utils import get_gloo_group

    group = ProcessGroup(torch.distributed, get_gloo_group)
    hooks.set_up(args, group, "slime", lambda: _preflight(args, group.rank), launch_command())
    hooks.start_through_stitch(resolve(UPDATER), _repair_zero_dim)
    if getattr(args, "save_hf", None):
        from slime.backends.megatron_utils import actor

        hooks.offer_exports(actor, "save_hf_model_to_path")


def launch_command() -> list[str]:
    """The words of the launch script's command line, from Ray's table of jobs; [] where that cannot be read.

    slime drops flags that it does not know. Here, in a worker, this is the only place where they still are.
    """
    try:
        import ray
        from ray._private.state import jobs

        if not ray.is_initialized():
            return []
        job = ray.get_runtime_context().get_job_id()
        text = next(entry["Entrypoint"] for entry in jobs() if entry["JobID"] == job)
    except Exception:  # not public: whatever it may raise, training can start without
        return []
    try:
        return shlex.split(text)
    except ValueError:  # a lone quotation mark in some word, which Ray writes as it is
        return str(text).split()


def _preflight(args: Any, rank: int) -> None:
    findings = probe(TRAINER)
    if rank == 0:
        logger.info("%s", table("stitch_slime", findings))
    require("stitch_slime", findings)
    check_flags(args)


def check_flags(args: Any) -> None:
    """Raises Misconfigured with every flag that has to change."""
    wanted = {
        "update_weight_mode": "delta",
        "update_weight_transport": "disk",
        "update_weight_delta_checksum": hooks.delta_checksum(args),
        "custom_update_weight_post_write_path": "stitch_slime.hooks.post_write",
    }
    wrong = [
        f"--{key.replace('_', '-')} {value} (it is {getattr(args, key, None)})"
        for key, value in wanted.items()
        if getattr(args, key, None) != value
    ]
    if wrong:
        raise Misconfigured(f"set {', '.join(wrong)}")


def _repair_zero_dim(updater: type) -> None:
    original = updater._iter_hf_tensors  # type: ignore[attr-defined]

    def tensors(self: Any) -> Iterator[tuple[str, Any]]:
        for name, tensor in original(self):
            yield name, hooks.at_least_1d(tensor)

    updater._iter_hf_tensors = tensors  # type: ignore[attr-defined]
