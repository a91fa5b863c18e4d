"""``stitch prove``: recompute a finished run from its store and compare."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any

from stitch_core.cli.common import Commands, UsageError, absolute_path, add_command, emit, positive, say


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "prove", run, "recompute every trajectory of a run under the versions it claims",
        "Rebuild each claimed version from the store, recompute the log-probabilities of every trajectory\n"
        "of RUN under it, and compare bit for bit. Also: how many would differ under a neighbouring\n"
        "version, and two negative controls, which must fail. Exit code 1 when anything is not proven.\n\n"
        "RUN is a directory with run.json and trajectories.jsonl.zst, as 'make demo' leaves it. Works for\n"
        "runs of the embedded engine, whose arithmetic can be replayed exactly.\n\n"
        "  stitch prove demo-run",
    )  # fmt: skip
    parser.add_argument("directory", type=absolute_path, metavar="RUN")
    parser.add_argument(
        "--processes", type=positive, default=2, metavar="N",
        help="processes to compute in, at most one for each CPU (2)",
    )  # fmt: skip


async def run(options: argparse.Namespace) -> int:
    directory: Path = options.directory
    if not (directory / "run.json").is_file():
        raise UsageError(f"{directory} is not a run: it has no run.json")
    from .proof import prove  # torch, which no other command needs

    processes = min(options.processes, os.cpu_count() or 1)
    report = await asyncio.to_thread(prove, directory, processes=processes, progress=say)
    emit(report.to_json(), options.json, lambda: describe(report.to_json()))
    return 0 if not report.problems() else 1


def describe(report: dict[str, Any]) -> str:
    """The proof in words."""
    r = report
    spanning = ", ".join(f"{count} {mode}" for mode, count in r["spanning"].items())
    lines = [
        f"{r['proven']} of {r['trajectories']} trajectories ({r['tokens']} tokens) proven bit for bit",
        f"{spanning} trajectories span an activation",
        f"{r['discriminated']} of {r['discriminable']} differ under a neighbouring version of another state",
        f"versions of equal state: {r['equal_states'] or 'none'}",
        f"control, shifted labels: found out in {r['shifted']['found']} of {r['shifted']['tried']}",
        f"control, faulty replica: found out in {r['faulty']['found']} of {r['faulty']['tried']}",
    ]
    return "\n".join(lines + [f"NOT PROVEN: {problem}" for problem in r["problems"]])
