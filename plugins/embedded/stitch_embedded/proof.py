"""Proof of truth: recompute what every trajectory of a run claims, from the store alone, to the bit.

For each trajectory (recorded.py) the claimed versions are rebuilt from the store, verified, and its
log-probabilities computed again by the replay of the engine's own arithmetic. Three answers come out:

- proven: every log-probability is the recorded one, bit for bit;
- discriminated: under the neighbouring version of another state at least one would have been different, so
  that a wrong label could not have passed;
- controls: labels shifted to that neighbour, and trajectories of a replica that relabels without copying,
  must both be found out.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import multiprocessing
import random
import struct
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stitch_core.chain import ChainReader, NoHead
from stitch_core.files import PosixFiles
from stitch_core.host_checkpoint import HostCheckpoint, HostCheckpointError, RepresentationInvalid
from stitch_core.lineage import NoPlan
from stitch_core.manifest import Manifest
from stitch_core.ports import StoreError, SystemClock
from stitch_core.replica.staging import Stager, WrongBase
from stitch_core.scratch import scratch_parent
from stitch_core.stores import open_store

from .config import ModelConfig
from .recorded import ProofError, Record, RunFile, read_trajectories
from .replay import Replayer, Trajectory
from .weights import CheckpointFiles

__all__ = ["Control", "ProofError", "ProofReport", "prove"]

SHOWN_FAILURES = 10
REQUIRED_FRACTION = 0.99
Progress = Callable[[str], None]

# What may be wrong with the run, and not with the proof.
UNREADABLE = (
    StoreError, OSError, ValueError, NoHead, NoPlan, HostCheckpointError, RepresentationInvalid, WrongBase,
)  # fmt: skip


@dataclass
class Control:
    """``found`` of ``tried`` trajectories with wrong labels were found out."""

    tried: int = 0
    found: int = 0

    @property
    def failed_as_it_must(self) -> bool:
        return self.tried > 0 and self.found >= REQUIRED_FRACTION * self.tried


@dataclass
class ProofReport:
    """What the proof found. ``spanning`` counts trajectories over an activation by KV mode."""

    trajectories: int = 0
    tokens: int = 0
    proven: int = 0
    failures: list[str] = field(default_factory=list)
    spanning: dict[str, int] = field(default_factory=lambda: {"in_place": 0, "retract": 0})
    min_spanning: int = 0
    discriminable: int = 0
    discriminated: int = 0
    equal_states: list[list[int]] = field(default_factory=list)
    shifted: Control = field(default_factory=Control)
    faulty: Control = field(default_factory=Control)

    def problems(self) -> list[str]:
        """What is not as it must be, in words; empty: the run is proven."""
        found = []
        if self.proven < self.trajectories or not self.trajectories:
            found.append(
                f"{self.trajectories - self.proven} of {self.trajectories} trajectories are not proven"
            )
        for mode, count in self.spanning.items():
            if count < self.min_spanning:
                found.append(f"only {count} trajectories span an activation in mode {mode}")
        if self.discriminated < REQUIRED_FRACTION * self.discriminable:
            found.append(f"only {self.discriminated} of {self.discriminable} differ under a neighbour")
        if not self.shifted.failed_as_it_must:
            found.append(
                f"shifted labels were found out in only {self.shifted.found} of {self.shifted.tried}"
            )
        if self.faulty.tried and not self.faulty.failed_as_it_must:
            found.append(
                f"the faulty replica was found out in only {self.faulty.found} of {self.faulty.tried}"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "problems": self.problems(), "ok": not self.problems()}


def prove(directory: Path, *, processes: int = 2, progress: Progress = lambda _: None) -> ProofReport:
    """Prove the run in ``directory``. Raises ProofError when what it needs is missing or damaged."""
    run = RunFile.read(directory)
    records = [r for r in read_trajectories(directory, run.run) if r.claimed.tokens]
    progress(f"{len(records)} trajectories")
    try:
        manifests = asyncio.run(manifests_of(run, directory))
    except UNREADABLE as error:
        raise ProofError(f"run {run.run} cannot be read from its store: {error}") from error
    states = {manifest.number: manifest.state for manifest in manifests}
    _check_claims(run, records, states)
    shifts = [under_neighbours(record, states) for record in records]
    parts = [range(i, len(records), max(1, processes)) for i in range(min(max(1, processes), len(records)))]
    work = [(run, directory, [records[i].claimed for i in part], [shifts[i] for i in part]) for part in parts]
    outcomes: dict[int, tuple[list[float], list[float] | None]] = {}
    if len(work) > 1:
        with ProcessPoolExecutor(len(work), mp_context=multiprocessing.get_context("spawn")) as pool:
            results = list(pool.map(replay_part, work))
    else:
        results = [replay_part(one) for one in work]
    for part, result in zip(parts, results, strict=True):
        outcomes.update(zip(part, result, strict=True))
    return _judge(run, records, states, [outcomes[i] for i in range(len(records))])


def _check_claims(run: RunFile, records: Sequence[Record], states: Mapping[int, str]) -> None:
    for record in records:
        for version in sorted(map(int, record.claimed.versions())):
            if version not in states:
                raise ProofError(
                    f"trajectory {record.id} claims version {version}, run {run.run} has no such version"
                )


def _judge(
    run: RunFile,
    records: Sequence[Record],
    states: Mapping[int, str],
    outcomes: Sequence[tuple[list[float], list[float] | None]],
) -> ProofReport:
    report = ProofReport(min_spanning=run.min_spanning, equal_states=_equal_states(states))
    for record, (again, other) in zip(records, outcomes, strict=True):
        same = _bits(again) == _bits(record.logprobs)
        if record.control == "faulty":
            report.faulty.tried += 1
            report.faulty.found += not same
            continue
        report.trajectories += 1
        report.tokens += len(record.logprobs)
        report.proven += same
        if not same and len(report.failures) < SHOWN_FAILURES:
            report.failures.append(_failure(record, again))
        if len({span.version for one in record.claimed.passes for span in one.rows}) > 1:
            report.spanning[record.kv_mode] = report.spanning.get(record.kv_mode, 0) + 1
        if other is not None:
            found_out = _bits(other) != _bits(record.logprobs)
            report.discriminable += 1
            report.discriminated += found_out
            report.shifted.tried += 1
            report.shifted.found += found_out
    return report


def _bits(values: Sequence[float]) -> bytes:
    """Equality of floats is not enough: 0.0 equals -0.0."""
    return struct.pack(f"<{len(values)}d", *values)


def _failure(record: Record, again: Sequence[float]) -> str:
    pairs = enumerate(zip(record.logprobs, again, strict=True))
    at = next(i for i, pair in pairs if _bits(pair[:1]) != _bits(pair[1:]))
    return f"{record.id}: token {at} was {record.logprobs[at]!r}, its versions give {again[at]!r}"


def under_neighbours(record: Record, states: Mapping[int, str]) -> Trajectory | None:
    """The trajectory under the neighbouring versions of other states; None where there is no such version."""
    numbers = sorted(states)
    used = {int(version) for version in record.claimed.versions()}
    for step in (-1, 1):
        moved = {version: _neighbour(version, step, numbers, states) for version in used}
        if all(number is not None for number in moved.values()):
            return record.claimed.relabelled(lambda version, moved=moved: str(moved[int(version)]))  # type: ignore[misc]
    return None


def _neighbour(version: int, step: int, numbers: Sequence[int], states: Mapping[int, str]) -> int | None:
    at = bisect.bisect_left(numbers, version) + step
    while 0 <= at < len(numbers):
        if states[numbers[at]] != states[version]:
            return numbers[at]
        at += step
    return None


def _equal_states(states: Mapping[int, str]) -> list[list[int]]:
    by_state: dict[str, list[int]] = {}
    for number in sorted(states):
        by_state.setdefault(states[number], []).append(number)
    return [numbers for numbers in by_state.values() if len(numbers) > 1]


# ---------------------------------------------------------------------------------- versions from the store


async def manifests_of(run: RunFile, directory: Path) -> list[Manifest]:
    """All versions of the run, oldest first."""
    store = open_store(run.store_url(directory))
    try:
        reader = ChainReader(store)
        head, _ = await reader.head(run.run)
        newest = await reader.manifest(run.run, head)
        return list(reversed(await reader.back_to(newest, above_floor=False)))
    finally:
        await store.close()


def replay_part(
    work: tuple[RunFile, Path, list[Trajectory], list[Trajectory | None]],
) -> list[tuple[list[float], list[float] | None]]:
    """In a process of its own: the claimed and the shifted log-probabilities of some trajectories."""
    try:
        return _recompute(*work)
    except UNREADABLE as error:
        # Not every exception can travel between processes.
        raise ProofError(f"run {work[0].run} cannot be replayed: {error}") from None


def _recompute(
    run: RunFile, directory: Path, claimed: list[Trajectory], shifted: list[Trajectory | None]
) -> list[tuple[list[float], list[float] | None]]:
    torch.set_num_threads(1)
    boot = directory / run.boot
    config = ModelConfig.read(boot)
    dtype = CheckpointFiles(boot, config).stored_dtype()
    _check_vocabulary(config, claimed)
    replayer = Replayer(config, run.max_len, dtype=dtype)
    others = [trajectory for trajectory in shifted if trajectory is not None]
    wanted = {int(v) for trajectory in [*claimed, *others] for v in trajectory.versions()}
    with (
        tempfile.TemporaryDirectory(prefix="stitch-proof-", dir=scratch_parent(boot)) as scratch,
        contextlib.closing(_weights(run, directory, Path(scratch), wanted, config, dtype)) as versions,
    ):
        values = replayer.replay(versions, [*claimed, *others])
    rest = iter(values[len(claimed) :])
    return [
        (again, None if other is None else next(rest))
        for again, other in zip(values[: len(claimed)], shifted, strict=True)
    ]


def _check_vocabulary(config: ModelConfig, claimed: Sequence[Trajectory]) -> None:
    for trajectory in claimed:
        highest = max((*trajectory.prompt, *trajectory.tokens))
        if highest >= config.vocab:
            raise ProofError(f"token {highest} is not one of the model's {config.vocab}")


def _weights(
    run: RunFile, directory: Path, scratch: Path, wanted: set[int], config: ModelConfig, dtype: torch.dtype
) -> Generator[tuple[str, dict[str, Tensor]], None, None]:
    """(number, all tensors) of the wanted versions, oldest first, rebuilt and verified as a replica does."""
    store = open_store(run.store_url(directory))
    files = PosixFiles()
    host = HostCheckpoint(scratch, files)
    stager = Stager(
        store, ChainReader(store), host, directory / run.boot, files=files, clock=SystemClock(),
        rng=random.Random(0), run_blocking=_inline, activity=lambda _: None,
    )  # fmt: skip
    loop = asyncio.new_event_loop()  # nothing may fail between it and what closes it
    try:
        tensors: dict[str, Tensor] = {}
        before: dict[str, str] = {}
        for manifest in loop.run_until_complete(manifests_of(run, directory)):
            if manifest.number not in wanted:
                continue
            staged = loop.run_until_complete(stager.stage(manifest))
            digests = {name: info.digest for name, info in staged.table.items()}
            changed = [name for name, digest in digests.items() if before.get(name) != digest]
            tensors |= CheckpointFiles(staged.directory, config).read(changed, dtype)
            before = digests
            yield str(manifest.number), tensors
    finally:
        host.close()
        loop.run_until_complete(store.close())
        loop.close()


async def _inline(function: Callable[..., Any], /, *args: Any) -> Any:
    return function(*args)
