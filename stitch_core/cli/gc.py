"""``stitch gc``: delete what no reader of a run can need any more."""

from __future__ import annotations

import argparse
import random
import re
import time
from typing import Any

from ..chain import NoHead
from ..manifest import FormatError
from ..metered import CollectorMetrics
from ..ports import Entry, SystemClock
from ..retention import GRACE, Collector, Sweep
from ..versions import check_run_id
from .common import (
    Commands,
    UsageError,
    add_command,
    add_metrics,
    add_run,
    add_store,
    emit,
    exported,
    opened_store,
    say,
    size_text,
    table,
)

SHOWN = 12
SECONDS_BETWEEN_LINES = 2.0
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)\Z")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "gc", run, "delete payload that nobody can need any more",
        "Delete the payload of versions below a floor that was in force for longer than --grace, and at\n"
        "least two floors down, and what writers left behind that lost the run. Kept are what channels and\n"
        "pins name, with all that is needed to reach it, what replicas say they are fetching, and all\n"
        "manifests. Safe at any time, also twice at once: a replica that meets what is gone takes another\n"
        "way. Records of replicas go that expired longer ago than --grace.\n\n"
        "  stitch gc --store file:/data/stitch --run my-run --dry-run\n\n"
        "Floors are full checkpoints: the trainer's own, or those beside the chain ('stitch anchor'), which\n"
        "trainers use from their next publish on, 'stitch publish' does not. Without any all is kept.",
    )  # fmt: skip
    add_store(parser)
    add_run(parser)
    parser.add_argument(
        "--grace", type=duration, default=GRACE, metavar="TIME",
        help="how long a reader may take for what it began: 90s, 30m, 24h, 2d (24h)",
    )  # fmt: skip
    add_metrics(parser)
    parser.add_argument("--dry-run", action="store_true", help="show what would be deleted, delete nothing")


def duration(text: str) -> float:
    """Seconds of ``90s``, ``30m``, ``24h``, ``2d``, as an option."""
    match = _DURATION.match(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a time such as 90s, 30m, 24h or 2d, got {text!r}")
    return float(match[1]) * _UNITS[match[2]]


async def run(options: argparse.Namespace) -> int:
    check_run_id(options.run_id)
    target = None if options.dry_run else options.metrics
    with exported(target) as exporter:  # what is wrong with it is found before anything is deleted
        return await _run(options, CollectorMetrics(exporter))


async def _run(options: argparse.Namespace, metrics: CollectorMetrics) -> int:
    async with opened_store(options.store) as store:
        collector = Collector(
            store, options.run_id, clock=SystemClock(), rng=random.Random(), grace=options.grace,
            progress=Progress(),
        )  # fmt: skip
        began = time.monotonic()
        try:
            sweep = await (collector.survey() if options.dry_run else collector.collect())
        except NoHead as error:
            raise UsageError(str(error)) from None
        except FormatError as error:
            raise UsageError(f"nothing is deleted while this cannot be read: {error}") from None
        if not options.dry_run:
            metrics.swept(sweep, time.monotonic() - began, time.time())
    emit(as_json(sweep, options.dry_run), options.json, lambda: _text(sweep, options.dry_run))
    return 1 if sweep.failed else 0


class Progress:
    """A line now and then."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, done: int, freed: int) -> None:
        if time.monotonic() - self._last > SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            say(f"{done} objects, {size_text(freed)} freed")


def as_json(sweep: Sweep, dry_run: bool) -> dict[str, Any]:
    """The result for scripts; the keys only of what was to be seen first."""
    result: dict[str, Any] = {
        "run": sweep.run, "floor": sweep.floor, "head": sweep.head, "listed": sweep.listed,
        "objects": len(sweep.doomed), "bytes": sweep.bytes, "protected": sweep.kept,
        "deleted": sweep.deleted, "freed": sweep.freed, "failed": sweep.failed,
        "records": len(sweep.records), "records_deleted": sweep.forgotten,
    }  # fmt: skip
    if not dry_run:
        return result
    keys = [[entry.key, entry.size] for entry in sweep.doomed]
    return {**result, "keys": keys, "record_keys": sorted(sweep.records)}


def _text(sweep: Sweep, dry_run: bool) -> str:
    groups: dict[str, tuple[int, int]] = {}
    records = [Entry(key, len(data)) for key, data in sweep.records.items()]
    for entry in (*sweep.doomed, *records):
        name = entry.key.rpartition("/")[0]
        objects, size = groups.get(name, (0, 0))
        groups[name] = objects + 1, size + entry.size
    rows = [(name, objects, size_text(size)) for name, (objects, size) in sorted(groups.items())]
    lines = [table(("below", "objects", "size"), rows[:SHOWN])] if rows else []
    if len(rows) > SHOWN:
        lines.append(f"... and {len(rows) - SHOWN} more")
    lines += [f"{key}: {why}" for key, why in list(sweep.failed.items())[:SHOWN]]
    kept = f"; {sweep.kept} older objects are kept for channels, pins and replicas" if sweep.kept else ""
    if dry_run:
        lines.append(
            f"would delete {len(sweep.doomed)} of {sweep.listed} objects, {size_text(sweep.bytes)}, below "
            f"version {sweep.floor} or of writers that lost the run{kept}{_records(len(sweep.records))}"
        )
    else:
        failed = f", {len(sweep.failed)} could not be deleted" if sweep.failed else ""
        gone = _records(sweep.forgotten)
        lines.append(f"deleted {sweep.deleted} objects, {size_text(sweep.freed)}{failed}{kept}{gone}")
    return "\n".join(lines)


def _records(count: int) -> str:
    if not count:
        return ""
    return (
        f"; and {count} records of replicas that are gone"
        if count > 1
        else "; and the record of a replica that is gone"
    )
