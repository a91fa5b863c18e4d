"""``stitch pin``: versions that the collector must keep."""

from __future__ import annotations

import argparse

from ..pins import add_pin, read_pins, remove_pin
from ..ports import SystemClock
from ..versions import check_run_id
from .common import (
    Commands,
    add_command,
    add_group,
    add_store,
    age_text,
    check_name,
    emit,
    opened_store,
    table,
    version_number,
)


def add_parser(commands: Commands) -> None:
    actions = add_group(
        commands, "pin", "keep versions from being collected",
        "A pin keeps one version of a run, with all that it takes to rebuild it, for as long as\n"
        "the pin is there. Versions that a channel names are kept without one.",
    )  # fmt: skip
    add = add_command(
        actions, "add", run_add, "pin a version",
        "Pin version NUMBER of RUN under NAME. It must be on the run's chain, and its bytes still there.\n"
        "Adding it again is fine; a name that keeps another version is refused.\n\n"
        "  stitch pin add --store file:/data/stitch best my-run 120",
    )  # fmt: skip
    listing = add_command(
        actions, "list", run_list, "list the pins",
        "List the pins. Exit code 2 if one cannot be read: nothing is collected before it is removed.\n\n"
        "  stitch pin list --store file:/data/stitch",
    )  # fmt: skip
    remove = add_command(
        actions, "remove", run_remove, "remove a pin",
        "Remove a pin. What nothing else needs is collected from then on.\n\n"
        "  stitch pin remove --store file:/data/stitch best",
    )  # fmt: skip
    for action in (add, listing, remove):
        add_store(action)
    for action in (add, remove):
        action.add_argument("name", metavar="NAME")
    add.add_argument("run_id", metavar="RUN")
    add.add_argument("number", type=version_number, metavar="NUMBER")


async def run_add(options: argparse.Namespace) -> int:
    name = check_name("the pin", options.name)
    check_run_id(options.run_id)
    async with opened_store(options.store) as store:
        pin = await add_pin(store, name, options.run_id, options.number, SystemClock().time())
    result = {"pin": name, "run": pin.run, "number": pin.number, "digest": pin.digest, "time": pin.time}
    emit(result, options.json, lambda: f"pin {name} keeps {pin.version}")
    return 0


async def run_list(options: argparse.Namespace) -> int:
    async with opened_store(options.store) as store:
        pins = await read_pins(store)
    rows = [
        {"pin": name, "run": pin.run, "number": pin.number, "digest": pin.digest, "time": pin.time}
        for name, pin in pins.items()
    ]
    emit(rows, options.json, lambda: table(
        ("pin", "version", "since"), [(name, pin.version, age_text(pin.time)) for name, pin in pins.items()]
    ))  # fmt: skip
    return 0


async def run_remove(options: argparse.Namespace) -> int:
    name = check_name("the pin", options.name)
    async with opened_store(options.store) as store:
        await remove_pin(store, name)
    emit({"pin": name, "removed": True}, options.json, lambda: f"pin {name} is removed")
    return 0
