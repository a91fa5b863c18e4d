"""``stitch consumer``: what requests demand by default, by who asks."""

from __future__ import annotations

import argparse
import random
import secrets
from dataclasses import asdict

from stitch_core.cli.common import (
    Commands,
    add_command,
    add_group,
    add_store,
    check_name,
    count,
    emit,
    opened_store,
    table,
    version_number,
)
from stitch_core.versions import check_run_id

from .consumer_rules import Rule, change, load


def add_parser(commands: Commands) -> None:
    actions = add_group(
        commands, "consumer", "say what a consumer's requests demand that name no version",
        "Requests say who asks in X-Stitch-Consumer. Those that name no version get what is set\n"
        "here for their consumer: one exact version, or a number of versions that the answer may be behind\n"
        "the head. It is kept in the store, and every gateway with that --store follows it.",
    )  # fmt: skip
    setting = add_command(
        actions, "set", run_set, "set what a consumer demands",
        "Set what the consumer NAME demands. Gateways see it at their next look (0.5 s).\n\n"
        "  stitch consumer set --store file:/data/stitch eval --exact 120\n"
        "  stitch consumer set --store file:/data/stitch train --lag 2",
    )  # fmt: skip
    listing = add_command(
        actions, "list", run_list, "list the consumers",
        "List the consumers.\n\n  stitch consumer list --store file:/data/stitch",
    )  # fmt: skip
    delete = add_command(
        actions, "delete", run_delete, "remove a consumer",
        "Remove a consumer. Its requests demand nothing from then on, but what they say themselves.\n\n"
        "  stitch consumer delete --store file:/data/stitch eval",
    )  # fmt: skip
    for action in (setting, listing, delete):
        add_store(action)
    for action in (setting, delete):
        action.add_argument("name", metavar="NAME")
    demand = setting.add_mutually_exclusive_group(required=True)
    demand.add_argument("--exact", type=version_number, metavar="N", help="exactly this version")
    demand.add_argument("--lag", type=count, metavar="N", help="at most this many versions behind the head")
    setting.add_argument("--run", metavar="ID", dest="run_id", help="the run of its requests that name none")


async def run_set(options: argparse.Namespace) -> int:
    name = check_name("the consumer", options.name)
    of = None if options.run_id is None else check_run_id(options.run_id)
    rule = Rule(options.exact, options.lag, of)
    async with opened_store(options.store) as store:
        before = await change(
            store, name, rule, rng=random.Random(), nonce=lambda: secrets.token_hex(8)
        )  # fmt: skip
    result = {"consumer": name, **asdict(rule), "before": None if before is None else asdict(before)}
    emit(result, options.json, lambda: (
        f"consumer {name} gets {rule}" + (f"; before: {before}" if before not in (None, rule) else "")
    ))  # fmt: skip
    return 0


async def run_list(options: argparse.Namespace) -> int:
    async with opened_store(options.store) as store:
        rules = sorted((await load(store)).items())
    rows = [{"consumer": name, **asdict(rule)} for name, rule in rules]
    emit(rows, options.json, lambda: table(
        ("consumer", "gets", "run"),
        [(name, f"exactly {rule.exact}" if rule.lag is None else f"lag {rule.lag}", rule.run or "-")
         for name, rule in rules],
    ))  # fmt: skip
    return 0


async def run_delete(options: argparse.Namespace) -> int:
    name = check_name("the consumer", options.name)
    async with opened_store(options.store) as store:
        await change(store, name, None, rng=random.Random(), nonce=lambda: secrets.token_hex(8))
    emit({"consumer": name, "deleted": True}, options.json, lambda: f"consumer {name} is removed")
    return 0
