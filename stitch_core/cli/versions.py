"""``stitch versions``: the versions of a run."""

from __future__ import annotations

import argparse
from typing import Any

from ..chain import ChainReader, NoHead
from ..legacy import legacy_pointer
from ..manifest import Manifest
from ..versions import check_run_id
from .common import (
    Commands,
    UsageError,
    add_command,
    add_run,
    add_store,
    age_text,
    emit,
    opened_store,
    positive,
    size_text,
    table,
    version_number,
)  # fmt: skip


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "versions", run, "list the versions of a run, newest first",
        "List the versions that hang on a run's head, newest first, each checked by its digest.\n\n"
        "  stitch versions --store file:/data/stitch --run my-run\n"
        "  stitch versions --store file:/data/stitch --run my-run --before 101 --limit 50   # the next page",
    )  # fmt: skip
    add_store(parser)
    add_run(parser)
    parser.add_argument("--limit", type=positive, default=20, metavar="N", help="at most N versions (20)")
    parser.add_argument("--before", type=version_number, metavar="N", help="only versions below number N")


async def run(options: argparse.Namespace) -> int:
    check_run_id(options.run_id)
    async with opened_store(options.store) as store:
        reader = ChainReader(store)
        try:
            head, _ = await reader.head(options.run_id)
        except NoHead as error:
            legacy = await legacy_pointer(store)
            raise UsageError(f"{error}" + (f"; {legacy}" if legacy is not None else "")) from None
        newest = await reader.manifest(options.run_id, head)
        before = options.before
        first = newest if before is None else await reader.find(newest, lambda row: row.number < before)
        chain = [first] if first else []
        while chain and len(chain) < options.limit and chain[-1].history:
            rows_left = chain[-1].history[: options.limit - len(chain)]
            chain += (await reader.back_to(chain[-1], number=rows_left[-1].number, above_floor=False))[1:]
        rows = [
            {**describe(manifest), "given_up": head.abandoned_range(manifest.number) is not None}
            for manifest in chain
        ]
    emit(rows, options.json, lambda: table(
        ("version", "kind", "files", "size", "tensors", "step", "epoch", "published", "state"),
        [(r["version"], r["kind"] + (", given up" if r["given_up"] else ""), r["files"],
          size_text(r["bytes"]), r["tensors"], r["step"], r["epoch"], age_text(r["time"]), r["state"][7:19])
         for r in rows],
    ))  # fmt: skip
    return 0


def describe(manifest: Manifest) -> dict[str, Any]:
    """One version, for people and scripts."""
    r = manifest.representation
    listed = r.kind == "delta" and r.encoding != "sparse"  # whose files say what changes
    return {
        "version": str(manifest.version), "number": manifest.number, "kind": r.kind, "encoding": r.encoding,
        "files": len(r.files), "bytes": r.bytes, "tensors": len(r.changed) if listed else None,
        "step": manifest.step, "epoch": manifest.epoch, "time": manifest.time, "state": manifest.state,
        "digest": manifest.digest(), "producer": dict(manifest.producer),
    }  # fmt: skip
