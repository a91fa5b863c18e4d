"""Which weights computed what: the versions that one request's tokens and KV rows carry, and their JSON
forms.

A *pass* is one life of a request's KV cache. Its rows are positions of prompt + output; the row at position
`prompt_tokens - 1 + j` gives output token j. Most requests have one pass. A pause in `retract` mode ends
the pass; the next one recomputes all positions known by then and goes on sampling. Passes tell the whole
truth; the fields of a response are views of them:

- `weight_versions`: spans over output tokens;
- `kv_versions`: spans over prompt positions [0, prompt_tokens - 1) in the last pass that gave a token;
- `kv`: "mixed" if that pass holds rows of more than one version, else "uniform";
- `kv_passes`: only where the three above do not determine the passes (a replica that used both pause modes,
  or weights activated while a retracted prefix was being recomputed).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Span:
    """`version` holds for indices [start, end)."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Pass:
    """Rows [0, rows[-1].end) were computed under `rows`; output tokens from `first_token` on came from this
    pass.
    """

    first_token: int
    rows: tuple[Span, ...]


def merge(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Join neighbours of equal version and drop empty spans."""
    out: list[Span] = []
    for span in spans:
        if span.end <= span.start:
            continue
        if out and out[-1].version == span.version:
            out[-1] = Span(span.version, out[-1].start, span.end)
        else:
            out.append(span)
    return tuple(out)


def cut(spans: Iterable[Span], start: int, end: int) -> tuple[Span, ...]:
    """The part of `spans` within [start, end), renumbered to begin at 0."""
    return merge(Span(s.version, max(s.start, start) - start, min(s.end, end) - start) for s in spans)


def token_spans(prompt: int, tokens: int, passes: Sequence[Pass]) -> tuple[Span, ...]:
    """`weight_versions`: versions over output tokens [0, tokens) of a request with `prompt` prompt tokens."""
    out: list[Span] = []
    for index, one in enumerate(passes):
        stop = passes[index + 1].first_token if index + 1 < len(passes) else tokens
        rows = cut(one.rows, prompt - 1 + one.first_token, prompt - 1 + stop)
        out += [Span(s.version, s.start + one.first_token, s.end + one.first_token) for s in rows]
    return merge(out)


def derived_passes(
    prompt: int, weights: Sequence[Span], prompt_kv: Sequence[Span], kv: str
) -> tuple[Pass, ...]:
    """The passes that the summary fields mean where no `kv_passes` is given.

    "mixed": one pass, KV kept across activations. "uniform": each version recomputed all that came before it.
    """
    if kv == "mixed":
        rows = [*prompt_kv, *(Span(s.version, prompt - 1 + s.start, prompt - 1 + s.end) for s in weights)]
        return (Pass(0, merge(rows)),)
    return tuple(Pass(s.start, (Span(s.version, 0, prompt - 1 + s.end),)) for s in weights)


def version_fields(prompt: int, tokens: int, passes: Sequence[Pass], label: str) -> dict[str, Any]:
    """The version fields of `meta_info`. `label` is the engine's current one, reported when there are no
    tokens.
    """
    weights = token_spans(prompt, tokens, passes)
    last = passes[-1].rows if passes else ()
    prompt_kv = cut(last, 0, prompt - 1)
    kv = "mixed" if len(last) > 1 else "uniform"
    fields = {
        "weight_version": weights[-1].version if weights else label,
        "weight_versions": spans_json(weights),
        "kv_versions": spans_json(prompt_kv),
        "kv": kv,
    }
    if tokens and derived_passes(prompt, weights, prompt_kv, kv) != tuple(passes):
        fields["kv_passes"] = [
            {"first_token": one.first_token, "kv_versions": spans_json(one.rows)} for one in passes
        ]
    return fields


def passes_of(prompt: int, fields: dict[str, Any]) -> tuple[Pass, ...]:
    """The passes that a response's version fields state: the inverse of `version_fields`.

    Raises ValueError if the fields are missing or do not fit together.
    """
    try:
        weights = spans_from(fields["weight_versions"])
        if listed := fields.get("kv_passes"):
            passes = tuple(Pass(int(p["first_token"]), spans_from(p["kv_versions"])) for p in listed)
        else:
            passes = derived_passes(prompt, weights, spans_from(fields["kv_versions"]), str(fields["kv"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"no version fields that could be replayed: {error!r}") from error
    tokens = weights[-1].end if weights else 0
    if tokens and token_spans(prompt, tokens, passes) != weights:
        raise ValueError("kv_versions and weight_versions do not fit together")
    return passes


def spans_json(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """The wire form, SGLang's: `[{"version", "start", "end"}]`."""
    return [{"version": s.version, "start": s.start, "end": s.end} for s in spans]


def spans_from(value: Any) -> tuple[Span, ...]:
    """Read the wire form; ValueError unless the spans are contiguous from 0."""
    spans = merge(Span(str(s["version"]), int(s["start"]), int(s["end"])) for s in value)
    at = 0
    for span in spans:
        if span.start != at:
            raise ValueError(f"spans are not contiguous at {at}: {value}")
        at = span.end
    return spans
