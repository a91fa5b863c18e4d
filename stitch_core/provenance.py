"""The provenance log: which versions made which answer, a JSON line each (``docs/operations.md``).

Files are only appended to, in UTF-8; a process that dies leaves at most one line that is no JSON, which
readers pass over. No prompt and no answer is in them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .manifest import read_time

SUFFIX = ".jsonl"
HOUR = 3600


def entries(answer: Any) -> Iterator[dict[str, Any]]:
    """What an answer, or a final event of one, says of its versions: one entry for each generation in it.

    ``index`` is that of a choice or of a copy; ``spans`` are [version, first token, one past the last].
    """
    if isinstance(answer, list):
        for index, item in enumerate(answer):
            for entry in entries(item):
                yield {**entry, "index": entry.get("index", index)}
    elif isinstance(answer, dict):
        meta = answer.get("meta_info")
        if isinstance(meta, dict) and "weight_version_start" in meta:
            yield _entry(meta, meta.get("weight_versions"), meta.get("id"), answer.get("index"))
        elif isinstance(meta := answer.get("metadata"), dict) and "weight_version_start" in meta:
            spans = meta.get("weight_versions") or []
            several = bool(spans) and isinstance(spans[0], list)
            for index, own in enumerate(spans if several else [spans]):
                yield _entry(meta, own, answer.get("id"), index if several else None)


def _entry(meta: Mapping[str, Any], spans: Any, own: Any, index: Any) -> dict[str, Any]:
    rows = [[span["version"], span["start"], span["end"]] for span in spans or ()]
    entry = {
        "id": own, "run": meta.get("run"), "start": rows[0][0] if rows else meta.get("weight_version_start"),
        "end": rows[-1][0] if rows else meta.get("weight_version_end"),
        "oldest": int(meta["weight_version"]) if str(meta.get("weight_version", "")).isdecimal() else None,
        "spans": rows, "tokens": rows[-1][2] if rows else 0, "kv": meta.get("kv"),
    }  # fmt: skip
    return entry if index is None else {**entry, "index": index}


@dataclass
class Lines:
    """The lines of files and of the files in directories; ``bad`` counts those that cannot be read."""

    paths: Iterable[Path]
    bad: int = 0

    def files(self) -> Iterator[Path]:
        """Raises OSError for what is not there."""
        for path in self.paths:
            if path.is_dir():
                yield from sorted(path.glob(f"*{SUFFIX}"))
            else:
                path.stat()
                yield path

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for path in self.files():
            with path.open("rb") as file:
                for raw in file:
                    try:
                        line = json.loads(raw)
                        read_time(line["time"], "time")
                    except (ValueError, KeyError, TypeError, RecursionError):
                        self.bad += 1
                    else:
                        yield line


@dataclass
class Staleness:
    """How far behind the head answers of one consumer were in one hour, by their oldest version.

    ``behind`` maps versions to answers; ``unknown`` counts those whose head or version nobody knew.
    """

    behind: Counter[int] = field(default_factory=Counter)
    unknown: int = 0
    tokens: int = 0

    def add(self, line: Mapping[str, Any]) -> None:
        head, oldest = line.get("head"), line.get("oldest")
        self.tokens += int(line.get("tokens") or 0)
        if isinstance(head, int) and isinstance(oldest, int):
            self.behind[max(0, head - oldest)] += 1
        else:
            self.unknown += 1

    def quantile(self, share: float) -> int | None:
        """The least staleness that ``share`` of the answers do not exceed; None without any."""
        wanted, seen = share * self.behind.total(), 0
        for value in sorted(self.behind):
            seen += self.behind[value]
            if seen >= wanted:
                return value
        return None

    @property
    def mean(self) -> float | None:
        total = self.behind.total()
        return sum(value * count for value, count in self.behind.items()) / total if total else None


def staleness(lines: Iterable[Mapping[str, Any]]) -> dict[tuple[int, str, str], Staleness]:
    """By hour (wall seconds at its begin), run and consumer."""
    found: dict[tuple[int, str, str], Staleness] = {}
    for line in lines:
        hour = int(line["time"] // HOUR) * HOUR
        key = hour, str(line.get("run")), str(line.get("consumer"))
        found.setdefault(key, Staleness()).add(line)
    return dict(sorted(found.items()))
