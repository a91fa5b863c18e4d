"""``stitch claim``: become a run's writer, and fence the one before."""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
from typing import Any

from ..channels import move_channel
from ..checkpoint import Checkpoint
from ..files import PosixFiles
from ..head import Channel
from ..ports import Store, SystemClock
from ..publisher import Boot, Publisher
from ..versions import check_run_id
from .common import (
    Commands,
    UsageError,
    absolute_path,
    add_base,
    add_command,
    add_run,
    add_store,
    check_name,
    emit,
    opened_store,
    scratch,
    version_number,
)


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "claim", run, "create a run, or take it over from the writer before",
        "Create a run whose version 0 is the checkpoint --base, or raise the epoch of one that exists.\n"
        "Every writer that claimed it before is fenced: its next publish is refused. A trainer's plugin\n"
        "claims by itself; this command is for launchers that create the run, and point a channel at it,\n"
        "before replicas start.\n\n"
        "  stitch claim --store file:/data/stitch --run my-run --base /models/base --channel latest\n\n"
        "With --adopt what the public reference has in the same store (latest, updates/) becomes versions\n"
        "of the run, under their numbers, each proven on the one before; nothing of it is written or\n"
        "moved. Stop its trainer first.\n\n"
        "With --resume-version it is refused, and nobody is fenced, when a rollback gave that version up;\n"
        "--override brings the version back.",
    )  # fmt: skip
    add_store(parser)
    add_run(parser)
    add_base(parser)
    parser.add_argument(
        "--channel", metavar="NAME", help="also point this channel (such as latest) at the run"
    )
    parser.add_argument(
        "--resume-version", type=version_number, metavar="N",
        help="the version that was the newest when the checkpoint to go on from was saved",
    )  # fmt: skip
    parser.add_argument(
        "--override", action="store_true", help="resume at --resume-version although a rollback gave it up"
    )
    parser.add_argument(
        "--adopt", action="store_true", help="make versions of what the public reference has in this store"
    )
    parser.add_argument(
        "--work", type=absolute_path, metavar="DIR",
        help="scratch space of --adopt (default: a temporary directory)",
    )  # fmt: skip


def new_publisher(store: Store, run_id: str, command: str) -> Publisher:
    """A publisher for this process."""
    return Publisher(
        store, run_id, files=PosixFiles(), clock=SystemClock(), rng=random.Random(),
        nonce=lambda: secrets.token_hex(16), run_blocking=asyncio.to_thread,
        producer={"name": f"stitch {command}"},
    )  # fmt: skip


async def run(options: argparse.Namespace) -> int:
    check_run_id(options.run_id)
    if options.channel is not None:
        check_name("--channel", options.channel)  # before anybody is fenced
    if options.override and options.resume_version is None:
        raise UsageError("--override is for a --resume-version that a rollback gave up")
    state = await asyncio.to_thread(lambda: Checkpoint.open(options.base, PosixFiles()).state())
    from .adopt import adopt, check  # it publishes, which claims

    async with opened_store(options.store) as store:
        publisher = new_publisher(store, options.run_id, "claim --adopt" if options.adopt else "claim")
        boot = Boot(str(options.base), state)
        asked: Any = {"saved": options.resume_version, "override": options.override}
        adopted: tuple[int, ...] = ()
        if options.adopt:
            await check(store, options.run_id)
            with scratch(options.work) as work:
                adopted = await adopt(store, publisher, boot, options.base, work, **asked)
        else:
            await publisher.claim(boot, **asked)
        head = publisher.head
        if options.channel is not None:
            await move_channel(
                store,
                options.channel,
                Channel(options.run_id),
                rng=random.Random(),
                nonce=secrets.token_hex(8),
            )
        result = {
            "run": options.run_id, "epoch": publisher.epoch, "head": head.number, "state": head.state,
            "channel": options.channel, **({"adopted": list(adopted)} if options.adopt else {}),
        }  # fmt: skip
        emit(result, options.json, lambda: (
            f"run {options.run_id} is claimed (epoch {publisher.epoch}); its head is version {head.number}"
            + (f"; {len(adopted)} versions were adopted" if options.adopt else "")
            + (f"; channel {options.channel} follows it" if options.channel else "")
        ))  # fmt: skip
    return 0
