"""What a policy version is called, what a request may demand, and how a replica answers.

Pure vocabulary: this module imports nothing of Stitch and does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RUN_ID = re.compile(r"(?![.-])[A-Za-z0-9._-]{1,128}\Z")
_SPELLING = "1 to 128 of A-Z a-z 0-9 . _ -, not starting with '.' or '-'"
_VERSION = re.compile(r"(?P<run>[^/]+)/weight_v(?P<number>[0-9]{6,18})\Z")
LAST_NUMBER = 10**18 - 1
"""The highest version number: names and keys have up to 18 digits for it."""

HEADER_MIN = "x-stitch-min-version"
HEADER_EXACT = "x-stitch-exact-version"
HEADER_RUN = "x-stitch-run"
HEADER_ADMITTED = "x-stitch-admitted-version"
HEADER_REPLICA = "x-stitch-replica"
HEADER_CONSUMER = "x-stitch-consumer"


SHOWN = 160
"""Characters of a wrong value in a message: enough for a run id that is one too long."""


class VersionError(ValueError):
    """A version, a run id or a constraint that cannot be read. Never means "no version" or "base"."""


def check_run_id(run: object) -> str:
    """Return ``run`` if it is a valid run id, else raise VersionError."""
    if not isinstance(run, str) or not RUN_ID.match(run):
        raise VersionError(f"run id {shown(run)} is not valid: {_SPELLING}")
    return run


def request_scope(run: str, consumer: object) -> str:
    """What the ids of one consumer's requests begin with at every engine: ``<run>~<consumer>~``.

    Neither name can contain the ``~``, so that no scope is the beginning of another. Raises VersionError.
    """
    if not isinstance(consumer, str) or not RUN_ID.match(consumer):
        raise VersionError(f"consumer {shown(consumer)} is not valid: {_SPELLING}")
    return f"{check_run_id(run)}~{consumer}~"


def directory_name(number: int) -> str:
    """``weight_v000007``: six digits, more from a million on."""
    return f"weight_v{number:06d}"


@dataclass(frozen=True, order=True)
class PolicyVersion:
    """One point on a run's linear chain. Versions of different runs are not comparable in meaning."""

    run: str
    number: int

    def __post_init__(self) -> None:
        check_run_id(self.run)
        if not is_number(self.number):
            raise VersionError(f"version number {shown(self.number)} is not an integer {_ALLOWED}")

    def __str__(self) -> str:
        return f"{self.run}/{directory_name(self.number)}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Read ``<run>/weight_v000007``; raises VersionError for anything else."""
        match = _VERSION.match(text) if isinstance(text, str) else None
        if not match:
            raise VersionError(f"{shown(text)} is not a version: expected <run>/weight_v000007")
        version = cls(match["run"], int(match["number"]))
        if str(version) != text:
            raise VersionError(f"{text!r} is not a version: {version} is how it is spelled")
        return version


@dataclass(frozen=True)
class VersionConstraint:
    """What a request demands of the version that serves it. All None: anything goes."""

    min_version: int | None = None
    exact_version: int | None = None
    run: str | None = None

    def __bool__(self) -> bool:
        return (self.min_version, self.exact_version, self.run) != (None, None, None)

    @classmethod
    def parse(cls, body_field: object = None, headers: Mapping[str, str] | None = None) -> VersionConstraint:
        """Merge the body field ``weight_version`` with the ``X-Stitch-*`` headers.

        ``headers`` has lower-case names. Absent and null mean no constraint. Raises VersionError for
        anything malformed, and when body and header disagree.
        """
        values: dict[str, Any] = {}
        if body_field is not None:
            if not isinstance(body_field, dict):
                raise VersionError(
                    'weight_version must be an object such as {"min_version": 7}, '
                    f"not {type(body_field).__name__}"
                )
            unknown = sorted(set(body_field) - {"min_version", "exact_version", "run"})
            if unknown:
                raise VersionError(
                    f"weight_version has an unknown key {shown(unknown[0])}, not min_version, "
                    "exact_version, run"
                )
            values = {k: v for k, v in body_field.items() if v is not None}
            for key in ("min_version", "exact_version"):
                if key in values and not is_number(values[key]):
                    given = shown(values[key])
                    raise VersionError(f"weight_version.{key} must be an integer {_ALLOWED}, not {given}")
        for key, name in (("min_version", HEADER_MIN), ("exact_version", HEADER_EXACT), ("run", HEADER_RUN)):
            text = (headers or {}).get(name)
            if text is None:
                continue
            value: Any = text.strip()
            if key != "run":
                if not re.fullmatch(r"\d{1,18}", value, re.ASCII):
                    raise VersionError(f"header {name} must be an integer {_ALLOWED}, not {shown(text)}")
                value = int(value)
            if values.get(key, value) != value:
                said = shown(values[key])
                raise VersionError(f"header {name} says {shown(value)}, weight_version.{key} says {said}")
            values[key] = value
        if "run" in values:
            check_run_id(values["run"])
        low, exact = values.get("min_version"), values.get("exact_version")
        if low is not None and exact is not None and low > exact:
            raise VersionError(f"min_version {low} and exact_version {exact} exclude each other")
        return cls(**values)

    def allows(self, version: PolicyVersion) -> bool:
        """Whether ``version`` meets every demand."""
        return (
            (self.run is None or self.run == version.run)
            and (self.min_version is None or version.number >= self.min_version)
            and (self.exact_version is None or version.number == self.exact_version)
        )

    def fields(self) -> dict[str, Any]:
        """The demands that are set, as the body field ``weight_version`` spells them."""
        items = {"min_version": self.min_version, "exact_version": self.exact_version, "run": self.run}
        return {k: v for k, v in items.items() if v is not None}


@dataclass(frozen=True)
class Refusal:
    """An answer that is not a generation, in the one envelope that every part of Stitch uses.

    ``retry`` is where a retry can help: "here", "elsewhere" or "never"; ``details`` are extra JSON fields.
    """

    status: int
    type: str
    message: str
    retry: str
    details: Mapping[str, Any] = field(default_factory=dict)
    retry_after: float | None = None

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        error = {
            "type": self.type,
            "message": self.message,
            "retryable": self.retry != "never",
            "retry": self.retry,
            **self.details,
        }
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Response headers that belong to the refusal."""
        if self.retry_after is None:
            return {}
        return {"retry-after": str(max(1, round(self.retry_after)))}


def malformed(message: str) -> Refusal:
    """400: the constraint or the request cannot be read."""
    return Refusal(400, "InvalidRequest", message, "never")


def not_ready(message: str, *, retry_after: float = 1.0, **details: Any) -> Refusal:
    """409: this replica does not serve that yet, and is going to."""
    return Refusal(409, "WeightVersionNotReady", message, "here", details, retry_after)


def elsewhere(message: str, **details: Any) -> Refusal:
    """409: this replica never will serve that; another one may."""
    return Refusal(409, "WeightVersionElsewhere", message, "elsewhere", details)


def gone(message: str, **details: Any) -> Refusal:
    """410: no live replica serves that and the channel has passed it."""
    return Refusal(410, "WeightVersionGone", message, "never", details)


def unavailable(
    message: str, *, retry: str = "elsewhere", retry_after: float = 1.0, **details: Any
) -> Refusal:
    """503: nothing can be said about versions, since no engine can generate now."""
    return Refusal(503, "EngineUnavailable", message, retry, details, retry_after)


def judge(constraint: VersionConstraint, serving: PolicyVersion) -> Refusal | None:
    """Whether a replica that serves ``serving`` and moves up on its run may take the request now.

    Speaks only of numbers on the served run; a constraint that names another run is the caller's to
    answer, since only the caller knows whether a switch to that run is coming.
    """
    if constraint.run not in (None, serving.run):
        raise ValueError(
            f"judge() was asked about run {constraint.run!r} on a replica of run {serving.run!r}"
        )
    applied: dict[str, Any] = {"run": serving.run, "applied": serving.number}
    exact, low = constraint.exact_version, constraint.min_version
    if exact is not None and exact < serving.number:
        return elsewhere(
            f"version {exact} is behind version {serving.number}, which this replica serves",
            target_version=exact,
            **applied,
        )
    wanted = max(v for v in (exact, low, -1) if v is not None)
    if wanted > serving.number:
        return not_ready(
            f"version {wanted} is not served yet: this replica serves {serving.number}",
            target_version=wanted,
            **applied,
        )
    return None


_ALLOWED = f"from 0 to {LAST_NUMBER}"


def is_number(value: object) -> bool:
    """Whether a value may be a version's number."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LAST_NUMBER


def shown(value: object) -> str:
    """What was given, for a message; of what is long only the beginning."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"
