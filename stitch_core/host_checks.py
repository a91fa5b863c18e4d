"""What must be true of a boot checkpoint, a plan and what it led to, before a host's copy may hold it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .delta.fold import PlanDeltas, RepresentationInvalid
from .lineage import Plan, Source
from .manifest import Manifest
from .ports import Files
from .safetensors import TensorRef
from .state import TensorInfo, TensorTable, layout_difference, state_digest


class HostCheckpointError(Exception):
    """The copy cannot do what was asked, for a reason that lies on this host."""


def check_boot(source: Path, table: TensorTable, version0: Manifest) -> None:
    """HostCheckpointError if the weights from ``source`` are not version 0 of the run."""
    state = state_digest(table)
    if state != version0.state:
        raise HostCheckpointError(
            f"the base checkpoint at {source} is not version 0 of run {version0.run}: "
            f"its state is {state}, expected {version0.state}"
        )


def check_fetched(source: Source, directory: Path, files: Files) -> None:
    """HostCheckpointError if a file of ``source`` is not in ``directory``, or has another size."""
    for file in source.representation.files:
        path = directory / file.name
        if not files.exists(path) or files.size(path) != file.size:
            raise HostCheckpointError(f"{path} of {source.version} is not there, or not {file.size} bytes")


def check_full(full: Source, table: TensorTable, present: Mapping[str, TensorRef] | None) -> None:
    """RepresentationInvalid if ``table``, of the full's files, is not its state, or not of one layout with
    the tensors that are ``present``.
    """
    if present is not None:
        layout = {name: TensorInfo(ref.dtype, ref.shape, "") for name, ref in present.items()}
        difference = layout_difference(layout, table)
        if difference is not None:
            raise RepresentationInvalid(full.digest(), f"{full.version}: {difference}")
    state = state_digest(table)
    if state != full.state:
        raise RepresentationInvalid(
            full.digest(), f"{full.version}: its files hold state {state}, not {full.state}"
        )


def check_target(plan: Plan, deltas: PlanDeltas) -> None:
    """HostCheckpointError if the plan's deltas lead elsewhere than to its target; nothing is applied yet."""
    if state_digest(deltas.final) != plan.target.state:
        raise HostCheckpointError(f"the plan does not lead to the state of {plan.target.version}")


def check_applied(table: TensorTable, target: Manifest) -> None:
    """HostCheckpointError if the tensors, as they were written, are not the target's."""
    state = state_digest(table)
    if state != target.state:
        raise HostCheckpointError(
            f"{target.version} was applied, but the state is {state}, not {target.state}"
        )
