"""What a publisher is given: the boot state that a run starts from, and versions to publish."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .manifest import PayloadFile


@dataclass(frozen=True)
class Boot:
    """Version 0: where the boot checkpoint comes from, in words, and its state digest."""

    source: str
    state: str


@dataclass(frozen=True)
class Payload:
    """A version to publish: files in ``directory`` and what they stand for.

    ``state`` is the state that results, ``base`` the proven state that a delta applies to, ``changed``
    the old and new xxh3-128 of each tensor in it, ``step`` the trainer's step. ``uploaded`` are files that
    others have put under ``Publisher.prefix`` of the version: those are only read back.
    """

    kind: Literal["full", "delta"]
    state: str
    directory: Path
    files: tuple[str, ...]
    base: str | None = None
    encoding: str | None = None
    changed: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    step: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    uploaded: tuple[PayloadFile, ...] = ()
