"""``stitch provenance``: ask the gateways' logs which versions made what."""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from ..provenance import Lines, staleness
from .common import Commands, absolute_path, add_command, emit, say, table


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "provenance", run, "ask gateways' logs which versions made what",
        "Read the provenance logs that 'stitch gateway --provenance DIR' wrote.\n\n"
        "  stitch provenance DIR --session chat-7   # which versions made the answers of a session\n"
        "  stitch provenance DIR --request my-id    # the same of one request\n"
        "  stitch provenance DIR --staleness        # versions behind the head, by hour and consumer\n"
        "\n"
        "Times are UTC. Staleness is that of an answer's oldest version, tokens and keys and values alike.",
    )  # fmt: skip
    parser.add_argument("paths", nargs="+", type=absolute_path, metavar="PATH", help="directories or files")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--session", metavar="NAME", help="the answers of this session or group")
    what.add_argument("--request", metavar="ID", help="the answers to the request of this id")
    what.add_argument("--staleness", action="store_true", help="by hour, run and consumer")


async def run(options: argparse.Namespace) -> int:
    lines = Lines(options.paths)
    answer = await asyncio.to_thread(_staleness if options.staleness else _answers, options, lines)
    if lines.bad:
        say(f"{lines.bad} lines cannot be read")
    rows = answer["hours" if options.staleness else "answers"]
    emit(answer, options.json, lambda: _hour_table(rows) if options.staleness else _answer_table(rows))
    return 0 if rows else 1


def _answers(options: argparse.Namespace, lines: Lines) -> dict[str, Any]:
    found = [line for line in lines if _wanted(options, line)]
    found.sort(key=lambda line: float(line["time"]))
    versions: dict[str, set[int]] = {}
    for line in found:
        made = versions.setdefault(str(line.get("run")), set())
        made.update(span[0] for span in line.get("spans") or ())
    return {"versions": {run: sorted(made) for run, made in sorted(versions.items())}, "answers": found}


def _wanted(options: argparse.Namespace, line: dict[str, Any]) -> bool:
    if options.request is not None:
        return bool(line.get("id") == options.request)
    return options.session in (line.get("session"), line.get("group"))


def _staleness(options: argparse.Namespace, lines: Lines) -> dict[str, Any]:
    rows = []
    for (hour, run_id, consumer), found in staleness(lines).items():
        row = {
            "hour": hour, "run": run_id, "consumer": consumer, "tokens": found.tokens,
            "answers": found.behind.total() + found.unknown, "unknown": found.unknown, "mean": found.mean,
            "p50": found.quantile(0.5), "p95": found.quantile(0.95), "max": max(found.behind, default=None),
        }  # fmt: skip
        rows.append(row)
    return {"hours": rows}


def _hour_table(rows: list[dict[str, Any]]) -> str:
    header = ("hour", "run", "consumer", "answers", "tokens", "mean", "p50", "p95", "max", "unknown")
    return table(header, [
        (_utc(row["hour"], "%Y-%m-%d %H:00"), row["run"], row["consumer"], row["answers"], row["tokens"],
         None if row["mean"] is None else f"{row['mean']:.2f}", *(row[key] for key in header[6:]))
        for row in rows
    ])  # fmt: skip


def _answer_table(rows: list[dict[str, Any]]) -> str:
    header = ("time", "run", "versions", "tokens", "kv", "consumer", "request", "replica", "outcome")
    return table(header, [
        (_utc(row["time"], "%Y-%m-%d %H:%M:%S"), row.get("run"), _spans(row) or None, row.get("tokens"),
         row.get("kv"), row.get("consumer"), row.get("id"), row.get("replica"), row.get("outcome"))
        for row in rows
    ])  # fmt: skip


def _spans(row: dict[str, Any]) -> str:
    return " ".join(f"{version}[{start}:{end}]" for version, start, end in row.get("spans") or ())


def _utc(wall: float, form: str) -> str:
    return time.strftime(form, time.gmtime(float(wall)))
