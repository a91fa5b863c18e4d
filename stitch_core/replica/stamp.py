"""Puts the report into what the engine answers, route by route: whole bodies and the events of streams.

A stamper belongs to one request. It raises report.WrongReport and report.Unreported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..versions import PolicyVersion
from .report import FIELDS, Checker, Unreported, combined, per_choice, strip, top_level, total

Json = dict[str, Any]


class Stamper(Protocol):
    """What differs between the routes."""

    def body(self, value: Any) -> Any:
        """A whole answer, with the report."""
        ...

    def event(self, value: Json) -> Json:
        """One event of a stream: with the report if it is a final one, without version fields if not."""
        ...

    def missing(self) -> str | None:
        """Why the stream may not end here as a success."""
        ...


class _Base:
    def __init__(
        self, checker: Checker, current: Callable[[], PolicyVersion], rename: Callable[[str], str]
    ) -> None:
        """``current``: the version that is served now; ``rename``: the client's id for an engine's id."""
        self._checker = checker
        self._current = current
        self._rename = rename
        self._seen: set[int] = set()
        self._reported: set[int] = set()
        self._failed = False

    def missing(self) -> str | None:
        if self._failed:
            return None
        if not self._reported:
            return "the engine's stream ended without the versions of its tokens"
        if unreported := self._seen - self._reported:
            return f"the engine's stream ended without the versions of choice {min(unreported)}"
        return None

    def _report(self, fields: Json, tokens: Any) -> Json:
        count = tokens if isinstance(tokens, int) else None
        return self._checker.report(fields, count, self._current())

    def _rename_id(self, holder: Json) -> None:
        if isinstance(holder.get("id"), str):
            holder["id"] = self._rename(holder["id"])

    def _is_error(self, value: Json) -> bool:
        self._failed = self._failed or "error" in value
        return "error" in value


class GenerateStamper(_Base):
    """/generate: the report lies in ``meta_info``; batches and n > 1 are lists, or events with an index."""

    def body(self, value: Any) -> Any:
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, dict) or not isinstance(item.get("meta_info"), dict):
                raise Unreported("the engine's answer has no meta_info")
            self._stamp(item)
        return value

    def event(self, value: Json) -> Json:
        meta = value.get("meta_info")
        if self._is_error(value) or not isinstance(meta, dict):
            return value
        index = value.get("index", 0)
        self._seen.add(index)
        if meta.get("finish_reason") is None:
            strip(meta)
            self._rename_id(meta)
        else:
            self._stamp(value)
            self._reported.add(index)
        return value

    def _stamp(self, item: Json) -> None:
        meta = item["meta_info"]
        fields = {name: meta[name] for name in FIELDS if name in meta}
        output_ids = item.get("output_ids")
        tokens = meta.get("completion_tokens", len(output_ids) if isinstance(output_ids, list) else None)
        report = self._report(fields, tokens)
        strip(meta)
        meta.update(report)
        self._rename_id(meta)


class OpenAIStamper(_Base):
    """OpenAI routes: the report lies in ``metadata``, its bounds at the top level too.

    A choice with a ``meta_info`` (SGLang's return_meta_info) has its own report there as well. In a stream
    the report comes with each choice's ``finish_reason``, or for all with the last one's or later.
    """

    def body(self, value: Any) -> Any:
        if not isinstance(value, dict) or not isinstance(value.get("choices"), list) or not value["choices"]:
            raise Unreported("the engine's answer has no choices")
        metadata = value.get("metadata") or {}
        tokens = (value.get("usage") or {}).get("completion_tokens")
        reports = self._choices(metadata, len(value["choices"]), tokens)
        for choice, report in zip(value["choices"], reports, strict=True):
            self._meta_info(choice, report)
        self._stamp(value, combined(reports))
        return value

    def event(self, value: Json) -> Json:
        if self._is_error(value) or not isinstance(value.get("choices"), list):
            return value
        self._rename_id(value)
        choices = [choice for choice in value["choices"] if isinstance(choice, dict)]
        for choice in choices:
            self._meta_info(choice, {})
        self._seen |= {choice.get("index", 0) for choice in choices}
        finished = [choice.get("index", 0) for choice in choices if choice.get("finish_reason") is not None]
        metadata = value.get("metadata")
        spans = metadata.get("weight_versions") if isinstance(metadata, dict) else None
        if not isinstance(spans, list) or (choices and not finished):
            strip(metadata)
            return value
        listed_by_choice = bool(spans) and isinstance(spans[0], list)
        covered = self._seen if listed_by_choice or not finished else set(finished)
        self._stamp(value, combined(self._choices(metadata, max(1, len(covered)), None)))
        self._reported |= covered or {0}
        return value

    def _choices(self, metadata: Any, choices: int, tokens: Any) -> list[Json]:
        fields = per_choice(metadata, choices)
        if choices == 1:
            return [self._report(fields[0], tokens)]
        reports = [self._report(item, None) for item in fields]
        if isinstance(tokens, int) and total(reports) != tokens:
            raise Unreported(f"the engine reports the versions of {total(reports)} tokens of {tokens}")
        return reports

    def _meta_info(self, choice: Any, report: Json) -> None:
        """The engine's labels there become the report: trainers read an answer's oldest version from it."""
        meta = choice.get("meta_info") if isinstance(choice, dict) else None
        if isinstance(meta, dict):
            strip(meta)
            meta.update(report)
            self._rename_id(meta)

    def _stamp(self, value: Json, report: Json) -> None:
        metadata = dict(value.get("metadata") or {})
        strip(metadata)
        value["metadata"] = {**metadata, **report}
        value.update(top_level(report))
        self._rename_id(value)
