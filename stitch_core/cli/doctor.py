"""``stitch doctor``: what a store and this machine can do, proven by doing it, leaving nothing behind."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

from ..checkpoint import Checkpoint
from ..files import PosixFiles
from ..mounts import mount_kind
from ..ports import NoStore, Store
from ..stores.dated import date_of_new
from ..stores.identity import read_identity
from ..stores.local import PRIVATE
from ..stores.probe import probe
from .common import (
    Commands,
    absolute_path,
    add_command,
    add_store,
    emit,
    opened_store,
    size_text,
    table,
)
from .doctor_store import Finding, Report, StoreChecks, milliseconds
from .mounts import directory_of, is_read_only

PLACE = ".stitch-doctor-"
LEFT_AFTER = 3600.0

SLOW_SYNC = 0.05
ROOM = 1.2
"""Of a checkpoint's size: the host's copy, and what is fetched and journalled beside it."""


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "doctor", run, "find out what a store and this machine can do",
        "Do to the store what Stitch does, under doctor/<random>/, and take it all away again: create,\n"
        "read back, list, compare-and-swap, two small races that exactly one writer must win, delete;\n"
        "compare its clock with this machine's; and look at the scratch space. With --read-only only what\n"
        "replicas need. Each line says ok, warn or FAIL, and what to do. Exit code 1 if a check fails.\n\n"
        "  stitch doctor --store file:/data/stitch\n"
        "  stitch doctor --store s3://bucket/stitch --base /models/base --scratch /dev/shm/stitch\n"
        "  stitch doctor --store s3://bucket/stitch --read-only      # with a replica's credentials",
    )  # fmt: skip
    add_store(parser)
    parser.add_argument("--read-only", action="store_true", help="try no writes")
    parser.add_argument(
        "--scratch", type=absolute_path, metavar="DIR",
        help="where host checkpoints or deltas will lie (default: the temporary directory)",
    )  # fmt: skip
    parser.add_argument(
        "--base", type=absolute_path, metavar="DIR", help="the checkpoint for which there must be room there"
    )


async def run(options: argparse.Namespace) -> int:
    report = Report()
    async with _place(options.store) as url, opened_store(options.store) as real:
        if await report.attempt(
            "list", lambda: _list(real, options.store, options.read_only),
            "check the URL and that the store is mounted, and allow listing (s3:ListBucket)",
        ):  # fmt: skip
            root = directory_of(options.store)
            if options.read_only:
                report.add("writes", "skipped", "not tried: --read-only")
            elif root is not None and await asyncio.to_thread(is_read_only, root):
                report.add(
                    "write", "fail", f"{root} is mounted read-only here",
                    "mount it read-write on hosts that write; a replica's is checked with --read-only",
                )  # fmt: skip
            else:
                if root is not None:
                    await asyncio.to_thread(_sweep, root)
                async with opened_store(url) as store, opened_store(url) as second:
                    await StoreChecks(store, second, report).run()
        if not options.read_only:
            await _directory_checks(options.store, url, report)
    await _machine_checks(options.scratch, options.base, report)
    emit({"store": options.store, "failed": report.failed, "checks": report.checks}, options.json,
         lambda: _text(report))  # fmt: skip
    return 1 if report.failed else 0


def _text(report: Report) -> str:
    rows = [(c["check"], c["result"].upper() if c["result"] == "fail" else c["result"], c["detail"])
            for c in report.checks]  # fmt: skip
    todo = [f"{c['check']}: {c['do']}" for c in report.checks if c["do"] and c["result"] in ("fail", "warn")]
    return "\n".join([table(("check", "result", "what was seen"), rows), *(["", *todo] if todo else [])])


async def _list(store: Store, url: str, read_only: bool) -> str:
    began, root = time.perf_counter(), directory_of(url)
    try:
        found = await store.list("channels/")
    except NoStore:
        if read_only or (root is not None and await asyncio.to_thread(root.exists)):  # as a file
            raise
        return "there is nothing yet: the first write begins the store"
    return f"{len(found)} channels, {milliseconds(began)}"


# ---------------------------------------------------------------------------------------- this machine


@contextlib.asynccontextmanager
async def _place(url: str) -> AsyncIterator[str]:
    """The store to try things in: for a directory, one of its own beside the objects, gone afterwards."""
    root = directory_of(url)
    if root is None:
        yield url
        return
    while not await asyncio.to_thread(root.is_dir):
        root = root.parent
    place = root / f"{PLACE}{secrets.token_hex(8)}"
    try:
        yield f"file:{quote(os.fsencode(place))}"
    finally:
        await asyncio.to_thread(PosixFiles().remove_tree, place)


def _sweep(root: Path) -> None:
    """Remove what a doctor that was killed left there, long enough ago that none can be at work."""
    with contextlib.suppress(OSError):
        now = date_of_new(PosixFiles(), root / f"{PLACE}{secrets.token_hex(8)}")
        for left in root.glob(f"{PLACE}*"):
            with contextlib.suppress(OSError):
                if now - left.stat().st_mtime > LEFT_AFTER:
                    PosixFiles().remove_tree(left)


async def _directory_checks(url: str, place: str, report: Report) -> None:
    """What the mount of a store in a directory can do."""
    root, there = directory_of(url), directory_of(place)
    if root is None or there is None or not await asyncio.to_thread(there.is_dir):
        return
    kind = await asyncio.to_thread(mount_kind, there)

    async def check() -> str:
        found = await asyncio.to_thread(probe, PosixFiles(), there, secrets.token_hex(8))
        identity = await asyncio.to_thread(read_identity, PosixFiles(), root / PRIVATE)
        do = "see 'A directory that lacks something' in docs/operations.md"
        if identity is not None and identity.create == "link" and found.links is not None:
            raise Finding(
                f"{kind}: the store was begun with hard links, here are none ({found.links})", do=do
            )
        if found.limits:
            raise Finding("; ".join(found.limits), result="warn" if found.writable else "fail", do=do)
        return f"{kind}: links, locks, rename, synced directories"

    await report.attempt("mount", check, "allow this user to write there")
    if kind.startswith(("fuse", "9p", "nfs", "cifs", "smb", "virtiofs")):
        report.add(
            "other hosts", "warn", f"{root} is on {kind}, where locks may hold on this host only",
            "use it from one host, or prefer an object store for many",
        )  # fmt: skip


async def _machine_checks(scratch: Path | None, base: Path | None, report: Report) -> None:
    where = scratch or Path(tempfile.gettempdir())
    size = 0
    if base is not None:
        files = PosixFiles()

        async def measured() -> str:
            nonlocal size
            found = await asyncio.to_thread(Checkpoint.open, base, files)
            size = sum(ref.nbytes for ref in found.tensors.values())
            return f"{len(found.tensors)} tensors, {size_text(size)}"

        await report.attempt("base", measured, "name the Hugging Face checkpoint directory of version 0")
    await report.attempt("scratch", lambda: _scratch(where, size), "name another directory with --scratch")
    shm = Path("/dev/shm")
    if await asyncio.to_thread(shm.is_dir):
        free = await asyncio.to_thread(PosixFiles().free_bytes, shm)
        small = free < (ROOM * size or 1 << 30)
        report.add(
            "/dev/shm", "warn" if small else "ok", f"{size_text(free)} free",
            "give the container more (docker run --shm-size), or keep host checkpoints on a disk",
        )  # fmt: skip


async def _scratch(where: Path, size: int) -> str:
    there = where
    while not await asyncio.to_thread(there.exists):
        there = there.parent
    free = await asyncio.to_thread(PosixFiles().free_bytes, there)
    kind = await asyncio.to_thread(mount_kind, there)
    if free < ROOM * size:
        raise Finding(
            f"{size_text(free)} free in {there} ({kind}), {size_text(ROOM * size)} are needed for the base",
            do="make room, or name another directory with --scratch",
        )
    seconds = await asyncio.to_thread(_sync_seconds, there)
    detail = f"{size_text(free)} free in {there} ({kind}), fsync {seconds * 1000:.1f} ms"
    if seconds > SLOW_SYNC:
        raise Finding(detail, result="warn", do="a scratch directory on a local disk or tmpfs is faster")
    return detail


def _sync_seconds(directory: Path) -> float:
    """The median of five syncs of 4 KiB."""
    files, path = PosixFiles(), directory / f"{PLACE}{secrets.token_hex(8)}"
    files.write_new(path, b"")
    try:
        times = []
        for number in range(5):
            began = time.perf_counter()
            files.write_at(path, number * 4096, bytes(4096))
            files.sync(path)
            times.append(time.perf_counter() - began)
        return sorted(times)[2]
    finally:
        files.remove(path)
