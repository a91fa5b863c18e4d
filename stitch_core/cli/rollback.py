"""``stitch rollback``: publish the weights of an older version again, and fence the trainer."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
from typing import Any

from ..digits import whole
from ..files import PosixFiles
from ..ports import SystemClock
from ..rollback import Rollback, RolledBack
from ..versions import PolicyVersion, VersionError, check_run_id
from .claim import new_publisher
from .common import (
    Commands,
    UsageError,
    absolute_path,
    add_command,
    add_run,
    add_store,
    emit,
    opened_store,
    say,
    scratch,
    size_text,
)


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "rollback", run, "make an older version's weights the newest version again",
        "Publish a new version above the head with the weights of version --to and bytes of its own: the\n"
        "deltas and spans between the two merged into one (xor, sparse or both), or a full checkpoint.\n"
        "Replicas move to it as to any other version. The run is claimed, so its trainer is fenced, and\n"
        "the versions above --to count as given up: a trainer that resumes from a checkpoint of one of\n"
        "them is refused, unless it says that it overrides.\n\n"
        "  stitch rollback --store s3://bucket/stitch --run my-run --to 120\n"
        "  stitch rollback --store file:/data/stitch --run my-run --to 120 --from-checkpoint /models/base\n\n"
        "--from-checkpoint is a checkpoint of any version of the run: the base checkpoint, a replica's\n"
        "copy, an export. With one the result is proven tensor by tensor where it can be, and a full can\n"
        "be built where no delta leads back (across a full, or a delta that goes forward only).\n\n"
        "What cannot be done is refused before the trainer is fenced. Whatever interrupts it, run it\n"
        "again: what was done already is not done twice. Then restart the trainer from a checkpoint of\n"
        "version --to or before.",
    )  # fmt: skip
    add_store(parser)
    add_run(parser)
    parser.add_argument(
        "--to", required=True, metavar="N", help="the version to go back to: 120, or RUN/weight_v000120"
    )
    parser.add_argument(
        "--from-checkpoint", type=absolute_path, metavar="DIR",
        help="a checkpoint directory of any version of the run",
    )  # fmt: skip
    parser.add_argument(
        "--work", type=absolute_path, metavar="DIR",
        help="scratch space, for what is downloaded and merged (default: a temporary directory)",
    )  # fmt: skip


async def run(options: argparse.Namespace) -> int:
    check_run_id(options.run_id)
    number = _number(options.to, options.run_id)
    with scratch(options.work) as work:
        async with opened_store(options.store) as store:
            rollback = Rollback(
                store, new_publisher(store, options.run_id, "rollback"), work, PosixFiles(), SystemClock(),
                random.Random(), asyncio.to_thread, options.from_checkpoint, say,
            )  # fmt: skip
            done = await rollback.to(number)
    emit(_describe(done), options.json, lambda: _text(done))
    return 0


def _number(text: str, run_id: str) -> int:
    with contextlib.suppress(ValueError):
        return whole(text)
    try:
        version = PolicyVersion.parse(text)
    except VersionError as error:
        raise UsageError(f"--to {text}: expected a number, such as 120 ({error})") from None
    if version.run != run_id:
        raise UsageError(f"--to {text} is a version of another run: a rollback stays in run {run_id}")
    return version.number


def _describe(done: RolledBack) -> dict[str, Any]:
    manifest, r = done.manifest, done.manifest.representation
    return {
        "version": str(manifest.version), "number": manifest.number, "epoch": manifest.epoch, "kind": r.kind,
        "bytes": r.bytes, "state": manifest.state, "digest": manifest.digest(), "to": done.goal.number,
        "given_up": list(done.given_up), "proof": done.proof,
        "fenced": {"epoch": done.fenced.epoch, "writer": done.fenced.writer[:8], "moved": done.fenced.time},
    }  # fmt: skip


def _text(done: RolledBack) -> str:
    manifest, first, last = done.manifest, *done.given_up
    if done.proof == "before":
        return f"{manifest.version} has the weights of version {done.goal.number} already: nothing was done"
    r = manifest.representation
    return (
        f"{manifest.version} has the weights of version {done.goal.number}: a {r.kind} of "
        f"{size_text(r.bytes)}, proven by {done.proof}. Versions {first} to {last} are given up, the writer "
        f"of epoch {done.fenced.epoch} is fenced: restart the trainer from a checkpoint of version "
        f"{done.goal.number} or before"
    )
