"""``stitch checkout``: a version as a plain checkpoint directory."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

from ..chain import ChainReader
from ..checkout import checkout
from ..files import PosixFiles
from ..manifest import Manifest
from .common import Commands, UsageError, absolute_path, add_command, add_store, emit, opened_store, say
from .mounts import directory_of
from .target import HELP, Target, resolve


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "checkout", run, "write a version as a checkpoint directory",
        "Rebuild a version from the store and write it to DIR, a plain Hugging Face checkpoint directory\n"
        "that any engine or trainer loads. Every byte is verified, and DIR appears whole or not at all.\n"
        "What an interrupted checkout fetched is kept beside DIR (.NAME.checkout) and used by the next.\n"
        "A DIR that holds this very version already is left as it is; any other is refused.\n\n"
        "  stitch checkout my-run/120 /data/v120 --store file:/data/stitch --base /models/base\n"
        "  stitch checkout channel:eval out --store s3://bucket/stitch",
    )  # fmt: skip
    parser.add_argument("version", metavar="VERSION", help=HELP)
    parser.add_argument("directory", type=absolute_path, metavar="DIR")
    add_store(parser)
    parser.add_argument(
        "--base", type=absolute_path, metavar="DIR",
        help="the run's version 0; by default the directory that the run names, if it is here. A version "
             "that a full leads to needs none",
    )  # fmt: skip


async def run(options: argparse.Namespace) -> int:
    target, directory = Target.parse(options.version), options.directory
    root = directory_of(options.store)
    if root is not None and _is_inside(directory, root):
        raise UsageError(f"{directory} is inside the store: its files would be taken for objects")
    async with opened_store(options.store) as store:
        reader = ChainReader(store)
        manifest, newest = await resolve(reader, target)
        base = options.base or await boot_directory(reader, newest)
        await asyncio.to_thread(_make_way, directory)
        await checkout(
            store, manifest.run, manifest.number, directory, files=PosixFiles(), base=base, activity=say
        )
    result = {
        "version": str(manifest.version), "state": manifest.state, "directory": str(directory),
        "base": str(base) if base else None,
    }  # fmt: skip
    emit(result, options.json, lambda: f"{directory} is {manifest.version}, verified")
    return 0


async def boot_directory(reader: ChainReader, manifest: Manifest) -> Path | None:
    """The boot checkpoint of a run, where its version 0 says it is and this machine has it."""
    source = (await reader.boot(manifest)).representation.source or ""
    path = Path(source)
    return path if path.is_absolute() and await asyncio.to_thread(path.is_dir) else None


def _is_inside(directory: Path, root: Path) -> bool:
    """Also through links. Not with resolve(), which raises RuntimeError for a link to itself."""
    return Path(os.path.realpath(directory)).is_relative_to(os.path.realpath(root))


def _make_way(directory: Path) -> None:
    """Take an empty directory away, so that the finished one can be put there."""
    if not directory.is_dir():
        if directory.exists() or directory.is_symlink():  # one that leads nowhere
            raise UsageError(f"{directory} is there and is no directory")
        return
    if not any(directory.iterdir()):
        if directory.is_symlink():
            raise UsageError(f"{directory} is a link to an empty directory: name that one")
        directory.rmdir()
