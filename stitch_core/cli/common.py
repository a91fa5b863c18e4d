"""What the subcommands share: options, output, stores, scratch space."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from .. import logs
from ..digits import decimal, whole
from ..files import PosixFiles
from ..metrics import Registry
from ..metrics_export import VARIABLE, BadTarget, Exporter
from ..replica.auth import FILE_VARIABLE, TEXT_VARIABLE, Tokens, exposed
from ..scratch import temporary_directory
from ..stores import open_store
from ..stores.bounded import BoundedStore
from ..stores.probe import error_text
from ..versions import LAST_NUMBER, VersionError, check_run_id

STORE_SECONDS = 60.0
SCRATCH = "stitch-scratch"
NO_CWD = "which is not there any more: change to one that is"
MAX_SKEW = 5.0
"""Seconds between two clocks. Records of replicas expire 15 s after they were written, by those of others."""


class UsageError(Exception):
    """The command cannot do what was asked; the message says what to do instead."""


Run = Callable[[argparse.Namespace], Awaitable[int]]
Number = TypeVar("Number", int, float)
Commands = Any  # argparse's subparsers action, which has no public name


def add_command(
    commands: Commands, name: str, run: Run, help: str, description: str
) -> argparse.ArgumentParser:
    """A subcommand with the options that all have."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    return parser


def add_group(commands: Commands, name: str, help: str, description: str) -> Commands:
    """A subcommand that has actions of its own; what to add them to."""
    parser = commands.add_parser(
        name, help=help, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return parser.add_subparsers(dest="action", metavar="ACTION", required=True)


def add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", required=True, metavar="URL", help="the store, such as file:/data/stitch")


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", required=True, metavar="ID", dest="run_id", help="the run's id")


def add_base(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base", required=True, type=absolute_path, metavar="DIR",
        help="the Hugging Face checkpoint directory that is version 0 of the run",
    )  # fmt: skip


def add_tokens(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--token-file", type=absolute_path, metavar="FILE",
        help="lines 'ROLE[,ROLE] TOKEN' (generate, read, admin); read again when it changes. Without one, "
        f"{FILE_VARIABLE} or {TEXT_VARIABLE}, everybody may do everything",
    )  # fmt: skip


def tokens_of(options: argparse.Namespace) -> Tokens | None:
    """The tokens that are asked for; a warning where others may reach a server without any."""
    tokens = Tokens.given(options.token_file)
    warning = exposed(options.host, tokens)
    if warning:
        say(warning)
    return tokens


def add_metrics(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--metrics", metavar="TARGET", default=os.environ.get(VARIABLE),
        help=f"show metrics at a PORT, HOST:PORT, or in a file *.prom for a node exporter (or {VARIABLE})",
    )  # fmt: skip


@contextlib.contextmanager
def exported(target: str | None) -> Iterator[Exporter]:
    """An exporter of a registry of its own. Raises UsageError."""
    try:
        exporter = Exporter(Registry(), target)
    except BadTarget as error:
        raise UsageError(f"--metrics {error}") from None
    except OSError as error:
        raise UsageError(f"--metrics {target}: no listening there: {error_text(error)}") from None
    try:
        yield exporter
    finally:
        exporter.close()


def check_given(text: str, what: str) -> str:
    """``text``; UsageError, which says ``what`` it is, for '', which is a variable that is not set."""
    if not text:
        raise UsageError(f"{what} is empty")
    return text


def absolute_path(text: str) -> Path:
    """A path option, independent of the working directory from here on; '' is a variable that is not set."""
    if not text:
        raise argparse.ArgumentTypeError("is empty: name a directory ('.' is the current one)")
    try:
        return Path(os.path.abspath(text))
    except FileNotFoundError:
        raise argparse.ArgumentTypeError(f"{text!r} lies in the working directory, {NO_CWD}") from None


def positive(text: str) -> int:
    """A whole number from 1 on, as an option."""
    return _option(whole, text, least=1)


def count(text: str) -> int:
    """A whole number from 0 on, no larger than a manifest holds, as an option."""
    return _option(whole, text)


def version_number(text: str) -> int:
    """The number of a version, as an option."""
    return _option(whole, text, most=LAST_NUMBER)


def port(text: str) -> int:
    """A TCP port, or 0 for any that is free, as an option."""
    return _option(whole, text, most=2**16 - 1)


def seconds(text: str) -> float:
    """A time, as an option."""
    return _option(decimal, text)


def interval(text: str) -> float:
    """A time above 0, as an option."""
    value = seconds(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def _option(read: Callable[..., Number], text: str, **limits: int) -> Number:
    """What ``read`` makes of a text; its message, where argparse would only say that the value is invalid."""
    try:
        return read(text, **limits)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def job_name() -> str:
    """A name for this process in leases, told apart from every other's."""
    return f"{socket.gethostname()[:60]}-{os.getpid()}-{secrets.token_hex(3)}"


def check_lasting(url: str) -> None:
    """UsageError for a store that ends with this process: whatever is written, nobody would find it."""
    if urlsplit(url).scheme == "memory":
        raise UsageError(
            f"{url} is a store in the memory of one process, and ends with this command: name one that "
            "lasts, such as file:/data/stitch"
        )


@contextlib.asynccontextmanager
async def opened_store(url: str) -> AsyncIterator[BoundedStore]:
    """The store at ``url``, every call bounded in time. Raises UsageError, BadUrl."""
    check_lasting(url)
    store = BoundedStore(open_store(url), STORE_SECONDS)
    try:
        yield store
    finally:
        await store.close()


@contextlib.contextmanager
def scratch(directory: Path | None) -> Iterator[Path]:
    """Scratch space in ``directory``, or a temporary one, which is removed in the end.

    What is kept in ``directory`` for the next command is in a directory of its own there, since what is in
    the way is removed. Raises UsageError when another process is using it.
    """
    files = PosixFiles()
    if directory is None:
        with temporary_directory(files) as path, room(path):
            yield path
        return
    kept = directory / SCRATCH
    with contextlib.ExitStack() as held:
        try:
            files.make_dirs(kept)
            held.enter_context(files.lock(kept / "in-use", 0.0))
        except TimeoutError:
            raise UsageError(f"--work {directory} is in use by another process: name another one") from None
        except OSError as error:
            raise UsageError(f"--work {directory} cannot be used: {error.strerror}") from None
        with room(kept):
            yield kept.resolve()


@contextlib.contextmanager
def room(path: Path) -> Iterator[None]:
    """What helps where there is no room below ``path``."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or str(path) not in str(error.filename):
            raise
        raise UsageError(
            f"{error.filename}: {error_text(error)}: make room, or name a directory that has it with --work"
        ) from None


def emit(value: Any, as_json: bool, text: Callable[[], str]) -> None:
    """One result: JSON on one line, or text for people. What the output cannot show of a name is escaped.

    Raises BrokenPipeError where nobody reads it any more, and UsageError where it cannot be written.
    """
    out = sys.stdout
    if out is None:  # closed from the start: nobody asked for it
        return
    shown = json.dumps(value) if as_json else text()
    encoding = out.encoding or "utf-8"
    try:
        print(shown.encode(encoding, "backslashreplace").decode(encoding), file=out, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"it is done, but stdout cannot be written: {error_text(error)}") from None


def say(text: str) -> None:
    """Progress and warnings, beside the result."""
    logs.tell(text)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns, aligned."""
    lines = [list(header), *([("-" if cell is None else _cell(cell)) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _cell(value: Any) -> str:
    return logs.visible(str(value), kept="")


def size_text(size: float) -> str:
    """Bytes for people: 1.2 kB, 3.4 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def age_text(wall: float) -> str:
    """How long ago a wall time was."""
    return ago_text(time.time() - wall)


def ago_text(seconds: float) -> str:
    """How long ago something was."""
    seconds = max(0.0, seconds)
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit} ago"
    return f"{seconds / 86400:.0f} d ago"


def check_name(option: str, value: str) -> str:
    """``value`` if it is spelt like a run id. Raises UsageError, which names the option."""
    try:
        return check_run_id(value)
    except VersionError as error:
        raise UsageError(str(error).replace("run id", option, 1)) from None


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def key_values(pairs: Sequence[str], option: str) -> dict[str, str]:
    """``KEY=VALUE`` options as a mapping. Raises UsageError."""
    result = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise UsageError(f"{option} {pair}: expected KEY=VALUE")
        result[key] = value
    return result
