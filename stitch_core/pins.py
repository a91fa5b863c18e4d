"""Pins: versions that a collector must leave reachable, each under a name that an operator chose."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .chain import ChainReader
from .gathering import all_of
from .lineage import NoPlan, Source
from .manifest import (
    Manifest,
    PayloadFile,
    canonical_json,
    read_count,
    read_document,
    read_run,
    read_sha256,
    read_time,
)
from .planner import Planner
from .ports import AlreadyExists, NotFound, Store
from .versions import PolicyVersion, check_run_id

PIN_FORMAT = "stitch.pin/1"
PREFIX = "pins/"
PARALLEL_LOOKS = 16


class PinRefused(Exception):
    """The version cannot be pinned as asked; the message says why."""


def pin_key(name: str) -> str:
    """Pins' names are spelt as run ids are."""
    return PREFIX + check_run_id(name)


@dataclass(frozen=True)
class Pin:
    """``digest`` is that of the version's manifest; ``time`` in wall seconds."""

    run: str
    number: int
    digest: str
    time: float = 0.0

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.run, self.number)

    def encode(self) -> bytes:
        return canonical_json({
            "format": PIN_FORMAT, "run": self.run, "number": self.number, "digest": self.digest,
            "time": self.time,
        })  # fmt: skip

    @classmethod
    def decode(cls, data: bytes, where: str = "pin") -> Pin:
        """Read and check a pin; FormatError."""
        value = read_document(data, PIN_FORMAT, where)
        time = read_time(value.get("time"), where)
        number = read_count(value.get("number"), f"{where}: number")
        return cls(read_run(value, where), number, read_sha256(value.get("digest"), f"{where}: digest"), time)


async def read_pins(store: Store) -> dict[str, Pin]:
    """Every pin, by name.

    Raises FormatError for one that cannot be read: what it keeps is not known then, so nothing may be
    deleted; and Unavailable.
    """
    pins: dict[str, Pin] = {}
    for entry in await store.list(PREFIX):
        try:
            data = (await store.load(entry.key)).data
        except NotFound:
            continue  # removed since
        pins[entry.key.removeprefix(PREFIX)] = Pin.decode(data, entry.key)
    return pins


async def add_pin(store: Store, name: str, run: str, number: int, time: float) -> Pin:
    """Pin a version that is on the run's chain, with all its bytes still there.

    The pin is written before the bytes are looked for, so that no collector can come between. Raises
    PinRefused, NoHead, FormatError, Unavailable; after Unavailable the pin may be there.
    """
    chain = ChainReader(store)
    head, _ = await chain.head(run)
    newest = await chain.manifest(run, head)
    found = await chain.find(newest, lambda row: row.number == number)
    if found is None:
        raise PinRefused(f"run {run} has no version {number}: its head is {newest.number}")
    pin = Pin(run, number, found.digest(), time)
    try:
        await store.create(pin_key(name), pin.encode())
    except AlreadyExists:
        there = Pin.decode((await store.load(pin_key(name))).data, pin_key(name))
        if (there.run, there.number, there.digest) != (pin.run, pin.number, pin.digest):
            raise PinRefused(
                f"pin {name} is there already and keeps {there.version}: remove it first, or use another name"
            ) from None
        pin = there
    missing = await _missing(store, chain, found)
    if missing is not None:
        await store.delete(pin_key(name))
        raise PinRefused(f"{found.version} cannot be kept, it is not whole any more: {missing}")
    return pin


async def remove_pin(store: Store, name: str) -> None:
    """Raises PinRefused when there is none of that name."""
    try:
        await store.load(pin_key(name))
    except NotFound:
        raise PinRefused(f"there is no pin {name}") from None
    await store.delete(pin_key(name))


async def _missing(store: Store, chain: ChainReader, manifest: Manifest) -> str | None:
    """Why the version cannot be reached from the boot checkpoint by what is in the store; None if it can."""
    boot, planner = await chain.boot(manifest), Planner(store, chain)
    why: str | None = None
    gone: set[str] = set()
    while True:
        try:
            plan = await planner.plan(manifest, {boot.state}, gone)
        except NoPlan as error:
            return why or str(error)
        calls = [
            functools.partial(_look, store, source, file)
            for source in plan.sources for file in source.representation.files
        ]  # fmt: skip
        missing = [answer for answer in await all_of(calls, PARALLEL_LOOKS) if answer is not None]
        if not missing:
            return None
        gone |= {digest for digest, _ in missing}  # another way may lead there
        why = missing[0][1]


async def _look(store: Store, source: Source, file: PayloadFile) -> tuple[str, str] | None:
    """The digest of a source one of whose files is not there whole, and why; None if it is."""
    key = source.file_key(file.name)
    try:
        found = await store.size(key)
    except NotFound:
        return source.digest(), f"{key} is not there"
    return None if found == file.size else (source.digest(), f"{key} has {found} bytes, not {file.size}")
