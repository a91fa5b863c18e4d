"""What a finished run leaves in its directory: ``run.json`` and ``trajectories.jsonl.zst``, read and checked.

A line of the second is one generation: ``id``, ``run``, ``kv_mode``, ``prompt_ids``, ``output_ids``,
``logprobs``, ``temperature``, the version fields of its response, and ``control`` where it is a negative one.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from .replay import Trajectory

RUN_FILE = "run.json"
TRAJECTORY_FILE = "trajectories.jsonl.zst"
KV_MODES = ("in_place", "retract")
_URL = re.compile(r"[a-z][a-z0-9+.-]*:")


class ProofError(ValueError):
    """The run cannot be proven at all: something is missing or cannot be read."""


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
        """Raises ProofError."""
        path = directory / RUN_FILE
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            run = cls(**{name: value[name] for name in cls.__dataclass_fields__ if name in value})
            for name, kind in (("store", str), ("run", str), ("boot", str), ("max_len", int)):
                if not isinstance(getattr(run, name), kind):
                    raise TypeError(f"{name} is {getattr(run, name)!r}")
            if not _is_count(run.max_len) or not _is_count(run.min_spanning):
                raise TypeError("max_len and min_spanning are counts")
            return run
        except (OSError, ValueError, TypeError) as error:
            raise ProofError(f"{path} is not the description of a run: {error}") from None

    def store_url(self, directory: Path) -> str:
        return self.store if _URL.match(self.store) else f"file:{(directory / self.store).resolve()}"


@dataclass(frozen=True)
class Record:
    """One line of the trajectory file. ``control`` is None, or "faulty" for the negative control."""

    id: str
    kv_mode: str
    logprobs: tuple[float, ...]
    claimed: Trajectory
    control: str | None


def read_trajectories(directory: Path, run: str) -> list[Record]:
    """The trajectories of a run. Raises ProofError naming the line."""
    path = directory / TRAJECTORY_FILE
    records = []
    for number, line in enumerate(_lines(path), 1):
        try:
            records.append(_record(json.loads(line), run))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ProofError(f"{path}, line {number}: {type(error).__name__}: {error}") from error
    return records


def _lines(path: Path) -> Iterator[bytes]:
    """Every line of every frame. A writer may have ended a frame whenever it wanted to be safe."""
    rest, text = _read(path), bytearray()
    while rest:
        frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            text += frame.decompress(rest)
        except zstandard.ZstdError as error:
            raise ProofError(f"{path} cannot be read: {error}") from error
        if not frame.eof:
            # Without this check what is cut off would just not be counted.
            raise ProofError(f"{path} is cut short")
        rest = frame.unused_data
    yield from bytes(text).splitlines()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ProofError(f"{path} cannot be read: {error}") from error


def _record(line: dict[str, Any], run: str) -> Record:
    prompt, output = line["prompt_ids"], line["output_ids"]
    if not all(isinstance(ids, list) and all(map(_is_count, ids)) for ids in (prompt, output)) or not prompt:
        raise ValueError("prompt_ids and output_ids must be token ids, and a prompt has some")
    if line["run"] != run:
        raise ValueError(f"it is of run {line['run']!r}, not {run!r}")
    if line["kv_mode"] not in KV_MODES:
        raise ValueError(f"kv_mode {line['kv_mode']!r} is none of {', '.join(KV_MODES)}")
    claimed = Trajectory.of(prompt, output, line, float(line.get("temperature", 1.0)))
    _check_versions(claimed)
    logprobs = tuple(float(value) for value in line["logprobs"])
    if len(logprobs) != len(claimed.tokens):
        raise ValueError(f"{len(logprobs)} log-probabilities for {len(claimed.tokens)} tokens")
    return Record(str(line["id"]), line["kv_mode"], logprobs, claimed, line.get("control"))


def _check_versions(claimed: Trajectory) -> None:
    for version in claimed.versions():
        if not version.isdecimal():
            raise ValueError(f"{version!r} is not the number of a version")
    for one in claimed.passes:
        for before, after in itertools.pairwise(int(span.version) for span in one.rows):
            if after < before:
                raise ValueError(f"its versions go down from {before} to {after}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
