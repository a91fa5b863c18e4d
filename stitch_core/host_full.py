"""A new data directory of a host's copy: the boot checkpoint, or a full with a plan's deltas on top.

Nothing else is touched meanwhile, and every file is durable and proven at the end; the caller puts it in
place of the present one, or removes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from .applying import Applying
from .checkpoint import Checkpoint, Progress, untold
from .delta.fold import CopyDamaged, PlanDeltas, RepresentationInvalid
from .delta.stream import PART_BYTES
from .host_checks import HostCheckpointError, check_boot, check_full, check_target
from .host_data import copy_files, files_of, open_with_index
from .lineage import Plan, Source
from .manifest import Manifest
from .ports import Files
from .safetensors import CheckpointError, TensorRef
from .state import TensorInfo

Built = tuple[Checkpoint, dict[str, TensorInfo]]
"""The checkpoint in the new directory, and its tensors, hashed."""


def copy_boot(
    boot: Checkpoint, data: Path, version0: Manifest, workers: int, progress: Progress = untold
) -> Built:
    """Copy ``boot`` into ``data``; HostCheckpointError if it is not ``version0``, CheckpointError."""
    files = boot.files
    copy_files(files, boot.directory, data, files_of(boot), progress)
    checkpoint = open_with_index(files, data)
    table = checkpoint.table(workers, progress)
    check_boot(boot.directory, table, version0)
    return checkpoint, table


def build_full(
    plan: Plan,
    full: Source,
    data: Path,
    directory_of: Callable[[Source], Path],
    files: Files,
    *,
    sides: Iterable[Path] = (),
    present: Mapping[str, TensorRef] | None = None,
    workers: int = 1,
    part_bytes: int = PART_BYTES,
    progress: Progress = untold,
) -> Built:
    """Copy ``full`` into ``data`` and apply the plan's deltas to it there.

    ``sides`` come along unless the full has a file of that name; ``present`` are the tensors whose names,
    dtypes and shapes it must have. Raises RepresentationInvalid, and HostCheckpointError if the plan does not
    lead to its target or ``data`` changes under it.
    """
    names = [file.name for file in full.representation.files]
    copy_files(files, directory_of(full), data, names, progress)
    for path in sides:
        if path.name not in names:
            copy_files(files, path.parent, data, [path.name])
    try:
        checkpoint = open_with_index(files, data)
        table = checkpoint.table(workers, progress)
    except CheckpointError as error:
        raise RepresentationInvalid(full.digest(), f"{full.version}: {error}") from error
    check_full(full, table, present)
    deltas = PlanDeltas(table, plan.deltas, directory_of, files)
    check_target(plan, deltas)
    try:
        Applying(checkpoint, deltas, table, workers, part_bytes=part_bytes).rewrite(directory_of(full))
    except (CopyDamaged, CheckpointError) as error:
        raise HostCheckpointError(f"{data} was damaged while it was being made: {error}") from error
    for file in checkpoint.weight_files if plan.deltas else ():
        files.sync(data / file)
    return checkpoint, deltas.final
