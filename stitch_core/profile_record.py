"""The record that ``stitch profile`` leaves: for which model, release and flags it found what.

One file has one for each setup. A replica reads it, and says whether its own was profiled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .ports import Files, write_atomic

FORMAT = "stitch-profile-1"
NAME = ".stitch-profile.json"
"""Where a replica looks in its boot checkpoint."""


class RecordError(ValueError):
    """A file that is no record; the message names it."""


@dataclass(frozen=True)
class Setup:
    """``boot``: the state of version 0; ``engine``: with its release; ``flags``: those that matter."""

    boot: str
    engine: str
    flags: Mapping[str, Any]

    @classmethod
    def of(cls, value: Any) -> Setup:
        """Raises ValueError."""
        if (
            not isinstance(value, dict)
            or set(value) != {"boot", "engine", "flags"}
            or not isinstance(value["boot"], str)
            or not isinstance(value["engine"], str)
            or not isinstance(value["flags"], dict)
        ):
            raise ValueError("a setup has boot, engine and flags")
        return cls(**value)


@dataclass(frozen=True)
class Record:
    """``path``: the destination that the update took; ``failed``: the checks that it did not pass."""

    setup: Setup
    path: str
    failed: tuple[str, ...]
    time: float

    @property
    def ok(self) -> bool:
        return not self.failed


def read_records(path: Path, files: Files) -> list[Record]:
    """Those in the file, none if it is not there. Raises RecordError, OSError."""
    try:
        data = files.read(path)
    except FileNotFoundError:
        return []
    try:
        value = json.loads(data)
        if value["format"] != FORMAT:
            raise ValueError(f"its format is {value['format']!r}, not {FORMAT}")
        return [_record(one) for one in value["profiles"]]
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is no record of stitch profile: {error or type(error).__name__}") from None


def _record(value: Any) -> Record:
    failed = value["failed"]
    if not isinstance(failed, list) or not all(isinstance(one, str) for one in failed):
        raise ValueError("failed is no list of names")
    return Record(Setup.of(value["setup"]), str(value["path"]), tuple(failed), float(value["time"]))


def write_record(path: Path, record: Record, files: Files) -> None:
    """Add it, in place of an older one of its setup and path. Raises RecordError, OSError."""
    same = (record.setup, record.path)
    records = [one for one in read_records(path, files) if (one.setup, one.path) != same]
    value = {"format": FORMAT, "profiles": [asdict(one) for one in (*records, record)]}
    write_atomic(files, path, json.dumps(value, indent=2).encode() + b"\n")
