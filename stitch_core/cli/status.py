"""``stitch status``: where runs, channels and replicas are."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from ..chain import ChainReader, NoHead
from ..ports import Store, StoreError
from ..versions import check_run_id
from .common import Commands, UsageError, add_command, add_store, age_text, emit, opened_store, say, table


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "status", run, "show runs, channels and replicas",
        "Show each run's head, what the channels name, and what the replicas last said of themselves.\n"
        "A replica whose record has expired is unknown, not necessarily gone.",
    )  # fmt: skip
    add_store(parser)
    parser.add_argument("--run", metavar="ID", dest="run_id", help="only this run")


async def run(options: argparse.Namespace) -> int:
    if options.run_id is not None:
        check_run_id(options.run_id)
    async with opened_store(options.store) as store:
        keys = [entry.key for entry in await store.list("runs/")]
        runs = sorted({key.split("/")[1] for key in keys if key.count("/") >= 2})
        if options.run_id is not None:
            if options.run_id not in runs:
                raise UsageError(f"there is no run {options.run_id} in {options.store}")
            runs = [options.run_id]
        result = {
            "runs": [await _run(store, name) for name in runs],
            "channels": [await _channel(store, e.key.split("/")[1]) for e in await store.list("channels/")],
            "replicas": [await _replica(store, entry.key) for entry in await store.list("replicas/")],
        }
    if not any(result.values()):
        say(f"nothing is in {options.store} yet; 'stitch claim' creates a run")
    emit(result, options.json, lambda: _text(result))
    failed = any("error" in item for items in result.values() for item in items)
    return 1 if failed else 0


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
    if result["channels"]:
        parts.append(table(
            ("channel", "run", "version"),
            [(c["channel"], c.get("run"), c.get("error") or c.get("exact") or "newest")
             for c in result["channels"]],
        ))  # fmt: skip
    if result["replicas"]:
        parts.append(table(
            ("replica", "address", "run", "applied", "target", "status", "said"),
            [(r["id"], r.get("address"), r.get("run"), r.get("applied"), r.get("target"),
              r.get("error") or f"{r.get('status')}" + (" (expired)" if r.get("expired") else ""),
              r.get("time") and age_text(r["time"])) for r in result["replicas"]],
        ))  # fmt: skip
    return "\n\n".join(parts)
