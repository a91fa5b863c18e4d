"""``stitch doctor``: what a store and this machine can do, proven by doing it, leaving nothing behind."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..checkpoint import Checkpoint
from ..files import PosixFiles
from ..ports import AlreadyExists, Conflict, NoStore, NotFound, Store, StoreError
from ..stores.bounded import BoundedStore
from ..stores.identity import read_identity
from ..stores.local import PRIVATE
from ..stores.probe import probe
from .common import (
    MAX_SKEW,
    Commands,
    absolute_path,
    add_command,
    add_store,
    emit,
    opened_store,
    size_text,
    table,
)
from .mounts import directory_of, is_read_only, mount_kind

RACERS, ROUNDS = 8, 3
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


class Report:
    """What was found, check by check."""

    def __init__(self) -> None:
        self.checks: list[dict[str, Any]] = []

    def add(self, name: str, result: str, detail: str, do: str | None = None) -> None:
        """``result``: ok, warn, fail or skipped; ``do``: what to do about it."""
        self.checks.append({"check": name, "result": result, "detail": detail, "do": do})

    async def attempt(self, name: str, check: Callable[[], Awaitable[str]], do: str) -> bool:
        """Run one check, which returns what it saw; whether it passed. Lets no failure of a store out."""
        try:
            self.add(name, "ok", await check())
        except Finding as finding:
            self.add(name, finding.result, str(finding), finding.do or do)
            return finding.result != "fail"
        except (StoreError, OSError, ValueError) as error:
            self.add(name, "fail", f"{type(error).__name__}: {error}", do)
            return False
        return True

    @property
    def failed(self) -> bool:
        return any(check["result"] == "fail" for check in self.checks)


class Finding(Exception):
    """A check that did not go as it should."""

    def __init__(self, message: str, *, result: str = "fail", do: str | None = None) -> None:
        super().__init__(message)
        self.result, self.do = result, do


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
    return f"{len(found)} channels, {_ms(began)}"


# ------------------------------------------------------------------------------------------ the store


class StoreChecks:
    """Everything that Stitch does to a store, on keys of its own. ``second`` is another handle to it."""

    def __init__(self, store: BoundedStore, second: BoundedStore, report: Report) -> None:
        self._store, self._second, self._report = store, second, report
        self._prefix = f"doctor/{secrets.token_hex(8)}/"
        self._keys: set[str] = set()

    async def run(self) -> None:
        attempt, can = self._report.attempt, self._store.capabilities
        try:
            if not await attempt(
                "write",
                self._write,
                "make room (ENOSPC), or allow this user to write there (s3:PutObject), as the error says",
            ):
                return
            await attempt(
                "read after write", self._read, "this store shows writes too late to be used as it is"
            )
            await attempt("list after write", self._listed, "allow listing (s3:ListBucket)")
            do = "the store ignores conditions: use another, or a release of it that has conditional writes"
            await attempt("create-only", self._create_only, do)
            await attempt("compare-and-swap", self._swap, do)
            if can.conditional_writes:
                await attempt("race to create", self._race_create, do)
                await attempt("race to swap", self._race_swap, do)
            else:
                self._report.add(
                    "races", "warn",
                    "the store cannot compare and swap: of two writers that meet, both may win",
                    "let one trainer at a time write a run; its publisher reads back",
                )  # fmt: skip
            await attempt("clock", self._clock, "set the clocks (NTP) of this machine or of the store's")
        finally:
            await attempt("delete", self._clean, "allow deleting (s3:DeleteObject), and remove what is left")

    async def _settle(self) -> None:
        await asyncio.sleep(self._store.capabilities.visible_after)

    def _key(self, name: str) -> str:
        self._keys.add(self._prefix + name)
        return self._prefix + name

    async def _write(self) -> str:
        began = time.perf_counter()
        await self._store.create(self._key("small"), b"small")
        small = _ms(began)
        began = time.perf_counter()
        size = 8 << 20
        await self._store.create(self._key("large"), os.urandom(size))
        return f"small object {small}, 8 MiB at {size_text(size / (time.perf_counter() - began))}/s"

    async def _read(self) -> str:
        await self._settle()
        began = time.perf_counter()
        blob = await self._second.load(self._key("small"))
        took = _ms(began)
        part = await self._second.read(self._key("large"), (8 << 20) - 10, 20)
        if blob.data != b"small" or len(part) != 10 or await self._second.size(self._key("large")) != 8 << 20:
            raise Finding("other bytes came back than were written")
        with contextlib.suppress(NotFound):
            await self._second.load(self._key("nothing"))
            raise Finding("an object that was never written was found")
        return f"small object {took}, ranges too"

    async def _listed(self) -> str:
        found = [entry.key for entry in await self._store.list(self._prefix)]
        if found != [self._key("large"), self._key("small")]:
            raise Finding(f"a listing shows {found or 'nothing'}")
        return "both objects"

    async def _create_only(self) -> str:
        try:
            await self._second.create(self._key("small"), b"other")
        except AlreadyExists:
            return "the second writer of a key is refused"
        raise Finding("a second create of the same key was accepted")

    async def _swap(self) -> str:
        key = self._key("head")
        first = await self._store.swap(key, None, b"1")
        await self._settle()
        second = await self._second.swap(key, first, b"2")
        await self._settle()
        for tag in (None, first):
            try:
                await self._store.swap(key, tag, b"3")
            except Conflict:
                continue
            raise Finding(f"a swap from {'no object' if tag is None else 'an object that was replaced'} won")
        blob = await self._store.load(key)
        if (blob.data, blob.tag) != (b"2", second):
            raise Finding("the swapped object is not as its writer left it")
        return "a stale tag is refused"

    async def _race_create(self) -> str:
        for number in range(ROUNDS):
            key = self._key(f"race-{number}")
            data = [f"{n}".encode() for n in range(RACERS)]
            calls = (self._racer(n).create(key, data[n]) for n in range(RACERS))
            results = await asyncio.gather(*calls, return_exceptions=True)
            await self._judge(key, data, results, AlreadyExists)
        return f"{ROUNDS} times one of {RACERS} won"

    async def _race_swap(self) -> str:
        key = self._key("counter")
        tag = await self._store.swap(key, None, b"start")
        for number in range(ROUNDS):
            # Equal bytes may have equal tags, so those of each round are its own.
            data = [f"{n} in {number}".encode() for n in range(RACERS)]
            calls = (self._racer(n).swap(key, tag, data[n]) for n in range(RACERS))
            results = await asyncio.gather(*calls, return_exceptions=True)
            await self._judge(key, data, results, Conflict)
            tag = (await self._store.load(key)).tag
        return f"{ROUNDS} times one of {RACERS} won"

    def _racer(self, number: int) -> BoundedStore:
        return (self._store, self._second)[number % 2]

    async def _judge(self, key: str, data: list[bytes], results: list[Any], loses: type[StoreError]) -> None:
        """Exactly one call won, and its bytes are there."""
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, loses):
                raise result
        winners = [n for n, result in enumerate(results) if not isinstance(result, BaseException)]
        if len(winners) != 1:
            raise Finding(f"{len(winners)} of {RACERS} writers were told that they won")
        if (await self._store.load(key)).data != data[winners[0]]:
            raise Finding("the bytes of a writer that was refused are there")

    async def _clock(self) -> str:
        before = time.time()
        await self._store.replace(self._key("clock"), b"now")
        after = time.time()
        stamp = await self._store.stamp(self._key("clock"))
        if stamp is None:
            raise Finding("the store does not tell its time", result="skipped")
        # Stores round to whole seconds.
        skew = max(before - 1.0 - stamp.written, stamp.written - after, 0.0)
        if skew > MAX_SKEW:
            raise Finding(f"the store's clock and this machine's are {skew:.0f} s apart")
        return f"within {max(1.0, skew):.0f} s of this machine's"

    async def _clean(self) -> str:
        async with asyncio.timeout(60):
            for key in sorted(self._keys):  # not what a listing shows, which may be late
                await self._store.delete(key)
            await self._settle()
            left = await self._store.list(self._prefix)
        if left:
            raise Finding(f"{len(left)} objects are left under {self._prefix}")
        return "nothing is left"


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
    for left in root.glob(f"{PLACE}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > LEFT_AFTER:
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


def _ms(began: float) -> str:
    return f"{(time.perf_counter() - began) * 1000:.0f} ms"
