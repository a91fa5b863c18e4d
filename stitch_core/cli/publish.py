"""``stitch publish``: make a checkpoint or delta directory the newest version of a run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
from collections.abc import Callable
from pathlib import Path

from ..chain import ChainReader
from ..checkout import stage_replanning
from ..checkpoint import Checkpoint
from ..delta.directory import DeltaDirectory, is_weights
from ..delta.prove import prove_delta
from ..delta.sparse_layout import width_of
from ..delta.streamed import stream_delta
from ..delta.transcode import sparse_to_xor, xor_to_sparse
from ..dialects import INDEX_NAME, read_index
from ..files import PosixFiles
from ..fleet import read_wanted, wait_for_replicas
from ..head import head_key
from ..host_checkpoint import HostCheckpoint
from ..host_data import files_of
from ..manifest import Manifest
from ..ports import NoStore, NotFound, Store, SystemClock
from ..publisher import Boot, HeadMoved, Payload
from ..replica.staging import Stager
from ..state import TensorTable, layout_difference, state_digest
from ..stores.keys import is_key
from ..versions import check_run_id
from ..waking import FILE_VARIABLE, VARIABLE, Waker
from .claim import new_publisher
from .common import (
    Commands,
    UsageError,
    absolute_path,
    add_base,
    add_command,
    add_run,
    add_store,
    count,
    emit,
    opened_store,
    say,
    scratch,
    seconds,
    size_text,
)


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "publish", run, "publish a checkpoint or a delta directory",
        "Claim the run, upload DIR, read it back, and move the head to it. What is wrong with DIR is found\n"
        "before the run is claimed, which fences its trainer.\n\n"
        "DIR is a full Hugging Face checkpoint, or a delta directory as slime and Miles write it. A delta\n"
        "is applied to a proven copy of the head first: it is refused when it does not fit. With --as-delta\n"
        "a full checkpoint is encoded against the head, and only what changed is uploaded.\n\n"
        "  stitch publish /ckpt/8 --store file:/data/stitch --run my-run --base /models/base --as-delta\n"
        "  stitch publish /updates/7 --store s3://bucket/stitch --run my-run --base /models/base\n\n"
        "A trainer's plugin publishes by itself; this command is for scripts, repairs and tests.",
    )  # fmt: skip
    parser.add_argument("directory", type=absolute_path, metavar="DIR")
    add_store(parser)
    add_run(parser)
    add_base(parser)
    parser.add_argument("--as-delta", action="store_true", help="encode a full checkpoint against the head")
    parser.add_argument(
        "--encoding", choices=("xor", "sparse"),
        help="of the delta: as stock slime and Miles read it, or half as large (default: as in DIR, or xor)",
    )  # fmt: skip
    parser.add_argument("--step", type=count, metavar="N", help="the trainer's step, kept in the manifest")
    parser.add_argument(
        "--work", type=absolute_path, metavar="DIR", help="scratch space (default: a temporary directory)"
    )
    parser.add_argument(
        "--wait-replicas", type=_replicas, metavar="N|FRACTION",
        help="wait until so many replicas serve it (1.0: all that live); exit 1 if they do not in time",
    )  # fmt: skip
    parser.add_argument(
        "--wait-timeout", type=seconds, default=300.0, metavar="S", help="how long (default: 300)"
    )
    parser.add_argument(
        "--wake", action="append", default=[], metavar="URL",
        help="a gateway or replica that is told of the version, so that replicas look at once; nothing fails "
        "where that does not succeed; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--wake-token-file", type=absolute_path, metavar="FILE",
        help=f"the token that they want (or {FILE_VARIABLE}, or {VARIABLE}, the token itself)",
    )  # fmt: skip


def _replicas(text: str) -> int | float:
    try:
        return read_wanted(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a number of replicas from 1 on, or a fraction up to 1.0 of those that live, got {text}"
        ) from None


async def run(options: argparse.Namespace) -> int:
    waker = Waker.given(options.wake, options.wake_token_file)
    manifest, tensors = await publish_directory(options, waker.wake)
    late = None
    if options.wait_replicas is not None:
        say(f"waiting for replicas to serve {manifest.version}")
        async with opened_store(options.store) as store:
            late = await wait_for_replicas(
                store, options.run_id, manifest.number, options.wait_replicas, options.wait_timeout,
                clock=SystemClock(),
            )  # fmt: skip
    r = manifest.representation
    result = {
        "version": str(manifest.version), "number": manifest.number, "epoch": manifest.epoch, "kind": r.kind,
        "bytes": r.bytes, "tensors": tensors, "state": manifest.state, "digest": manifest.digest(),
    }  # fmt: skip
    emit(result, options.json, lambda: f"{manifest.version} is published: a {r.kind} of {size_text(r.bytes)}")
    if late is not None:
        say(late)
    await asyncio.to_thread(waker.flush)
    return 0 if late is None else 1


async def publish_directory(
    options: argparse.Namespace, published: Callable[[], None] = lambda: None
) -> tuple[Manifest, int | None]:
    """Publish as the options say; the new version, and how many tensors a delta changes.

    ``published`` is called once the head names it. Raises UsageError, PublishError, StoreError, and what
    reading the directory raises.
    """
    check_run_id(options.run_id)
    directory, base = options.directory, options.base
    if not directory.is_dir():
        raise UsageError(f"{options.directory} is not a directory")
    files = PosixFiles()
    is_delta = is_delta_directory(directory, files)
    if is_delta and options.as_delta:
        raise UsageError(f"{options.directory} is a delta already: --as-delta is for full checkpoints")
    if options.encoding and not is_delta and not options.as_delta:
        raise UsageError("--encoding is for deltas: add --as-delta to publish DIR as one")
    boot = await asyncio.to_thread(lambda: Checkpoint.open(base, files).table())
    payload = None
    names = () if options.as_delta else await asyncio.to_thread(_names, directory, files)
    for name in names:
        if not is_key(name):
            raise UsageError(
                f"{directory}: no store can hold a file of the name {name!r}: take it away, or rename it to "
                "A-Z a-z 0-9 . _ - ~"
            )
    if is_delta:
        await asyncio.to_thread(DeltaDirectory.open, directory, files)
    else:
        payload = await asyncio.to_thread(given_full, directory, boot, files, options.step)
        beside = [name for name in files.list(directory) if is_weights(name) and name not in names]
        if names and beside:
            say(f"left out, since {INDEX_NAME} does not name it: {', '.join(beside)}")
    async with opened_store(options.store) as store:
        await _check_there(store, options.run_id)
        publisher = new_publisher(store, options.run_id, "publish")
        version0 = Boot(str(options.base), state_digest(boot))
        with scratch(options.work) as work:

            async def delta_on(head: Manifest) -> Payload:
                say(f"rebuilding version {head.number} to prove the base")
                prepare = given_delta if is_delta else _new_delta
                with contextlib.closing(await rebuild(store, head, base, work / "host", files)) as host:
                    return await asyncio.to_thread(prepare, options, host, work, head.number)

            # Whatever can go wrong goes wrong here: the claim fences the run's writer.
            head = await publisher.look(version0)
            if payload is None or options.as_delta:
                payload = await delta_on(head)
            await publisher.check(payload, head)
            try:
                await publisher.claim(version0, at=None if payload.kind == "full" else head)
            except HeadMoved:
                if is_delta:  # it was made from the version before
                    raise
                payload = await delta_on(await publisher.claim(version0))
            say(f"publishing {len(payload.files)} files")
            manifest = await publisher.publish(payload)
            published()
    return manifest, len(payload.changed) if is_delta or options.as_delta else None


async def _check_there(store: Store, run_id: str) -> None:
    """NoStore where a mount is missing: a claim would begin another store and another run in its place."""
    try:
        await store.load(head_key(run_id))
    except NoStore:
        raise
    except NotFound:
        return


async def rebuild(
    store: Store, manifest: Manifest, base: Path, root: Path, files: PosixFiles
) -> HostCheckpoint:
    """A host checkpoint under ``root`` that holds ``manifest``, verified, from ``base`` and the store."""
    host = HostCheckpoint(root, files)
    stager = Stager(
        store, ChainReader(store), host, base, files=files, clock=SystemClock(), rng=random.Random(),
        run_blocking=asyncio.to_thread, activity=lambda _: None,
    )  # fmt: skip
    try:
        await stage_replanning(stager, manifest)
    except BaseException:
        host.close()
        raise
    return host


def is_delta_directory(directory: Path, files: PosixFiles) -> bool:
    """Whether a directory's index says that it is a delta. Raises CheckpointError."""
    index = directory / INDEX_NAME
    return files.exists(index) and read_index(files.read(index), str(index)).kind == "delta"


def given_full(directory: Path, boot: TensorTable, files: PosixFiles, step: int | None) -> Payload:
    """A full checkpoint as it is. Raises UsageError, CheckpointError."""
    table = Checkpoint.open(directory, files).table()
    difference = layout_difference(boot, table)
    if difference is not None:
        raise UsageError(f"{directory} does not have the layout of version 0: {difference}")
    return Payload("full", state_digest(table), directory, _names(directory, files), step=step)


def _names(directory: Path, files: PosixFiles) -> tuple[str, ...]:
    """The files of what is in a directory. Of weights those that the index names, or all without one.

    Raises CheckpointError, DeltaError.
    """
    if is_delta_directory(directory, files):
        return DeltaDirectory.open(directory, files).names
    return tuple(files_of(Checkpoint.open(directory, files)))


def _new_delta(options: argparse.Namespace, host: HostCheckpoint, work: Path, head: int) -> Payload:
    """What leads from the head to the checkpoint, whose layout was compared; see ``given_full``."""
    checkpoint = Checkpoint.open(options.directory, host.files)
    host.files.remove_tree(work / "delta")  # of an earlier run with the same --work
    delta = stream_delta(
        Checkpoint.open(host.directory, host.files), lambda name, *_: checkpoint.read(name), work / "delta",
        encoding=options.encoding or "xor", number=head + 1, base_number=head, proven=host.table,
    ).delta  # fmt: skip
    return Payload(
        "delta", delta.state, work / "delta", delta.files, delta.base, delta.encoding, delta.changed,
        options.step,
    )  # fmt: skip


def given_delta(options: argparse.Namespace, host: HostCheckpoint, work: Path, head: int) -> Payload:
    """A delta that ``host`` proves. Raises DeltaError, CheckpointError."""
    directory, files = options.directory, host.files
    delta = DeltaDirectory.open(directory, files)
    changed, state = prove_delta(delta, Checkpoint.open(host.directory, files), host.table)
    names, encoding = delta.names, delta.index.encoding
    if options.encoding not in (None, encoding):
        directory, encoding = work / "delta", options.encoding
        files.remove_tree(directory)  # of an earlier run with the same --work
        numbers: dict[str, int] = {"number": head + 1, "base_number": head}
        if encoding == "sparse":
            widths = {name: width_of(host.table[name].dtype) for name in changed}
            names = xor_to_sparse(delta, changed, widths, directory, files, **numbers)
        else:
            names = sparse_to_xor(delta, directory, files, **numbers)
    base = host.holding.state if host.holding else None
    return Payload("delta", state, directory, names, base, encoding, changed, options.step)
