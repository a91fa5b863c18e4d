"""KV rows of several versions before a request's first token, carried in SGLang's version spans.

SGLang notes a change of version only for requests that have tokens. For one in the middle of its prompt we
add an event of no tokens whose label has the rows in it: ``run/weight_v000007#120``, more with ``|`` between.
It travels as the first, empty span, and is taken out again in the HTTP process. Labels have neither sign.
"""

from __future__ import annotations

from typing import Any

ROWS, MORE = "#", "|"


def add_rows(events: list[Any], label: str, rows: int) -> None:
    """Note that prompt positions up to ``rows`` were computed by now, the last of them under ``label``."""
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    said = f"{label}{ROWS}{rows}"
    if events and ROWS in events[0].old_version:
        said = f"{events.pop(0).old_version}{MORE}{said}"
    events.insert(0, WeightVersionEvent(old_version=said, num_output_tokens=0))


def split(spans: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """SGLang's spans as (spans over tokens, spans over prompt positions older than the first token)."""
    if not spans or ROWS not in spans[0]["version"]:
        return spans, []
    rows: list[dict[str, Any]] = []
    for part in spans[0]["version"].split(MORE):
        label, _, end = part.partition(ROWS)
        start = rows[-1]["end"] if rows else 0
        if int(end) > start:
            rows.append({"version": label, "start": start, "end": int(end)})
    return spans[1:], rows


def describe_kv(meta: dict[str, Any], *, keeps_kv: bool) -> None:
    """Put ``kv``, and ``kv_versions`` where known, into a final meta_info of SGLang, and clean its spans.

    ``keeps_kv``: activations are in place.
    """
    if "weight_versions" not in meta:
        return
    spans, rows = split(meta["weight_versions"])
    meta["weight_versions"] = spans
    mixed = keeps_kv and len({span["version"] for span in (*spans, *rows)}) > 1
    meta["kv"] = "mixed" if mixed else "uniform"
    # One that was retracted for want of memory has recomputed its rows, nobody knows under which version.
    if not spans or (mixed and meta.get("num_retractions")):
        return
    last = meta.get("prompt_tokens", 0) - 1
    if not mixed:
        rows = [{"version": spans[-1]["version"], "start": 0, "end": last}]
    elif not rows or rows[-1]["end"] < last:
        start = rows[-1]["end"] if rows else 0
        rows = [*rows, {"version": spans[0]["version"], "start": start, "end": last}]
    kept = [{**row, "end": min(row["end"], last)} for row in rows]
    meta["kv_versions"] = [row for row in kept if row["start"] < row["end"]]
