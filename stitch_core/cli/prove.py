"""``stitch prove``: recompute a finished run from its store and compare."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from .common import Commands, UsageError, absolute_path, add_command, emit, say


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "prove", run, "recompute every trajectory of a run under the versions it claims",
        "Rebuild each claimed version from the store, recompute the log-probabilities of every trajectory\n"
        "of RUN under it, and compare bit for bit. Also: how many would differ under a neighbouring version,\n"
        "and two negative controls, which must fail. Exit code 1 when anything is not proven.\n\n"
        "RUN is a directory with run.json and trajectories.jsonl.zst, as 'make demo' leaves it. Works for\n"
        "runs of the embedded engine, whose arithmetic can be replayed exactly; needs stitch-rl[embedded].",
    )  # fmt: skip
    parser.add_argument("directory", type=absolute_path, metavar="RUN")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="processes to compute in (2)")


async def run(options: argparse.Namespace) -> int:
    directory: Path = options.directory
    if not (directory / "run.json").is_file():
        raise UsageError(f"{directory} is not a run: it has no run.json")
    try:
        from stitch_embedded.proof import prove
    except ImportError as error:
        raise UsageError(f"this needs 'stitch-rl[embedded]': {error}") from None
    report = await asyncio.to_thread(prove, directory, processes=options.processes, progress=say)
    emit(report.to_json(), options.json, lambda: _text(report.to_json()))
    return 0 if not report.problems() else 1


def _text(report: dict[str, object]) -> str:
    r: dict[str, object] = report
    lines = [
        f"{r['proven']} of {r['trajectories']} trajectories ({r['tokens']} tokens) proven bit for bit",
        f"spanning an activation: {r['spanning']}",
        f"{r['discriminated']} of {r['discriminable']} differ under a neighbouring version of another state",
        f"versions of equal state: {r['equal_states'] or 'none'}",
        f"control, shifted labels: {r['shifted']}",
        f"control, faulty replica: {r['faulty']}",
    ]
    problems = r["problems"]
    assert isinstance(problems, list)
    return "\n".join(lines + [f"NOT PROVEN: {problem}" for problem in problems])
