"""What ``stitch doctor`` does to a store, and how it reports what it found."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ..ports import AlreadyExists, Conflict, NotFound, StoreError
from ..stores.bounded import BoundedStore
from .common import MAX_SKEW, size_text

RACERS, ROUNDS = 8, 3


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
        small = milliseconds(began)
        began = time.perf_counter()
        size = 8 << 20
        await self._store.create(self._key("large"), os.urandom(size))
        return f"small object {small}, 8 MiB at {size_text(size / (time.perf_counter() - began))}/s"

    async def _read(self) -> str:
        await self._settle()
        began = time.perf_counter()
        blob = await self._second.load(self._key("small"))
        took = milliseconds(began)
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


def milliseconds(began: float) -> str:
    """Since ``began`` of the performance counter, for people."""
    return f"{(time.perf_counter() - began) * 1000:.0f} ms"
