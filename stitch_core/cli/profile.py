"""``stitch profile``: one update on a live server, measured and checked."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from ..chain import ChainReader
from ..checkout import checkout
from ..checkpoint import Checkpoint
from ..files import PosixFiles
from ..perturb import perturb
from ..ports import Store, SystemClock
from ..process_memory import listening_process, process_tree, resident
from ..profile import Profile, Prompt, Settings, equals_reference, outputs, profile, prompts_of
from ..profile_moves import Follow, NotMoved, Receive, stitch_status
from ..profile_record import Record, Setup, write_record
from ..traffic import Json, ServerError
from ..versions import check_run_id
from .checkout import boot_directory
from .common import (
    Commands,
    UsageError,
    absolute_path,
    add_command,
    count,
    emit,
    interval,
    opened_store,
    positive,
    say,
    scratch,
    seconds,
    size_text,
    version_number,
)
from .profile_server import HttpServer, fresh_server, reference_command
from .publish import publish_directory

LOCAL = ("127.0.0.1", "localhost", "::1")


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "profile", run, "one update on a live server, measured and checked",
        "Let a live server take one update under traffic. Checked: that every request is answered, by the\n"
        "old version or the new; that the output changed; and that it equals that of a fresh server which\n"
        "booted from the new version (greedy: text, tokens and log-probabilities). Reported: preparation,\n"
        "pause, total, bytes, memory, and the throughput while staging. Exit code 1 when a check fails.\n\n"
        "A server that follows a store: --store and --run, with --publish DIR to publish the next version,\n"
        "or without, to wait for a trainer's. A receiver: --source-dir, --local-dir and --number.\n\n"
        "The first thing to do with a new model, release or flag, in a run of its own: --perturb changes\n"
        "all weights a little, so that whatever the engine keeps of the old ones shows; --record tells\n"
        "replicas of the same setup what was found.\n\n"
        "  stitch profile --server http://127.0.0.1:30100 --store file:/data/stitch --run try-it \\\n"
        "      --perturb --base /models/boot --record /models/boot/.stitch-profile.json\n"
        "  stitch profile --server http://127.0.0.1:30100 --store file:/data/stitch --run my-run \\\n"
        "      --publish /models/step-8 --as-delta --base /models/boot",
    )  # fmt: skip
    parser.add_argument("--server", required=True, metavar="URL", help="the server that takes the update")
    follow = parser.add_argument_group("a server that follows a store")
    follow.add_argument("--store", metavar="URL", help="the store, such as file:/data/stitch")
    follow.add_argument("--run", metavar="ID", dest="run_id", help="the run's id")
    follow.add_argument(
        "--base", type=absolute_path, metavar="DIR",
        help="version 0 of the run (default: where the run says it is, if it is here)",
    )  # fmt: skip
    what = follow.add_mutually_exclusive_group()
    what.add_argument(
        "--publish", type=absolute_path, metavar="DIR", help="as 'stitch publish' does; claims the run"
    )
    what.add_argument(
        "--perturb", action="store_true",
        help="the same with a copy of --base, made in --work, in which about half of the numbers differ",
    )  # fmt: skip
    follow.add_argument("--as-delta", action="store_true", help="encode the checkpoint in DIR as a delta")
    follow.add_argument("--encoding", choices=("xor", "sparse"), help="of the delta (default: xor)")
    receive = parser.add_argument_group("a receiver")
    receive.add_argument("--source-dir", type=absolute_path, metavar="DIR", help="as for /pull_weights")
    receive.add_argument("--local-dir", type=absolute_path, metavar="DIR", help="as for /pull_weights")
    receive.add_argument(
        "--number", type=version_number, metavar="N", help="the version to pull and activate"
    )
    receive.add_argument("--destination", metavar="NAME", help="disk, cpu or auto (default: the server's)")
    _add_reference(parser)
    _add_traffic(parser)
    parser.add_argument(
        "--record", type=absolute_path, metavar="FILE",
        help="add what was found of this model, release and flags to FILE; replicas read "
        ".stitch-profile.json in their boot checkpoint, or STITCH_PROFILE, and say it",
    )  # fmt: skip
    parser.add_argument(
        "--work", type=absolute_path, metavar="DIR", help="scratch space (default: a temporary directory)"
    )


def _add_reference(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the fresh server (default: one of the same engine, if that is known)")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--reference", metavar="URL", help="it runs already, from the new version's checkpoint")
    one.add_argument(
        "--start-reference", metavar="COMMAND",
        help="start it: embedded, sglang, or a command with {model} and {port} in it",
    )  # fmt: skip
    one.add_argument("--no-reference", action="store_true", help="there is no room for one: do not compare")
    group.add_argument(
        "--reference-arg", action="append", default=[], metavar="ARG",
        help="one more argument of its command; repeatable (write --reference-arg=--flag)",
    )  # fmt: skip
    group.add_argument(
        "--reference-model", type=absolute_path, metavar="DIR",
        help="boot it from here (default with --store: a checkout of the new version, which takes its size; "
        "with --perturb: the copy)",
    )  # fmt: skip


def _add_traffic(parser: argparse.ArgumentParser) -> None:
    d = Settings()
    group = parser.add_argument_group("prompts and traffic")
    group.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="to compare; repeatable")
    group.add_argument("--prompts", type=positive, default=4, metavar="N", help="else so many of tokens (4)")
    group.add_argument("--tokens", type=positive, default=d.tokens, metavar="N", help=f"each ({d.tokens})")
    group.add_argument("--load", type=positive, default=d.load, metavar="N", help=f"streams ({d.load})")
    group.add_argument(
        "--load-tokens", type=positive, default=d.load_tokens, metavar="N", help=f"each ({d.load_tokens})"
    )
    group.add_argument(
        "--idle", type=seconds, default=d.idle, metavar="S", help=f"traffic before the update ({d.idle:g})"
    )
    group.add_argument(
        "--seed", type=count, metavar="N",
        help="of the prompts (default: another one each time, so that no cache knows them)",
    )  # fmt: skip
    group.add_argument(
        "--patience", type=interval, default=1800.0, metavar="S", help="the longest wait for anything (1800)"
    )
    group.add_argument(
        "--auth-env", metavar="NAME", help="the variable with the key to send as 'Authorization: Bearer'"
    )
    group.add_argument(
        "--pid",
        type=positive,
        metavar="N",
        help="the server's process, for its memory (default: by its port)",
    )


async def run(options: argparse.Namespace) -> int:
    follows = _check(options)
    try:
        async with HttpServer.opened(options.server, _headers(options.auth_env)) as server:
            with scratch(options.work) as work:
                if follows:
                    async with opened_store(options.store) as store:
                        result = await _measure(options, server, store, work)
                else:
                    result = await _measure(options, server, None, work)
    except (ServerError, NotMoved) as error:
        raise UsageError(str(error)) from error
    record = None if options.record is None else str(options.record)
    row = {"server": options.server, **result.row(), "record": record}
    emit(row, options.json, lambda: describe(row))
    return 0 if result.ok else 1


async def _measure(
    options: argparse.Namespace, server: HttpServer, store: Store | None, work: Path
) -> Profile:
    clock = SystemClock()
    settings = Settings(
        options.tokens, options.load, options.load_tokens, options.idle, patience=options.patience
    )
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    compared, load = prompts_of(options.prompts, options.load, seed)
    prompts: list[Prompt] = list(options.prompt) or compared
    # Before anything changes: whether there will be something to compare with, and to record.
    command = await _reference(options, server)
    setup = None if options.record is None else await _setup(server)
    if options.perturb:
        options.publish = await asyncio.to_thread(_perturbed, options.base, work / "perturbed", seed)
    move: Follow | Receive
    if store is None:
        move = Receive(
            server, options.source_dir, options.local_dir, options.number, clock, options.destination
        )
    else:
        publish = (lambda: publish_directory(_publishing(options))) if options.publish else None
        move = Follow(server, ChainReader(store), options.run_id, clock, options.patience, publish)
        say(f"version {await move.serving()} is served")
    result = await profile(server, move, prompts, load, settings, clock, memory_of(options))
    result.seed = seed
    say(f"{result.moved.version} is served")
    if options.reference:
        async with HttpServer.opened(options.reference) as fresh:
            await _compare(result, fresh, prompts)
    elif command is not None:
        model = options.reference_model or (options.publish if options.perturb else None)
        model = model or await _checkout(options, store, result, work)
        async with fresh_server(command[0], command[1], model, work) as fresh:
            await _compare(result, fresh, prompts)
    if setup is not None:
        failed = tuple(check.what for check in result.checks if not check.ok)
        write_record(options.record, Record(setup, result.moved.path, failed, clock.time()), PosixFiles())
    return result


async def _setup(server: HttpServer) -> Setup:
    """Raises UsageError, ServerError."""
    about = (await stitch_status(server)).get("profile")
    try:
        return Setup.of(about.get("setup") if isinstance(about, dict) else None)
    except ValueError:
        raise UsageError(
            f"--record: {server.url} does not say its setup at /stitch/status: it is no SGLang server with "
            "Stitch's plugin, or does not know its boot checkpoint yet"
        ) from None


def _perturbed(base: Path, directory: Path, seed: int) -> Path:
    files = PosixFiles()
    files.remove_tree(directory)  # of an earlier run with the same --work
    say(f"making another version of {base} in {directory}")
    same = perturb(Checkpoint.open(base, files), directory, np.random.default_rng(seed))
    if same:
        say(f"{len(same)} tensors of integers stay as they are, beginning with {same[0]}")
    return directory


async def _compare(result: Profile, fresh: HttpServer, prompts: Sequence[Prompt]) -> None:
    # Prefixes that it kept of earlier requests would be added up in another order; not all engines have it.
    await fresh.ask("POST", "/flush_cache")
    answers = await outputs(fresh, prompts, result.settings.tokens)
    result.checks.append(equals_reference(result.after, answers))


def _check(options: argparse.Namespace) -> bool:
    """Whether the server follows a store. Raises UsageError."""
    receives = [options.source_dir, options.local_dir, options.number]
    follows = options.store is not None or options.run_id is not None
    if follows and any(one is not None for one in receives):
        raise UsageError("a server follows a store (--store, --run) or receives (--source-dir ...): not both")
    if not follows and any(one is None for one in receives):
        raise UsageError("give --store and --run, or --source-dir, --local-dir and --number")
    if follows and (options.store is None or options.run_id is None):
        raise UsageError("--store and --run go together")
    if follows:
        check_run_id(options.run_id)
    publishes = options.publish is not None or options.perturb
    if publishes and options.base is None:
        raise UsageError(
            f"{'--perturb' if options.perturb else '--publish'} needs --base, the run's version 0"
        )
    if (options.as_delta or options.encoding) and not publishes:
        raise UsageError("--as-delta and --encoding are for --publish and --perturb")
    if options.perturb and not follows:
        raise UsageError("--perturb is for a server that follows a store: try the model with one, by --store")
    if options.record and options.no_reference:
        raise UsageError("--record needs a fresh server to compare with, and --no-reference says none")
    if options.destination and follows:
        raise UsageError("--destination is for a receiver: one that follows was started with its own")
    no_checkpoint = not follows and not (options.reference or options.no_reference or options.reference_model)
    if no_checkpoint:
        raise UsageError(
            "a receiver's fresh server needs --reference-model DIR, the new version's checkpoint"
        )
    return follows


async def _reference(options: argparse.Namespace, server: HttpServer) -> tuple[str, list[str]] | None:
    if options.reference or options.no_reference:
        return None
    command, flags = await reference_command(server, options.start_reference)
    return command, [*flags, *options.reference_arg]


def _publishing(options: argparse.Namespace) -> argparse.Namespace:
    """What ``stitch publish`` would be told."""
    given = {
        "directory": options.publish, "store": options.store, "run_id": options.run_id, "base": options.base,
        "as_delta": options.as_delta, "encoding": options.encoding, "step": None, "work": None,
    }  # fmt: skip
    return argparse.Namespace(**given)


async def _checkout(options: argparse.Namespace, store: Store | None, result: Profile, work: Path) -> Path:
    assert store is not None
    chain = ChainReader(store)
    head, _ = await chain.head(options.run_id)
    base = options.base or await boot_directory(chain, await chain.manifest(options.run_id, head))
    model = work / "reference"
    await checkout(
        store, options.run_id, result.moved.number, model, files=PosixFiles(), base=base, activity=say
    )
    return model


def memory_of(options: argparse.Namespace) -> Callable[[], int | None]:
    """Resident bytes of the server's processes, if they are this machine's."""
    parts = urlsplit(options.server)
    pid = options.pid
    if pid is None and parts.hostname in LOCAL and parts.port:
        pid = listening_process(parts.port)
    return lambda: None if pid is None else resident(process_tree(pid))


def _headers(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    if not os.environ.get(variable):
        raise UsageError(f"--auth-env {variable}: there is no such variable")
    return {"Authorization": f"Bearer {os.environ[variable]}"}


def describe(row: Json) -> str:
    """The profile in words."""
    memory, throughput = row["memory"], row["throughput"]
    lines = [
        f"{row['version']} by way of {row['path']}",
        f"preparation {_s(row['preparation'])} (fetch {_s(row['fetch'])}, stage {_s(row['stage'])})",
        f"pause {_s(row['pause'])} (copy {_s(row['copy'])}; no token for {_s(row['silence'])})",
        f"total {_s(row['total'])} (drain {_s(row['drain'])})",
        f"fetched {_size(row['bytes'])}, copied {_size(row['copied'])}; "
        f"{_text(row['tensors'])} tensors changed",
        f"memory {_size(memory['before'])} before, at most {_size(memory['peak'])}, {_size(memory['after'])} "
        f"after; images {_size(memory['image'])}",
        f"throughput {_rate(throughput['idle'])} idle, {_rate(throughput['staging'])} while staging "
        f"({_text(throughput['ratio'])}); a step {_s(throughput['step'])}",
        f"excluded: {'; '.join(row['excludes'])}",
    ]
    for check in row["checks"]:
        lines.append(f"{'ok    ' if check['ok'] else 'FAILED'} {check['what']}: {check['detail']}")
    if not any("fresh server" in check["what"] for check in row["checks"]):
        lines.append("NOT CHECKED: equal to a fresh server")
    return "\n".join(lines)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _s(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def _size(value: int | None) -> str:
    return "-" if value is None else size_text(value)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} tokens/s"
