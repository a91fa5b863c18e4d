"""Parses the command line, runs a subcommand, and turns known failures into one line and an exit code.

Exit codes: 0 done, 1 it ran and the answer is no (a proof that fails, a replica that had to end), 2 it
could not be done as asked.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .. import logs, plugins
from ..chain import NoHead
from ..channels import ChannelRefused
from ..checkout import CheckoutRefused
from ..checkpoint import CheckpointError
from ..host_checkpoint import HostCheckpointError, RepresentationInvalid
from ..lineage import NoPlan
from ..pins import PinRefused
from ..ports import EngineError, StoreError
from ..publisher import PublishError
from ..records import RecordRefused
from ..replica.activation import CannotFollow, ReplicaFailed
from ..replica.staging import NoRoom, WrongBase
from ..scratch import remove_rest
from ..stores.probe import error_text
from ..versions import VersionError
from .common import NO_CWD, Commands, UsageError, add_command

COMMANDS = (
    "replica", "publish", "claim", "release", "rollback", "channel", "pin", "status", "versions",
    "inspect", "verify", "diff", "checkout", "doctor", "anchor", "compact", "gc", "profile",
    "provenance", "scale",
)  # fmt: skip
PLUGINS = "stitch.commands"
DISTRIBUTION = "stitch-rl"

KNOWN_FAILURES = (
    UsageError, CheckpointError, HostCheckpointError, RepresentationInvalid, StoreError, PublishError,
    ChannelRefused, PinRefused, VersionError, NoHead, NoPlan, CheckoutRefused, CannotFollow, WrongBase,
    NoRoom, RecordRefused, EngineError, ValueError, OSError,
)  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="stitch",
        description="The versioned control plane for disaggregated reinforcement learning: a trainer "
        "publishes policy versions to a store, replicas follow it, and every response says which version "
        "made it.",
        epilog="Stores are URLs, such as file:/dir. 'stitch COMMAND --help' explains a command.",
    )
    parser.add_argument("--version", action="version", version=_release())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        import_module(f"{__package__}.{name}").add_parser(commands)
    for name in plugins.names(PLUGINS):
        try:
            plugins.load(PLUGINS, name)(commands)
        except plugins.PluginMissing as error:
            _add_missing(commands, name, str(error))
    return parser


def _release() -> str:
    try:
        return f"stitch {version(DISTRIBUTION)}"
    except PackageNotFoundError:
        return "stitch, from a clone that is not installed"


def _add_missing(commands: Commands, name: str, why: str) -> None:
    async def run(_: argparse.Namespace) -> int:
        raise UsageError(why)

    parser = add_command(commands, name, run, f"not installed: {why}", why)
    stock = parser.parse_known_args

    def known(*arguments: Any) -> tuple[Any, list[str]]:
        return stock(*arguments)[0], []  # what is missing is told, whatever was asked of it

    parser.parse_known_args = known  # type: ignore[method-assign,assignment]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``stitch``; the exit code."""
    options = build_parser().parse_args(arguments)
    logs.configure()
    logs.set_context(lambda: {"run": getattr(options, "run_id", None)})
    try:
        code: int = asyncio.run(options.run(options))
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141
    except ReplicaFailed as failure:
        _complain(options.command, failure)
        return 1
    except KNOWN_FAILURES as failure:
        _complain(options.command, failure)
        return 2
    except ModuleNotFoundError as missing:
        needed = plugins.what_brings(missing.name, options.command)
        if needed is None:
            raise
        _complain(options.command, UsageError(needed))
        return 2
    finally:
        remove_rest()  # the loop has waited for its threads


def _complain(command: str, failure: Exception) -> None:
    """One line, whatever the message."""
    said = str(failure)
    if isinstance(failure, OSError) and isinstance(failure.filename, str | bytes):
        said = f"{os.fsdecode(failure.filename)}: {error_text(failure)}"
    elif isinstance(failure, FileNotFoundError) and failure.filename is None:  # as getcwd() says it
        said = f"a path lies in the working directory, {NO_CWD}"
    text = " ".join(said.split()) or type(failure).__name__
    logs.tell(f"stitch {command}: {text}", level="error")
