"""``stitch channel``: which run, or which exact version, a fleet follows."""

from __future__ import annotations

import argparse
import random
import secrets
from typing import Any

from ..chain import ChainReader, NoHead
from ..channels import ChannelRefused, channel_names, channel_target, delete_channel, move_channel
from ..head import Channel
from ..manifest import FormatError
from ..ports import NotFound, Store
from ..versions import check_run_id
from .common import (
    Commands,
    UsageError,
    add_command,
    add_group,
    add_store,
    check_name,
    emit,
    opened_store,
    table,
    version_number,
)


def add_parser(commands: Commands) -> None:
    actions = add_group(
        commands, "channel", "show and move channels, which say what fleets follow",
        "A channel names a run, whose newest version is then followed, or one exact version.\n"
        "Replicas follow 'latest' unless they are told another. A channel is moved by operators and\n"
        "launchers, never by publishing; replicas see it at their next look. A move to another run, or down\n"
        "to an older version, drains what is in flight.",
    )  # fmt: skip
    listing = add_command(
        actions, "list", run_list, "list the channels",
        "List the channels.\n\n  stitch channel list --store file:/data/stitch",
    )  # fmt: skip
    show = add_command(
        actions, "show", run_show, "show what a channel means now",
        "Show what a channel says, and which version that is now. Exit code 1 if it names what is not\n"
        "there.\n\n"
        "  stitch channel show --store file:/data/stitch latest",
    )  # fmt: skip
    move = add_command(
        actions, "set", run_set, "point a channel at a run, or at one version",
        "Point a channel at a run, or with --exact at one version of it. The run and the version must be\n"
        "there. If somebody else moves it at the same time, one of the two is told.\n\n"
        "  stitch channel set --store file:/data/stitch latest my-run\n"
        "  stitch channel set --store file:/data/stitch eval my-run --exact 120",
    )  # fmt: skip
    delete = add_command(
        actions, "delete", run_delete, "remove a channel",
        "Remove a channel. Replicas that follow it go on serving what they serve, and say that it is\n"
        "gone.\n\n"
        "  stitch channel delete --store file:/data/stitch eval",
    )  # fmt: skip
    for action in (listing, show, move, delete):
        add_store(action)
    for action in (show, move, delete):
        action.add_argument("name", metavar="NAME")
    move.add_argument("run_id", metavar="RUN")
    move.add_argument("--exact", type=version_number, metavar="N", help="this version, not the newest")


async def run_list(options: argparse.Namespace) -> int:
    async with opened_store(options.store) as store:
        rows = [await _describe(store, name) for name in await channel_names(store)]
    emit(rows, options.json, lambda: table(
        ("channel", "run", "version", "now"),
        [(r["channel"], r["run"], r["exact"] if r["run"] is None or r["exact"] is not None else "newest",
          r["error"] or r["now"]) for r in rows],
    ))  # fmt: skip
    return 1 if any(row["error"] for row in rows) else 0


async def run_show(options: argparse.Namespace) -> int:
    name = check_name("the channel", options.name)
    async with opened_store(options.store) as store:
        found = await _describe(store, name)
    emit(found, options.json, lambda: found["error"] or f"channel {name} means {found['now']}")
    return 1 if found["error"] else 0


async def run_set(options: argparse.Namespace) -> int:
    name = check_name("the channel", options.name)
    channel = Channel(check_run_id(options.run_id), options.exact)
    async with opened_store(options.store) as store:
        try:
            target = await channel_target(store, channel)
        except NoHead as error:
            raise UsageError(f"channel {name} was not moved: {error}") from None
        before = await move_channel(store, name, channel, rng=random.Random(), nonce=secrets.token_hex(8))
    result = {
        "channel": name, "run": channel.run, "exact": channel.exact, "now": str(target.version),
        "before": None if before is None else {"run": before.run, "exact": before.exact},
    }  # fmt: skip
    emit(result, options.json, lambda: (
        f"channel {name} means {target.version}" + (", and what follows it" if channel.exact is None else "")
        + (f"; before: {before}" if before not in (None, channel) else "")
    ))  # fmt: skip
    return 0


async def run_delete(options: argparse.Namespace) -> int:
    name = check_name("the channel", options.name)
    async with opened_store(options.store) as store:
        await delete_channel(store, name)
    emit({"channel": name, "deleted": True}, options.json, lambda: f"channel {name} is removed")
    return 0


async def _describe(store: Store, name: str) -> dict[str, Any]:
    """What it says and means. ``error``: that it cannot be read, or names what is not there."""
    found: dict[str, Any] = {"channel": name, "run": None, "exact": None, "now": None, "error": None}
    try:
        channel = await ChainReader(store).channel(name)
        found |= {"run": channel.run, "exact": channel.exact}
        found["now"] = str((await channel_target(store, channel)).version)
    except NotFound:
        found["error"] = f"there is no channel {name}"
    except (FormatError, NoHead, ChannelRefused) as error:
        found["error"] = str(error)
    return found
