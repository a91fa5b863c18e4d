"""What was measured as one row, in JSON and in words. What is not known is None; ``excludes`` says why."""

from __future__ import annotations

import os
from typing import Any

from stitch_core.cli.common import size_text
from stitch_core.traffic import Json

from .engine import has_gpu
from .measure import Measured
from .projection import GB, Rates

NO_ENGINE = "loading into images, pause, generation before, during and after, and the comparison"


def row_of(m: Measured) -> Json:
    """One line of a table of update times. Seconds, bytes; ``ok`` is None where nothing could be checked."""
    profiled = m.profile.row() if m.profile is not None else {}
    host, engine = m.host, m.asked.recipe.engine
    stage = (m.status.get("last_update") or {}).get("stage") or {}
    fetch = profiled.get("fetch") if profiled else host.fetch if host else None
    apply = profiled.get("stage") if profiled else host.apply if host else None
    preparation = profiled.get("preparation")
    known = [one for one in (fetch, apply, stage.get("seconds")) if one is not None]
    pause, copy = profiled.get("pause"), profiled.get("copy")
    return {
        "recipe": m.asked.recipe.name,
        "checkpoint": {
            "name": m.asked.recipe.serve, "quantization": m.base.checkpoint.quantization, "size": m.base.size,
            "made": m.base.made, "tensors": m.streamed.tensors, "bytes": m.streamed.bytes,
        },
        "destination": {
            "asked": engine.destination, "path": profiled.get("path"), "canonical_on": engine.canonical_on,
            "canonical": m.where, "gpu": has_gpu(), "ranks": len(stage.get("image_bytes", [])) or None,
        },
        "change": {
            "kind": m.asked.change, "elements": m.streamed.changed_fraction,
            "encoding": m.asked.recipe.versions.encoding,
        },
        "preparation": {
            "total": preparation, "fetch": fetch, "apply": apply, "load": stage.get("seconds"),
            "rest": preparation - sum(known) if preparation is not None else None,
        },
        "pause": {
            "total": pause, "copy": copy,
            "rest": pause - copy if pause is not None and copy is not None else None,
            "drain": profiled.get("drain"), "silence": profiled.get("silence"),
        },
        "total": profiled.get("total"),
        "bytes": {
            "delta": m.streamed.delta_bytes, "ratio": m.streamed.ratio, "canonical": m.streamed.bytes,
            "image": stage.get("image_bytes"), "loaded": stage.get("bytes"), "copied": profiled.get("copied"),
        },
        "self_test": (m.status.get("self_test") or {}).get("seconds"),
        "memory": profiled.get("memory"),
        "throughput": profiled.get("throughput"),
        "requests": profiled.get("requests"),
        "host": _host(m),
        "checks": profiled.get("checks", []),
        "ok": profiled.get("ok"),
        "excludes": excludes(m),
    }  # fmt: skip


def excludes(m: Measured) -> list[str]:
    """What the row does not have in it, and what the numbers are not of."""
    found = list(m.profile.row()["excludes"]) if m.profile is not None else []
    if m.why_no_engine is not None:
        found.append(f"{NO_ENGINE}: {m.why_no_engine}")
    if m.base.size != "full":
        found.append(f"full size: the checkpoint has the model's kinds of tensors, {m.base.size}")
    if m.base.made:
        found.append("real weights: they are random")
    if m.base.warning:
        found.append(m.base.warning)
    if not has_gpu():
        found.append("a GPU: the engine, if there is one, computes on the CPU")
    if m.left_out:
        found.append(f"flags of the recipe for GPUs: {' '.join(m.left_out)}")
    if m.why_not_compared is not None:
        found.append(f"equality with a fresh server: {m.why_not_compared}")
    return found


def rates_of(m: Measured) -> Rates:
    """Rates of this run for a projection: those without traffic where there are such, else the replica's.

    Raises ValueError for a version that fetched nothing.
    """
    row = row_of(m)
    fetch, apply, hashing = row["preparation"]["fetch"], row["preparation"]["apply"], None
    if m.host is not None:
        fetch, apply, hashing = m.host.fetch, m.host.cpu, m.host.hash
    if not fetch or not apply:
        raise ValueError("nothing was fetched and applied: there are no rates to project from")
    load, copy, copied = _load_alone(m), row["pause"]["copy"], row["bytes"]["copied"]
    efficiency = min(1.0, copied / copy / m.memcpy) if copied and copy and m.memcpy else None
    engine = load is not None and efficiency is not None
    return Rates(
        of=f"{m.asked.recipe.name}, {m.base.size}, {size_text(m.streamed.bytes)}",
        bytes=m.streamed.bytes,
        ratio=m.streamed.ratio,
        fetch=m.streamed.delta_bytes / fetch / GB,
        apply=m.streamed.bytes / apply / GB,
        load=m.streamed.bytes / load / GB if load is not None and engine else None,
        copy=efficiency if engine else None,
        hash=m.streamed.bytes / hashing / GB if hashing else None,
        rest=max(0.0, row["pause"]["rest"] - (row["throughput"]["step"] or 0.0)) if engine else None,
    )


def _load_alone(m: Measured) -> float | None:
    """Seconds that a load into the image computed, else those that it took, or the self-test's if fewer."""
    if m.load_cpu:
        return m.load_cpu
    loads = ((m.status.get("last_update") or {}).get("stage"), m.status.get("self_test"))
    return min((one["seconds"] for one in loads if one and one["outcome"] == "done"), default=None)


def _host(m: Measured) -> dict[str, Any]:
    alone = m.host
    return {
        "cpus": len(os.sched_getaffinity(0)), "load_average": os.getloadavg()[0], "memcpy": m.memcpy,
        "alone": alone and {
            "fetch": alone.fetch, "apply": alone.apply, "cpu": alone.cpu, "seed": alone.seed,
            "workers": alone.workers, "hash": alone.hash,
        },
        "encode": m.streamed.encode, "load_cpu": m.load_cpu,
    }  # fmt: skip


def describe(row: Json) -> str:
    """The row in words."""
    checkpoint, where, size = row["checkpoint"], row["destination"], row["bytes"]
    before, pause = row["preparation"], row["pause"]
    memory, alone = row["memory"] or {}, row["host"]["alone"]
    lines = [
        f"{row['recipe']}: {checkpoint['quantization']}, {checkpoint['size']}, "
        f"{checkpoint['tensors']} tensors of {size_text(checkpoint['bytes'])}; "
        f"canonical on {where['canonical']}; "
        f"by way of {where['path'] or '-'}",
        f"delta       {size_text(size['delta'])} ({100 * size['ratio']:.3f} %), {row['change']['kind']}, "
        f"{100 * row['change']['elements']:.3f} % of elements, {row['change']['encoding']}",
        f"preparation {_s(before['total'])} (fetch {_s(before['fetch'])}, "
        f"verify and apply {_s(before['apply'])}, load {_s(before['load'])}, rest {_s(before['rest'])})",
        f"pause       {_s(pause['total'])} (copy {_s(pause['copy'])}, rest {_s(pause['rest'])}); "
        f"no token for {_s(pause['silence'])}",
        f"total       {_s(row['total'])} (drain {_s(pause['drain'])})",
    ]
    if alone:
        lines.append(
            f"alone       fetch {_s(alone['fetch'])}, verify and apply {_s(alone['apply'])} on "
            f"{alone['workers']} threads"
        )
    if memory:
        sizes = ", ".join(f"{name} {size_text(value) if value else '-'}" for name, value in memory.items())
        lines.append(f"memory      {sizes}")
    lines += [f"excluded    {one}" for one in row["excludes"]]
    for check in row["checks"]:
        lines.append(f"{'ok         ' if check['ok'] else 'FAILED     '} {check['what']}: {check['detail']}")
    return "\n".join(lines)


def _s(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"
