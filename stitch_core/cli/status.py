"""``stitch status``: where runs, channels and replicas are."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..chain import PARALLEL_READS, ChainReader, NoHead
from ..hints import RECORDS
from ..legacy import legacy_pointer
from ..manifest import read_time
from ..ports import NotFound, Store, StoreError, stamp_of
from ..stores.bounded import BoundedStore
from ..versions import check_run_id
from .common import (
    MAX_SKEW,
    Commands,
    UsageError,
    add_command,
    add_store,
    age_text,
    ago_text,
    emit,
    opened_store,
    say,
    table,
)

SHOWN = 4


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "status", run, "show runs, channels and replicas",
        "Show each run's head, what the channels name, and what the replicas last said of themselves.\n"
        "A replica whose record has expired is unknown, not necessarily gone. The store tells how old a\n"
        "record is, where it can: a replica's clock may be wrong, which is then said.\n\n"
        "Where a store cannot list its runs without listing every key, only those that a channel names or a\n"
        "replica serves are shown; --all lists every key. --run reads one run's head and lists nothing.\n\n"
        "  stitch status --store file:/data/stitch\n"
        "  stitch status --store s3://bucket/stitch --run my-run --json\n\n"
        "Exit code 1 if a head, a channel or a record cannot be read.",
    )  # fmt: skip
    add_store(parser)
    parser.add_argument("--run", metavar="ID", dest="run_id", help="only this run; lists nothing")
    parser.add_argument("--all", action="store_true", help="every run, whatever listing them costs")


async def run(options: argparse.Namespace) -> int:
    if options.run_id is not None:
        check_run_id(options.run_id)
    async with opened_store(options.store) as store:
        result = await (_one(store, options) if options.run_id is not None else _all(store, options))
    emit(result, options.json, lambda: _text(result))
    failed = any("error" in item for items in result.values() for item in items)
    return 1 if failed else 0


Result = dict[str, list[dict[str, Any]]]


async def _one(store: Store, options: argparse.Namespace) -> Result:
    found = await _run(store, options.run_id)
    if found.get("head", 0) is None:
        raise UsageError(f"there is no run {options.run_id} in {options.store}: nobody has claimed it")
    return {"runs": [found]}


async def _all(store: BoundedStore, options: argparse.Namespace) -> Result:
    channels = await _parallel(_channel, store, [e.key.split("/")[1] for e in await store.list("channels/")])
    replicas = await _parallel(_replica, store, [entry.key for entry in await store.list(RECORDS)])
    if replicas and all(r.get("expired") and r.get("clock_skew_here") is None for r in replicas):
        say("every record has expired: the replicas are gone, or this machine's clock is ahead of the "
            "store's, with which 'stitch doctor' compares it")  # fmt: skip
    legacy = await legacy_pointer(store)
    if legacy is not None:
        say(str(legacy))
    runs = await store.folders("runs/")
    if runs is None and options.all:
        keys = [entry.key for entry in await store.list("runs/")]
        runs = sorted({key.split("/")[1] for key in keys if key.count("/") >= 2})
    elif runs is None:
        named = {item["run"] for item in (*channels, *replicas) if isinstance(item.get("run"), str)}
        runs = sorted(named)
        say("only runs that a channel names or a replica serves are shown: --all lists every key")
    if not (runs or channels or replicas or legacy):
        say(f"nothing is in {options.store} yet; 'stitch claim' creates a run")
    return {"runs": await _parallel(_run, store, runs), "channels": channels, "replicas": replicas}


async def _parallel(
    look: Callable[[Store, str], Awaitable[dict[str, Any] | None]], store: Store, names: Sequence[str]
) -> list[dict[str, Any]]:
    """What ``look`` finds of each; None: it is not there any more."""
    limit = asyncio.Semaphore(PARALLEL_READS)

    async def one(name: str) -> dict[str, Any] | None:
        async with limit:
            return await look(store, name)

    found = await asyncio.gather(*(one(name) for name in names))
    return [item for item in found if item is not None]


async def _run(store: Store, name: str) -> dict[str, Any]:
    try:
        head, _ = await ChainReader(store).head(name)
        manifest = await ChainReader(store).manifest(name, head)
    except NoHead:
        return {"run": name, "head": None}
    except (ValueError, StoreError) as error:
        return {"run": name, "error": str(error)}
    return {
        "run": name, "head": head.number, "epoch": head.epoch, "writer": head.writer[:8], "moved": head.time,
        "state": manifest.state, "floor": manifest.floor.number if manifest.floor else manifest.number,
        "given_up": [list(pair) for pair in head.abandoned],
    }  # fmt: skip


async def _channel(store: Store, name: str) -> dict[str, Any]:
    try:
        channel = await ChainReader(store).channel(name)
    except (ValueError, StoreError) as error:
        return {"channel": name, "error": str(error)}
    return {"channel": name, "run": channel.run, "exact": channel.exact}


async def _replica(store: Store, key: str) -> dict[str, Any] | None:
    """A record, and how old it is (``age``); where the store tells when it got it, by how much its replica's
    clock (``clock_skew``) and this machine's (``clock_skew_here``) are ahead of the store's. In seconds.
    """
    try:
        record = json.loads((await store.load(key)).data)
        json.dumps(record, allow_nan=False)  # it is shown as it is, and NaN is no JSON
        name = str(record["id"])
        written, expires = read_time(record["time"], "time"), read_time(record["expires"], "expires")
        asked = time.time()
        stamp = await stamp_of(store, key)
        here = time.time()
    except NotFound:
        return None  # it left since it was listed
    except (ValueError, TypeError, KeyError, RecursionError, StoreError) as error:
        return {"id": key, "error": f"its record cannot be read: {error!r}"}
    now = here if stamp is None or stamp.now is None else max(stamp.now, stamp.written)
    age = now - (written if stamp is None else stamp.written)
    return {
        **record, "id": name, "time": written, "age": age,
        # Both are of the replica's clock: their difference is right, whatever that clock says.
        "expired": age > expires - written,
        "clock_skew": None if stamp is None else written - stamp.written,
        "clock_skew_here": None if stamp is None or stamp.now is None else _outside(now, asked, here),
    }  # fmt: skip


def _outside(moment: float, first: float, last: float) -> float:
    """By how much a clock is ahead that showed ``first`` before and ``last`` after the store's ``moment``."""
    return max(first - moment, 0.0) + min(last - moment, 0.0)


def _text(result: dict[str, list[dict[str, Any]]]) -> str:
    parts = [table(
        ("run", "head", "epoch", "moved", "floor", "state"),
        [(r["run"], r.get("head"), r.get("epoch"), r.get("moved") and age_text(r["moved"]), r.get("floor"),
          r.get("error") or (r.get("state") or "")[7:19]) for r in result["runs"]],
    )]  # fmt: skip
    parts += [
        f"run {r['run']}: {_versions(first, last)} given up by a rollback"
        for r in result["runs"] for first, last in r.get("given_up", ())
    ]  # fmt: skip
    if result.get("channels"):
        parts.append(table(
            ("channel", "run", "version"),
            [(c["channel"], c.get("run"), c.get("error") or _follows(c)) for c in result["channels"]],
        ))  # fmt: skip
    if result.get("replicas"):
        parts.append(table(
            ("replica", "address", "run", "applied", "target", "status", "said"),
            [(r["id"], r.get("address"), r.get("run"), r.get("applied"), r.get("target"),
              r.get("error") or f"{r.get('status')}" + (" (expired)" if r.get("expired") else ""),
              ago_text(r["age"]) if "age" in r else None) for r in result["replicas"]],
        ))  # fmt: skip
        parts += _clocks(result["replicas"])
    return "\n\n".join(parts)


def _clocks(replicas: list[dict[str, Any]]) -> list[str]:
    """What is to be said of clocks that disagree."""
    skews = {r["id"]: r["clock_skew"] for r in replicas if abs(r.get("clock_skew") or 0.0) > MAX_SKEW}
    found = [
        f"the clock of {name} is {_ahead(skew)} the store's: set it (NTP)"
        for name, skew in list(skews.items())[:SHOWN]
    ]
    if len(skews) > SHOWN:
        found.append(f"so are the clocks of {len(skews) - SHOWN} more replicas off")
    here = max((r["clock_skew_here"] for r in replicas if r.get("clock_skew_here")), key=abs, default=0.0)
    if abs(here) > MAX_SKEW:
        found.append(f"this machine's clock is {_ahead(here)} the store's: set it (NTP)")
    return ["\n".join(found)] if found else []


def _ahead(skew: float) -> str:
    return f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'}"


def _versions(first: int, last: int) -> str:
    return f"version {first} was" if first == last else f"versions {first} to {last} were"


def _follows(channel: dict[str, Any]) -> str:
    return "newest" if channel["exact"] is None else str(channel["exact"])
