"""The version record beside a trainer's checkpoint: where a run stood when iteration N was saved."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..ports import Files, write_atomic

FORMAT = "stitch.trainer/1"
TRACKER = "latest_checkpointed_iteration.txt"


class RecordError(ValueError):
    """A record that cannot be read, or is of another run."""


@dataclass(frozen=True)
class RunRecord:
    """``version`` was the head of ``run`` (and ``epoch`` its writer's) when ``rollout_id`` was saved."""

    rollout_id: int
    run: str
    version: int
    epoch: int


def record_path(save: Path, rollout_id: int) -> Path:
    return save / "stitch" / f"rollout_{rollout_id}.json"


def save_record(save: Path, record: RunRecord, files: Files) -> None:
    """Write the record under the trainer's checkpoint directory ``save``, durable."""
    path = record_path(save, record.rollout_id)
    files.make_dirs(path.parent)
    write_atomic(files, path, json.dumps({"format": FORMAT, **asdict(record)}).encode())


def load_record(load: Path, rollout_id: int, files: Files) -> RunRecord | None:
    """The record of a checkpoint, None where there is none. Raises RecordError."""
    path = record_path(load, rollout_id)
    if not files.exists(path):
        return None
    try:
        value: Any = json.loads(files.read(path))
        if value.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        record = RunRecord(**value)
        numbers = (record.rollout_id, record.version, record.epoch)
        if not isinstance(record.run, str) or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError("a field has the wrong type")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RecordError(f"{path} cannot be read: {error}") from None
    return record


def check_run(record: RunRecord, run: str, where: Path) -> None:
    """Raises RecordError when ``record`` is of another run."""
    if record.run != run:
        raise RecordError(
            f"the checkpoint in {where} belongs to run {record.run}, stitch_run says {run}: use that run, or "
            "start the new one from weights without their optimizer state (--finetune)"
        )


def check_record(record: RunRecord, run: str, head: int | None, where: Path) -> None:
    """Whether a trainer may resume from ``record`` in ``run``, whose head is ``head``. Raises RecordError."""
    check_run(record, run, where)
    if head is None or head < record.version:
        raise RecordError(
            f"the checkpoint in {where} was saved at version {record.version} of run {run}, but the store's "
            f"head is {'missing' if head is None else head}: is stitch_store the same one?"
        )


def loaded_record(args: Any, files: Files) -> RunRecord | None:
    """The record of the checkpoint that a trainer with these arguments has loaded; None at a first start.

    The frameworks hand the loaded iteration to the rollout side alone; in the trainer it is where they have
    it from: ``start_rollout_id``, ``ckpt_step``, or Megatron's tracker file in ``load``. Raises RecordError.
    """
    load = getattr(args, "load", None)
    rollout = _loaded_rollout(args, files) if load else None
    if load is None or rollout is None or rollout < 0:
        return None
    return load_record(Path(load).absolute(), rollout, files)


def _loaded_rollout(args: Any, files: Files) -> int | None:
    start, step = getattr(args, "start_rollout_id", None), getattr(args, "ckpt_step", None)
    if start is not None:
        return int(start) - 1
    if step is not None:
        return int(step)
    tracker = Path(args.load).absolute() / TRACKER
    text = files.read(tracker).decode().strip() if files.exists(tracker) else ""
    return int(text) if text.isdigit() else None
