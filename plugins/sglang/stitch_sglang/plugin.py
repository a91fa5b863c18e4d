"""The entry point of SGLang's plugin system: runs in each of its processes before anything is started.

SGLang only logs what a plugin raises. What must not go on ends the process by SystemExit, which it does not
catch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import Any

from stitch_core import logs
from stitch_core.checkpoint import CheckpointError, marks_of
from stitch_core.files import PosixFiles

from . import symbols
from .settings import Settings, SettingsError, add_flags, asked_for, export_flags

boot_marks: dict[str, tuple[int, ...]] = {}
"""Of the boot checkpoint in this process, which launches the ones that load it."""


def register() -> None:
    """Check SGLang and register the hooks; does nothing unless Stitch is asked for."""
    if not asked_for(os.environ, sys.argv):
        return
    try:
        Settings.read(os.environ)  # None where only flags say what is wanted, which are not parsed yet
        symbols.check()
    except (SettingsError, symbols.Changed) as error:
        raise SystemExit(f"stitch: {error} (the plugin is for SGLang {symbols.RELEASE})") from None
    logs.configure(logs.OWN)
    _register_hooks()


def _register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from . import caches, messages, names, scheduler

    messages.register()
    hooks = {
        symbols.ADD_FLAGS: (lambda result, parser: add_flags(parser), HookType.AFTER),
        symbols.PARSED: (after_from_cli_args, HookType.AFTER),
        symbols.LAUNCH: (before_launch_subprocesses, HookType.BEFORE),
        symbols.SERVE: (before_setup_and_run_http_server, HookType.BEFORE),
        symbols.GENERATE: (around_generate_request, HookType.AROUND),
        symbols.ABORT: (names.around_abort_request, HookType.AROUND),
        symbols.RENAME: (names.around_regenerate_rid, HookType.AROUND),
        symbols.DISPATCHER: (scheduler.after_init_request_dispatcher, HookType.AFTER),
        symbols.CAPTURE: (caches.before_init_cuda_graphs, HookType.BEFORE),
        symbols.TAKE: (scheduler.before_handle_generate_request, HookType.BEFORE),
    }
    assert set(hooks) == set(symbols.HOOKED)
    for symbol, (hook, kind) in hooks.items():
        HookRegistry.register(symbol.target, hook, kind)


def current_settings() -> Settings:
    """The settings of a process that has parsed its flags. Ends it if they cannot be used."""
    try:
        settings = Settings.read(os.environ)
    except SettingsError as error:
        raise SystemExit(f"stitch: {error}") from None
    if settings is None:
        raise SystemExit(
            "stitch: --stitch-* flags were given, but neither --stitch-store nor --stitch-receive"
        )
    return settings


def after_from_cli_args(result: Any, cls: Any, args: Any) -> None:
    """Flags become variables, which SGLang's other processes inherit."""
    try:
        export_flags(args)
    except SettingsError as error:
        raise SystemExit(f"stitch: {error}") from None


def before_launch_subprocesses(*args: Any, **kwargs: Any) -> None:
    """Refuse what is not covered, and look at the boot checkpoint, before anything is loaded."""
    from .refuse import NotCovered, refuse
    from .server import boot_directory

    current_settings()
    server_args = kwargs["server_args"] if "server_args" in kwargs else args[1]
    try:
        refuse(server_args, os.environ)
    except NotCovered as error:
        raise SystemExit(f"stitch: not covered: {error}") from None
    with contextlib.suppress(CheckpointError, OSError):  # without a boot checkpoint nothing will be proven
        boot_marks.update(marks_of(boot_directory(server_args), PosixFiles()))


def before_setup_and_run_http_server(
    server_args: Any, tokenizer_manager: Any, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put the replica into the server that is about to start."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.plugins.hook_registry import HookRegistry

    from .server import install

    missing = [one.target for one in symbols.HOOKED if one.target not in HookRegistry._patched]
    if missing:
        raise SystemExit(f"stitch: SGLang did not apply the hook on {missing[0]}")
    life = install(http_server.app, current_settings(), tokenizer_manager, server_args, boot_marks or None)
    return (server_args, tokenizer_manager, *args), {**kwargs, "execute_warmup_func": life.warm_up}


def around_generate_request(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Complete the versions of what the engine gives; see openai.py."""
    from . import openai

    return openai.around_generate_request(original, *args, keeps_kv=_keeps_kv(), **kwargs)


@functools.cache
def _keeps_kv() -> bool:
    return current_settings().kv_mode == "in_place"
