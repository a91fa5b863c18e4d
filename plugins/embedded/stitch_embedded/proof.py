"""Proof of truth: recompute what every trajectory of a run claims, from the store alone, to the bit.

A run directory holds ``run.json`` and ``trajectories.jsonl.zst`` (the fields are in `RunFile` and
`read_trajectories`). For each trajectory the claimed versions are rebuilt from the store, verified, and its
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
import io
import json
import multiprocessing
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import zstandard
from torch import Tensor

from stitch_core.chain import ChainReader
from stitch_core.files import PosixFiles
from stitch_core.host_checkpoint import HostCheckpoint
from stitch_core.manifest import Manifest
from stitch_core.ports import SystemClock
from stitch_core.replica.staging import Stager
from stitch_core.stores import open_store

from .config import ModelConfig
from .replay import Replayer, Trajectory
from .weights import CheckpointFiles

SHOWN_FAILURES = 10
REQUIRED_FRACTION = 0.99
Progress = Callable[[str], None]


class ProofError(ValueError):
    """The run directory cannot be proven at all: something is missing or cannot be read."""


@dataclass(frozen=True)
class RunFile:
    """``run.json``: ``store`` is a URL, or a path relative to the run directory; ``boot`` a path likewise.

    ``max_len`` is the replicas': another cache length may round differently. ``min_spanning`` is how many
    trajectories must span an activation in each KV mode (0: whatever there is).
    """

    store: str
    run: str
    boot: str
    max_len: int
    min_spanning: int = 20

    @classmethod
    def read(cls, directory: Path) -> RunFile:
        path = directory / "run.json"
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            known = {name: value[name] for name in cls.__dataclass_fields__ if name in value}
            return cls(**known)
        except (OSError, ValueError, TypeError) as error:
            raise ProofError(f"{path} is not the description of a run: {error}") from None

    def store_url(self, directory: Path) -> str:
        return self.store if ":" in self.store else f"file:{(directory / self.store).resolve()}"


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


@dataclass(frozen=True)
class Record:
    """One line of the trajectory file. ``control`` is None, or "faulty" for the negative control."""

    id: str
    kv_mode: str
    logprobs: tuple[float, ...]
    claimed: Trajectory
    control: str | None


def read_trajectories(path: Path) -> list[Record]:
    """The trajectories of a run. Raises ProofError naming the line."""
    records = []
    try:
        with path.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as stream:
            for number, line in enumerate(io.TextIOWrapper(stream, encoding="utf-8"), 1):
                try:
                    records.append(_record(json.loads(line)))
                except (KeyError, TypeError, ValueError) as error:
                    raise ProofError(f"{path}, line {number}: {error!r}") from error
    except (OSError, zstandard.ZstdError) as error:
        raise ProofError(f"{path} cannot be read: {error}") from error
    return records


def _record(line: dict[str, Any]) -> Record:
    claimed = Trajectory.of(line["prompt_ids"], line["output_ids"], line, line.get("temperature", 1.0))
    logprobs = tuple(float(value) for value in line["logprobs"])
    if len(logprobs) != len(claimed.tokens):
        raise ValueError(f"{len(logprobs)} log-probabilities for {len(claimed.tokens)} tokens")
    return Record(str(line["id"]), str(line["kv_mode"]), logprobs, claimed, line.get("control"))


def prove(directory: Path, *, processes: int = 2, progress: Progress = lambda _: None) -> ProofReport:
    """Prove the run in ``directory``. Raises ProofError, and what the store and the checkpoint raise."""
    run = RunFile.read(directory)
    records = [r for r in read_trajectories(directory / "trajectories.jsonl.zst") if r.claimed.tokens]
    progress(f"{len(records)} trajectories")
    states = asyncio.run(_states(run, directory))
    shifts = [_shift(record, states) for record in records]
    parts = [range(i, len(records), max(1, processes)) for i in range(min(max(1, processes), len(records)))]
    work = [
        (run, directory, [records[i].claimed for i in part], [shifts[i] for i in part], part[0] == 0)
        for part in parts
    ]
    outcomes: dict[int, tuple[list[float], list[float] | None]] = {}
    if len(work) > 1:
        with ProcessPoolExecutor(len(work), mp_context=multiprocessing.get_context("spawn")) as pool:
            results = list(pool.map(_replay, work))
    else:
        results = [_replay(one) for one in work]
    for part, result in zip(parts, results, strict=True):
        outcomes.update(zip(part, result, strict=True))
    return _judge(run, records, states, [outcomes[i] for i in range(len(records))])


def _judge(
    run: RunFile,
    records: Sequence[Record],
    states: Mapping[int, str],
    outcomes: Sequence[tuple[list[float], list[float] | None]],
) -> ProofReport:
    report = ProofReport(min_spanning=run.min_spanning, equal_states=_equal_states(states))
    for record, (again, other) in zip(records, outcomes, strict=True):
        same = tuple(again) == record.logprobs
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
            found_out = tuple(other) != record.logprobs
            report.discriminable += 1
            report.discriminated += found_out
            report.shifted.tried += 1
            report.shifted.found += found_out
    return report


def _failure(record: Record, again: Sequence[float]) -> str:
    at = next(i for i, (a, b) in enumerate(zip(record.logprobs, again, strict=True)) if a != b)
    return f"{record.id}: token {at} was {record.logprobs[at]!r}, its versions give {again[at]!r}"


def _shift(record: Record, states: Mapping[int, str]) -> Trajectory | None:
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


async def _manifests(run: RunFile, directory: Path) -> list[Manifest]:
    """All versions of the run, oldest first."""
    store = open_store(run.store_url(directory))
    try:
        reader = ChainReader(store)
        head, _ = await reader.head(run.run)
        newest = await reader.manifest(run.run, head)
        return list(reversed(await reader.back_to(newest, above_floor=False)))
    finally:
        await store.close()


async def _states(run: RunFile, directory: Path) -> dict[int, str]:
    return {manifest.number: manifest.state for manifest in await _manifests(run, directory)}


def _replay(
    work: tuple[RunFile, Path, list[Trajectory], list[Trajectory | None], bool],
) -> list[tuple[list[float], list[float] | None]]:
    """In a process of its own: the claimed and the shifted log-probabilities of some trajectories."""
    run, directory, claimed, shifted, _ = work
    torch.set_num_threads(1)
    boot = directory / run.boot
    config = ModelConfig.read(boot)
    dtype = CheckpointFiles(boot, config).stored_dtype()
    replayer = Replayer(config, run.max_len, dtype=dtype)
    others = [trajectory for trajectory in shifted if trajectory is not None]
    wanted = {int(v) for trajectory in [*claimed, *others] for v in trajectory.versions()}
    with tempfile.TemporaryDirectory(prefix="stitch-proof-") as scratch:
        versions = _weights(run, directory, Path(scratch), wanted, config, dtype)
        values = replayer.replay(versions, [*claimed, *others])
    rest = iter(values[len(claimed) :])
    return [
        (again, None if other is None else next(rest))
        for again, other in zip(values[: len(claimed)], shifted, strict=True)
    ]


def _weights(
    run: RunFile, directory: Path, scratch: Path, wanted: set[int], config: ModelConfig, dtype: torch.dtype
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """(number, all tensors) of the wanted versions, oldest first, rebuilt and verified as a replica does."""
    loop = asyncio.new_event_loop()
    store = open_store(run.store_url(directory))
    files = PosixFiles()
    host = HostCheckpoint(scratch, files)
    stager = Stager(
        store, ChainReader(store), host, directory / run.boot, files=files, clock=SystemClock(),
        rng=random.Random(0), run_blocking=_inline, activity=lambda _: None,
    )  # fmt: skip
    try:
        manifests = loop.run_until_complete(_manifests(run, directory))
        missing = wanted - {manifest.number for manifest in manifests}
        if missing:
            raise ProofError(f"version {min(missing)} is claimed, but run {run.run} has no such version")
        tensors: dict[str, Tensor] = {}
        before: dict[str, str] = {}
        for manifest in manifests:
            if manifest.number not in wanted:
                continue
            loop.run_until_complete(stager.stage(manifest))
            digests = {name: info.digest for name, info in host.table.items()}
            changed = [name for name, digest in digests.items() if before.get(name) != digest]
            tensors |= CheckpointFiles(host.directory, config).read(changed, dtype)
            before = digests
            yield str(manifest.number), tensors
    finally:
        host.close()
        loop.run_until_complete(store.close())
        loop.close()


async def _inline(function: Callable[..., Any], /, *args: Any) -> Any:
    return function(*args)
