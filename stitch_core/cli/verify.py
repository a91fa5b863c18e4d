"""``stitch verify``: every digest of a version, of a whole run, or of a checkpoint directory on this host."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ..chain import ChainReader, NoHead
from ..checkpoint import Checkpoint
from ..delta.directory import DeltaDirectory
from ..delta.wire import frame_length
from ..files import PosixFiles
from ..host_marker import Marker
from ..manifest import FormatError, Manifest, PayloadFile, floor_number, run_prefix
from ..ports import NotFound, Store, StoreError
from ..records import Record, list_records, read_record
from ..stores.reading import reading
from ..stores.transfer import verify
from .common import (
    Commands,
    UsageError,
    absolute_path,
    add_command,
    check_given,
    emit,
    opened_store,
    positive,
    say,
    size_text,
)
from .publish import is_delta_directory
from .target import HELP, Target, resolve

PROGRESS_SECONDS = 5.0


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "verify", run, "check every digest of a version, a run, or a directory",
        "Read everything back and compare it with the digests that hang on the run's head. RUN/7 is that\n"
        "version's own files; RUN alone is every manifest, file, full and span of the run, where a version\n"
        "below the head's floor may have been collected. An existing directory is hashed instead: a host\n"
        "checkpoint (compared with its marker; not while a replica has it open), a checkpoint, a delta.\n\n"
        "Exit code 1 if anything is missing or not what it should be; each is named.\n\n"
        "  stitch verify my-run --store file:/data/stitch\n"
        "  stitch verify my-run --store s3://bucket/stitch --resume /tmp/seen   # goes on where it was cut\n"
        "  stitch verify /dev/shm/stitch/my-run\n"
        "  stitch verify /data/v120 --state sha256:...",
    )  # fmt: skip
    parser.add_argument(
        "what", metavar="VERSION|DIR", help=f"{HELP}; or a directory (with a '/' in its name)"
    )
    parser.add_argument("--store", metavar="URL", help="the store, for a version")
    parser.add_argument(
        "--jobs", type=positive, default=8, metavar="N", help="files at a time (8), 8 MiB each"
    )
    parser.add_argument(
        "--resume", type=absolute_path, metavar="FILE",
        help="remember in FILE what was found whole, and pass over what an earlier check found so",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="trust the digests that the store keeps itself, where it does"
    )
    parser.add_argument("--state", metavar="DIGEST", help="the state that a directory must have")


async def run(options: argparse.Namespace) -> int:
    check_given(options.what, "VERSION|DIR")
    if options.store is None:
        result = await asyncio.to_thread(verify_directory, absolute_path(options.what), options.state)
    else:
        result = await _verify_store(options)
    emit(result, options.json, lambda: _text(result))
    return 1 if result["problems"] else 0


def _text(result: dict[str, Any]) -> str:
    problems = result["problems"]
    head = f"{result['what']}: {result['checked']} files, {size_text(result['bytes'])}"
    if result.get("skipped"):
        head += f", {result['skipped']} were found whole before"
    if result.get("collected"):
        head += f", {result['collected']} below the floor were collected"
    if result.get("state"):
        head += f", {result['state']}"
    lines = [f"  {problem['where']}: {problem['problem']}" for problem in problems]
    return "\n".join(
        [f"{head}; {len(problems)} problems" if problems else f"{head}; all as it should be", *lines]
    )


# ------------------------------------------------------------------------------------------------ store


@dataclass(frozen=True)
class _Item:
    """One object to read, of version ``number``. ``asked``: the user asks for this very version.

    ``record``: the document that names it, which a collector deletes first.
    """

    key: str
    file: PayloadFile
    number: int
    asked: bool = False
    record: str | None = None


async def _verify_store(options: argparse.Namespace) -> dict[str, Any]:
    target = Target.parse(options.what)
    whole = target.number is None and target.channel is None
    async with opened_store(options.store) as store:
        reader = ChainReader(store)
        problems: list[dict[str, str]] = []
        if whole:
            items = await _run_items(store, reader, target.run, problems)
        else:
            manifest, _ = await resolve(reader, target)
            target = Target(manifest.run, manifest.number)
            number = manifest.number
            items = [_Item(manifest.file_key(f.name), f, number, True) for f in manifest.representation.files]
        with _memory(options.resume) as (known, remember):
            left = [item for item in items if f"{item.key} {item.file.sha256}" not in known]
            check = _Check(
                store if options.quick else reading(store), _Floor(reader, target.run), problems, remember
            )
            await check.all(left, options.jobs)
    what = target.run if whole else f"{target.run}/{target.number}"
    return {
        "what": what, "checked": check.checked, "bytes": check.bytes, "collected": check.collected,
        "skipped": len(items) - len(left), "problems": problems,
    }  # fmt: skip


async def _run_items(
    store: Store, reader: ChainReader, run_id: str, problems: list[dict[str, str]]
) -> list[_Item]:
    """Everything that the run's head names, and the records beside it. Reads every manifest."""
    head, _ = await reader.head(run_id)
    newest = await reader.manifest(run_id, head)
    try:
        chain = await reader.back_to(newest, above_floor=False)
    except FormatError:
        chain = await _as_far_as_it_goes(reader, newest, problems)
    states = {manifest.number: manifest.state for manifest in chain}
    items = [item for manifest in chain for item in _items(manifest)]
    for place in await list_records(store, run_id):
        if place.key is None:
            continue  # its files are being uploaded, or their uploader died: nobody reads them
        try:
            record = await read_record(store, place)
        except NotFound:
            continue  # collected since it was listed
        except (FormatError, StoreError) as error:
            problems.append({"where": place.key, "problem": str(error)})
            continue
        if record.number > head.number:
            continue  # of a version that was published since the head was read
        if states.get(record.number) != record.state:
            problems.append(
                {"where": place.key, "problem": f"its state is not that of version {record.number}"}
            )
        items += _items(record)
    return items


async def _as_far_as_it_goes(
    reader: ChainReader, newest: Manifest, problems: list[dict[str, str]]
) -> list[Manifest]:
    """The manifests down to a broken one: what is before it hangs on nothing that can be trusted."""
    chain = [newest]
    while (parent := chain[-1].parent) is not None:
        try:
            chain.append(await reader.manifest(newest.run, parent))
        except FormatError as error:
            problems.append({"where": run_prefix(newest.run) + parent.key, "problem": str(error)})
            break
    return chain


def _items(source: Manifest | Record) -> list[_Item]:
    document = source.key if isinstance(source, Record) else None
    return [
        _Item(source.file_key(file.name), file, source.version.number, record=document)
        for file in source.representation.files
    ]


class _Floor:
    """The run's floor, below which payload may have been collected."""

    def __init__(self, reader: ChainReader, run_id: str) -> None:
        self._reader, self._run_id = reader, run_id
        self._known = 0

    async def above(self, number: int) -> int | None:
        """The floor if it is above a version. It may have been raised since the check began: it is read again
        before anything is called missing."""
        if number >= self._known:
            with contextlib.suppress(StoreError, FormatError, NoHead):
                head, _ = await self._reader.head(self._run_id)
                self._known = floor_number(await self._reader.manifest(self._run_id, head))
        return self._known if number < self._known else None


class _Check:
    """Reads objects, some at a time, and keeps what is wrong. Memory: 8 MiB for each at work."""

    def __init__(
        self,
        store: Store,
        floor: _Floor,
        problems: list[dict[str, str]],
        remember: Callable[[str], None],
    ) -> None:
        self._store, self._floor = store, floor
        self._problems, self._remember = problems, remember
        self.checked = self.bytes = self.collected = 0
        self._total = 0
        self._said = time.monotonic()

    async def all(self, items: list[_Item], jobs: int) -> None:
        self._total = len(items)
        left = iter(items)
        rng = random.Random()

        async def work() -> None:
            for item in left:
                await self._one(item, rng)

        async with asyncio.TaskGroup() as group:
            for _ in range(jobs):
                group.create_task(work())

    async def _gone(self, key: str) -> bool:
        try:
            await self._store.size(key)
        except NotFound:
            return True
        except StoreError:
            return False
        return False

    async def _one(self, item: _Item, rng: random.Random) -> None:
        try:
            await verify(self._store, item.key, item.file.size, item.file.sha256, rng=rng)
            self._remember(f"{item.key} {item.file.sha256}")
        except NotFound as error:
            if item.record and await self._gone(item.record):
                self.collected += 1
                return
            floor = None if item.record else await self._floor.above(item.number)
            if floor is not None and not item.asked:
                self.collected += 1
                return
            why = "" if floor is None else f"; below the run's floor, {floor}, payload may be collected"
            self._problems.append({"where": item.key, "problem": f"missing: {error}{why}"})
        except StoreError as error:
            self._problems.append({"where": item.key, "problem": str(error)})
        self.checked += 1
        self.bytes += item.file.size
        if time.monotonic() - self._said > PROGRESS_SECONDS:
            self._said = time.monotonic()
            done = self.checked + self.collected
            say(f"{done} of {self._total} files, {size_text(self.bytes)}, {len(self._problems)} problems")


@contextlib.contextmanager
def _memory(path: Path | None) -> Iterator[tuple[set[str], Callable[[str], None]]]:
    """Lines of a file, and how to add one. A line that was cut short matches nothing."""
    if path is None:
        yield set(), lambda _: None
        return
    known = set(path.read_text().splitlines()) if path.exists() else set()
    with path.open("a") as file:
        yield known, lambda line: _add(file, line)


def _add(file: TextIO, line: str) -> None:
    file.write(line + "\n")
    file.flush()


# -------------------------------------------------------------------------------------------- directory


def verify_directory(path: Path, expected: str | None) -> dict[str, Any]:
    """Hash a directory. Raises UsageError when there is none, or a replica has it open."""
    if not path.is_dir():
        raise UsageError(f"{path} is not a directory; to check a version, give --store")
    files = PosixFiles()
    result: dict[str, Any] = {"what": str(path), "checked": 0, "bytes": 0, "problems": []}
    try:
        if (path / "marker.json").exists():
            _host(path, files, result)
        elif is_delta_directory(path, files):
            _delta(path, files, result)
        else:
            _hash(path, files, result)
    except ValueError as error:  # CheckpointError, DeltaError, FormatError
        result["problems"].append({"where": str(path), "problem": str(error)})
    if expected is not None and result.get("state") != expected:
        problem = f"its state is {result.get('state')}, not {expected}"
        result["problems"].append({"where": str(path), "problem": problem})
    return result


def _host(path: Path, files: PosixFiles, result: dict[str, Any]) -> None:
    """Reads only; what a crash left half done is the replica's to finish."""
    try:
        with files.lock(path / "lock", 0.0):
            marker = Marker.decode(files.read(path / "marker.json"), str(path / "marker.json"))
            _hash(path / marker.data, files, result)
    except TimeoutError:
        raise UsageError(f"{path} is in use by a replica: stop it first, or ask its /server_info") from None
    result["version"] = str(marker.held.version)
    if marker.target is not None:
        problem = f"a step from {marker.held.version} to {marker.target.version} did not end"
    elif result["state"] != marker.held.state:
        problem = (
            f"its marker says {marker.held.version} ({marker.held.state}), its data is {result['state']}"
        )
    else:
        return
    result["problems"].append({"where": str(path), "problem": f"{problem}: the replica rebuilds it at start"})


def _hash(path: Path, files: PosixFiles, result: dict[str, Any]) -> None:
    checkpoint = Checkpoint.open(path, files)
    result["state"] = checkpoint.state()
    result["checked"] = len(checkpoint.weight_files)
    result["bytes"] = sum(files.size(path / name) for name in checkpoint.weight_files)


def _delta(path: Path, files: PosixFiles, result: dict[str, Any]) -> None:
    """Whole frames under a whole index; whether they fit is only known with their base."""
    delta = DeltaDirectory.open(path, files)
    for name in delta.payloads.keys() - delta.sparse.keys():
        frame = delta.read(name)
        if frame_length(frame) != len(frame):
            raise ValueError(f"{path}: the payload of tensor {name} is not one whole zstd frame")
    for sparse in {file.path: file for file in delta.sparse.values()}.values():
        for _ in sparse.blocks():
            pass  # each is checked as it is read
    names = {payload.frame.file for payload in delta.payloads.values()}
    result["checked"], result["bytes"] = len(names), sum(files.size(name) for name in names)
