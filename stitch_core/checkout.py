"""A version as a plain Hugging Face checkpoint directory, rebuilt from the store and verified.

It is built beside its place and renamed there, so that the directory is whole or not there at all.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from pathlib import Path

from .chain import ChainReader
from .checkpoint import Checkpoint, CheckpointError
from .host_checkpoint import HostCheckpoint, RepresentationInvalid
from .lineage import NoPlan
from .manifest import Manifest, Row
from .ports import Clock, Files, NotFound, RunBlocking, Store, SystemClock
from .replica.staging import Staged, Stager
from .stores.transfer import DigestMismatch

REPLANS = 8


class CheckoutRefused(Exception):
    """The version cannot be checked out as asked; the message says what to do instead."""


async def checkout(
    store: Store,
    run: str,
    version: int | None,
    directory: Path,
    *,
    files: Files,
    base: Path | None = None,
    clock: Clock | None = None,
    rng: random.Random | None = None,
    run_blocking: RunBlocking = asyncio.to_thread,
    activity: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Make ``directory`` the checkpoint of ``version`` (None: the newest) of ``run``; its manifest.

    ``base`` is the boot checkpoint, without which only a full (and deltas on it) leads anywhere. A
    ``directory`` that is there already is kept when it has the version's state, else CheckoutRefused.
    ``activity`` is told what is going on. Raises NoHead, StoreError, FormatError, and what Stager raises.
    """
    chain = ChainReader(store)
    head, _ = await chain.head(run)
    newest = await chain.manifest(run, head)
    target = newest if version is None else await chain.find(newest, lambda row: row.number == version)
    if target is None:
        raise CheckoutRefused(f"run {run} has no version {version}: its head is {newest.number}")
    if files.exists(directory):
        await run_blocking(_check_there, directory, target, files)
        return target
    building = directory.with_name(f".{directory.name}.checkout")
    host = HostCheckpoint(building, files)
    stager = Stager(
        store, chain, host, base, files=files, clock=clock or SystemClock(), rng=rng or random.Random(),
        run_blocking=run_blocking, activity=activity,
    )  # fmt: skip
    try:
        await stage_replanning(stager, target)
        built = building / os.readlink(host.directory)
        await run_blocking(_put, built, directory, building, files)  # before another process may work there
    except NoPlan as error:
        hint = "give the run's base checkpoint" if base is None else "its payload may have been collected"
        raise CheckoutRefused(f"{error}; {hint}") from error
    except NotFound as error:
        raise CheckoutRefused(
            f"{target.version} needs bytes that were collected ({error}): it lies below what the run keeps"
        ) from error
    except OSError as error:
        if not files.exists(directory):
            raise
        raise CheckoutRefused(f"another process made {directory} meanwhile: run it again") from error
    finally:
        host.close()
    return target


async def stage_replanning(stager: Stager, target: Manifest) -> Staged:
    """Stage, around what a collector took meanwhile, and around what is damaged.

    Raises in the end what stood in the way: NotFound, DigestMismatch, RepresentationInvalid.
    """
    damage: Exception | None = None
    for _ in range(REPLANS):
        try:
            return await stager.stage(target)
        except NotFound:
            continue
        except (DigestMismatch, RepresentationInvalid) as error:
            damage = error
        except NoPlan:
            if damage is None:
                raise
            raise damage from None  # what is in the way, not that nothing else is
    try:
        return await stager.stage(target)
    except NotFound:
        if damage is None:
            raise
        raise damage from None  # what was collected does not come back; what is damaged can be put there anew


def _check_there(directory: Path, target: Manifest, files: Files) -> None:
    try:
        state = Checkpoint.open(directory, files).state()
    except CheckpointError as error:
        raise CheckoutRefused(f"{directory} is there already, and is no checkpoint: {error}") from error
    if state != target.state:
        raise CheckoutRefused(
            f"{directory} is there already, and is not {target.version}: its state is {state}, expected "
            f"{target.state}; remove it or name another directory"
        )


def _put(built: Path, directory: Path, building: Path, files: Files) -> None:
    """Durable: what was built has been synced, its new name is here."""
    files.make_dirs(directory.parent)
    files.rename(built, directory)
    files.sync(directory.parent)
    files.remove_tree(building)


def base_row(head: Manifest, saved: int | None) -> Row | None:
    """The version that a trainer's next delta is to build on; None is version 0, the boot checkpoint.

    Where that is below the floor it is the floor or the head, whichever is nearer to the version that the
    trainer's checkpoint was saved at. Those two are always reached without what is below the floor; another
    version may hang on what was collected.
    """
    floor, newest = head.floor or head.row(), head.row()
    if floor.number == 0:
        return None
    near = saved is not None and newest.number - saved < saved - floor.number
    return newest if near else floor
