"""``stitch release``: fence a run's writer, and let nobody be one."""

from __future__ import annotations

import argparse
import time

from ..versions import check_run_id
from .claim import new_publisher
from .common import Commands, add_command, add_run, add_store, age_text, emit, opened_store


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "release", run, "fence the writer of a run, and leave its head where it is",
        "Raise the run's epoch under a nonce that nobody keeps. The writer that has claimed it, wherever it\n"
        "runs and whether or not it still lives, is refused at its next publish. Replicas go on serving.\n"
        "The next trainer claims the run as ever.\n\n"
        "  stitch release --store s3://bucket/stitch --run my-run\n\n"
        "For a trainer that must not publish any more, and cannot be stopped otherwise. Exit code 2 when\n"
        "there is no such run, or the store does not say what became of it: then release it again.",
    )  # fmt: skip
    add_store(parser)
    add_run(parser)


async def run(options: argparse.Namespace) -> int:
    check_run_id(options.run_id)
    async with opened_store(options.store) as store:
        before, newest = await new_publisher(store, options.run_id, "release").release()
    fenced = {
        "epoch": before.epoch, "writer": before.writer[:8], "moved": before.time,
        "producer": dict(newest.producer),
    }  # fmt: skip
    result = {
        "run": options.run_id, "epoch": before.epoch + 1, "head": before.number, "fenced": fenced,
        "time": time.time(),
    }  # fmt: skip
    name = newest.producer.get("name", "unknown")
    emit(result, options.json, lambda: (
        f"run {options.run_id} is released (epoch {before.epoch + 1}); its head stays at version "
        f"{before.number}. Fenced: the writer of epoch {before.epoch}, which moved the head "
        f"{age_text(before.time)}; version {before.number} is by {name}"
    ))  # fmt: skip
    return 0
