"""What a response says about versions: read from the engine, checked against the ticket, written for clients.

An engine labels tokens with ``str(PolicyVersion)`` in SGLang's form, ``[{"version", "start", "end"}]``. A
client gets the report of ``docs/http.md``. Pure: no I/O, and no state outside one request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..versions import PolicyVersion, VersionConstraint, VersionError

# All that an engine or a report may say about versions in meta_info or metadata.
FIELDS = (
    "run",
    "weight_version",
    "weight_version_start",
    "weight_version_end",
    "weight_versions",
    "kv_versions",
    "kv_passes",
    "kv",
)


class WrongReport(Exception):
    """The engine says what cannot be true of this request: it is not in the state it should be in."""


class Unreported(Exception):
    """The engine does not say which version the tokens have."""


@dataclass(frozen=True)
class Span:
    """``version`` holds for the tokens (or prompt positions) ``[start, end)``."""

    version: PolicyVersion
    start: int
    end: int

    def to_json(self) -> dict[str, int]:
        return {"version": self.version.number, "start": self.start, "end": self.end}


@dataclass(frozen=True)
class Checker:
    """What must hold of one admitted request's versions.

    ``kv_across`` is what "kv" says of a response that spans an activation when the engine does not say.
    """

    admitted: PolicyVersion
    constraint: VersionConstraint
    kv_across: str = "mixed"

    def report(self, fields: Mapping[str, Any], tokens: int | None, current: PolicyVersion) -> dict[str, Any]:
        """The report of one generation of ``tokens`` tokens (None: not known); ``current`` is served now.

        Raises WrongReport and Unreported.
        """
        spans = self._spans(fields.get("weight_versions"), "weight_versions")
        end = spans[-1].end if spans else 0
        if tokens is not None and end != tokens:
            if not spans:
                raise Unreported(f"the engine reports no versions for {tokens} tokens")
            raise WrongReport(f"weight_versions cover {end} tokens of {tokens}")
        if not end:
            label = fields.get("weight_version")
            version = spans[-1].version if spans else current if label is None else self._version(label)
            spans = [Span(version, 0, 0)]
        versions = [span.version for span in spans]
        kv_spans = self._spans(fields.get("kv_versions"), "kv_versions")
        passes = [self._pass(one) for one in fields.get("kv_passes") or ()]
        oldest = min([*versions, *(span.version for span in kv_spans)])
        report: dict[str, Any] = {
            "run": self.admitted.run,
            "weight_version": str(oldest.number),
            "weight_version_start": versions[0].number,
            "weight_version_end": versions[-1].number,
            "weight_versions": [span.to_json() for span in spans if span.end],
            "kv": self._kv(fields.get("kv"), {oldest, versions[-1]}),
        }
        if fields.get("kv_versions") is not None:
            report["kv_versions"] = [span.to_json() for span in kv_spans]
        if passes:
            report["kv_passes"] = passes
        return report

    def _kv(self, said: object, versions: set[PolicyVersion]) -> str:
        if said in ("uniform", "mixed"):
            return str(said)
        return "uniform" if versions == {self.admitted} else self.kv_across

    def _pass(self, value: object) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not _is_count(value.get("first_token")):
            raise WrongReport(f"kv_passes holds {value!r}")
        spans = self._spans(value.get("kv_versions"), "kv_passes")
        return {"first_token": value["first_token"], "kv_versions": [span.to_json() for span in spans]}

    def _spans(self, value: object, name: str) -> list[Span]:
        """Contiguous from 0, versions never going down, each one allowed."""
        if value is None:
            return []
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise WrongReport(f"{name} is {value!r}, not a list of spans")
        spans: list[Span] = []
        for item in value:
            if not isinstance(item, Mapping) or not (
                _is_count(item.get("start")) and _is_count(item.get("end"))
            ):
                raise WrongReport(f"{name} holds {item!r}, not a span")
            span = Span(self._version(item.get("version")), item["start"], item["end"])
            last = spans[-1] if spans else Span(span.version, 0, 0)
            if span.start != last.end or span.end < span.start:
                raise WrongReport(f"{name} is not contiguous: {value!r}")
            if span.version < last.version:
                raise WrongReport(f"{name} goes back from {last.version} to {span.version}")
            spans.append(span)
        return spans

    def _version(self, label: object) -> PolicyVersion:
        """The version of one label, if this request may have been served by it."""
        try:
            version = PolicyVersion.parse(label if isinstance(label, str) else repr(label))
        except VersionError:
            raise WrongReport(f"the engine's label is {label!r}, not a version") from None
        if version.run != self.admitted.run:
            raise WrongReport(f"the engine's label is {version}, not of the run of {self.admitted}")
        if version < self.admitted:
            raise WrongReport(f"the engine's label is {version}, older than {self.admitted}")
        if not self.constraint.allows(version):
            raise WrongReport(f"the engine's label is {version}, the request said {self.constraint.fields()}")
        return version


def per_choice(metadata: Mapping[str, Any], choices: int) -> list[dict[str, Any]]:
    """The version fields of each choice; ``metadata`` has lists of them where there are several choices."""
    fields = {name: metadata[name] for name in FIELDS if metadata.get(name) is not None}
    nested = fields.get("weight_versions", [])[:1]
    if choices == 1 and not (nested and isinstance(nested[0], list)):
        return [fields]
    for name in ("weight_versions", "kv_versions", "kv_passes"):
        value = fields.get(name, [[]] * choices)
        if len(value) != choices or not all(isinstance(item, list) for item in value):
            raise Unreported(f"the engine does not report {name} for each of {choices} choices")
    listed = {name: value for name, value in fields.items() if isinstance(value, list)}
    return [{**fields, **{name: value[i] for name, value in listed.items()}} for i in range(choices)]


def combined(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One report for several choices: bounds over all of them, spans and KV listed by choice."""
    if len(reports) == 1:
        return reports[0]
    whole: dict[str, Any] = {
        "run": reports[0]["run"],
        "weight_version": str(min(int(report["weight_version"]) for report in reports)),
        "weight_version_start": min(report["weight_version_start"] for report in reports),
        "weight_version_end": max(report["weight_version_end"] for report in reports),
        "weight_versions": [report["weight_versions"] for report in reports],
        "kv": "mixed" if any(report["kv"] == "mixed" for report in reports) else "uniform",
    }
    for name in ("kv_versions", "kv_passes"):
        if any(name in report for report in reports):
            whole[name] = [report.get(name, []) for report in reports]
    return whole


def strip(fields: Any) -> None:
    """Remove every version field in place: what is said before the end may turn out wrong."""
    if isinstance(fields, dict):
        for name in FIELDS:
            fields.pop(name, None)


def top_level(report: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a report that OpenAI routes carry at the top level too."""
    return {name: report[name] for name in ("run", "weight_version_start", "weight_version_end")}


def total(reports: Iterable[Mapping[str, Any]]) -> int:
    """Tokens that the spans of these reports cover."""
    return sum(report["weight_versions"][-1]["end"] if report["weight_versions"] else 0 for report in reports)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
