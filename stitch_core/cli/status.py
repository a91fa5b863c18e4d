"""``stitch status``: where runs, channels and replicas are."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..chain import PARALLEL_READS, ChainReader, NoHead
from ..legacy import legacy_pointer
from ..ports import Store, StoreError
from ..stores.bounded import BoundedStore
from ..versions import check_run_id
from .common import Commands, UsageError, add_command, add_store, age_text, emit, opened_store, say, table


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "status", run, "show runs, channels and replicas",
        "Show each run's head, what the channels name, and what the replicas last said of themselves.\n"
        "A replica whose record has expired is unknown, not necessarily gone.\n\n"
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
    replicas = await _parallel(_replica, store, [entry.key for entry in await store.list("replicas/")])
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
    look: Callable[[Store, str], Awaitable[dict[str, Any]]], store: Store, names: Sequence[str]
) -> list[dict[str, Any]]:
    limit = asyncio.Semaphore(PARALLEL_READS)

    async def one(name: str) -> dict[str, Any]:
        async with limit:
            return await look(store, name)

    return await asyncio.gather(*(one(name) for name in names))


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


async def _replica(store: Store, key: str) -> dict[str, Any]:
    try:
        record = json.loads((await store.load(key)).data)
        expired = record["expires"] < time.time()
        return {**record, "id": str(record["id"]), "time": float(record["time"]), "expired": expired}
    except (ValueError, TypeError, KeyError, StoreError) as error:
        return {"id": key, "error": f"its record cannot be read: {error!r}"}


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
              r.get("time") and age_text(r["time"])) for r in result["replicas"]],
        ))  # fmt: skip
    return "\n\n".join(parts)


def _versions(first: int, last: int) -> str:
    return f"version {first} was" if first == last else f"versions {first} to {last} were"


def _follows(channel: dict[str, Any]) -> str:
    return "newest" if channel["exact"] is None else str(channel["exact"])
