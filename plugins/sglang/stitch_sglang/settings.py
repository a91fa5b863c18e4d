"""What the plugin is told, by flags of `sglang serve` or by variables; flags become variables.

The variables reach SGLang's subprocesses. Without STITCH_STORE and STITCH_RECEIVE the plugin does nothing.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from stitch_core.digits import decimal, whole
from stitch_core.head import DEFAULT_CHANNEL
from stitch_core.ports import KVMode
from stitch_core.replica.child import LEAST_PRIORITY, NICENESS
from stitch_core.replica.outbox import STALL_SECONDS
from stitch_core.replica.reconciler import Follow
from stitch_core.stores.cache import DEFAULT_BYTES
from stitch_core.versions import check_run_id

Destination = Literal["disk", "cpu", "auto"]

UPDATE_TIMEOUT = 600.0
STAGE_TIMEOUT = 600.0

OPTIONS = {
    "store": "follow a run in the store at this URL, such as file:/data/stitch",
    "run": "follow this run",
    "channel": f"follow this channel (default: {DEFAULT_CHANNEL})",
    "receive": "no store: a stock trainer drives this replica by /pull_weights; the name of its runs",
    "roots": "with receive: directories, joined by ':', in which its sources and local copies may lie",
    "host_dir": "where the host checkpoint lives; a tmpfs where it fits (default: a temporary directory)",
    "cache": "keep fetched files in this directory, by digest, for all replicas of this host that name it",
    "cache_bytes": f"bytes that the cache may take ({DEFAULT_BYTES})",
    "anchor_every": "upload a full beside the chain when the newest is so many versions old (default: none)",
    "id": "this replica's name (default: host name and a random part)",
    "address": "how others reach this replica (default: SGLang's host and port)",
    "destination": "where versions wait for their activation: cpu, in memory as the engine holds them; disk, "
    "and the pause loads them; auto (default): cpu, if a self-test and the memory allow it",
    "kv_mode": "in_place or retract: at an activation keep the KV of running requests, or compute it again",
    "drain_all": "1: let all requests end before an activation",
    "probe": "0: do not compare weights that come back with what they were (default: 1)",
    "poll": "seconds between looks at the store (5)",
    "pin_drain": "seconds that requests for an exact version may hold an activation up (60)",
    "switch_drain": "seconds that requests may hold up a switch to another run (600; a receiver: pin_drain)",
    "update_timeout": "seconds that SGLang may take in the pause to load or copy a version "
    f"({UPDATE_TIMEOUT:g}); then the replica must be replaced",
    "stage_timeout": "seconds for which staging into memory may stand still before it is given up and tried "
    f"again ({STAGE_TIMEOUT:g}); as long as it gets on it has no limit",
    "stall": f"seconds for which a client may take nothing of its answer ({STALL_SECONDS:g})",
    "drain": "seconds that requests get after SIGTERM (60)",
    "constants": "what forward passes make that is not of weights, as patterns of names joined by ':', such "
    "as model.layers.*.mlp.mask: neither dropped at an activation nor a reason to refuse it",
    "profile": "the record of stitch profile for this model, release and flags (default: "
    ".stitch-profile.json in the boot checkpoint)",
    "niceness": f"how far staging stands back behind serving, as nice(1) counts ({NICENESS}); 0 on many CPUs",
}
"""Names, as --stitch-NAME and STITCH_NAME, and their help."""
ABOVE_ZERO = ("update_timeout", "stage_timeout", "stall")


class SettingsError(ValueError):
    """A setting that cannot be used; the message names it."""


@dataclass(frozen=True)
class Settings:
    """Follower if ``store`` is set, receiver if ``receive`` is. Times in seconds."""

    store: str | None = None
    run: str | None = None
    channel: str | None = None
    receive: str | None = None
    roots: tuple[Path, ...] = ()
    host_dir: Path | None = None
    cache: Path | None = None
    cache_bytes: int = DEFAULT_BYTES
    anchor_every: int | None = None
    id: str | None = None
    address: str | None = None
    destination: Destination = "auto"
    kv_mode: KVMode = "in_place"
    drain_all: bool = False
    probe: bool = True
    poll: float = 5.0
    pin_drain: float = 60.0
    switch_drain: float = 600.0
    update_timeout: float = UPDATE_TIMEOUT
    stage_timeout: float = STAGE_TIMEOUT
    stall: float = STALL_SECONDS
    drain: float = 60.0
    constants: tuple[str, ...] = ()
    profile: Path | None = None
    niceness: int = NICENESS

    def follow(self) -> Follow:
        """What to follow in the store."""
        return Follow(run=self.run) if self.run else Follow(channel=self.channel or DEFAULT_CHANNEL)

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Settings | None:
        """The settings, None where Stitch is not asked for. Raises SettingsError."""
        given = {name: environ.get(variable(name), "") for name in OPTIONS}
        if not given["store"] and not given["receive"]:
            return None
        if given["store"] and given["receive"]:
            raise SettingsError(
                "STITCH_STORE and STITCH_RECEIVE exclude each other: follow a store or receive"
            )
        if given["run"] and given["channel"]:
            raise SettingsError("STITCH_RUN and STITCH_CHANNEL exclude each other: follow a run or a channel")
        if given["receive"] and not given["roots"]:
            raise SettingsError("STITCH_RECEIVE needs STITCH_ROOTS: where a trainer's paths may lie")
        return cls(**{name: _parse(name, text) for name, text in given.items() if text})


def variable(name: str) -> str:
    """The environment variable of an option."""
    return f"STITCH_{name.upper()}"


def asked_for(environ: Mapping[str, str], argv: Sequence[str]) -> bool:
    """Whether Stitch is to do anything in this process; flags count before they are parsed."""
    flagged = any(argument.startswith(("--stitch-store", "--stitch-receive")) for argument in argv)
    return flagged or any(environ.get(variable(name)) for name in ("store", "receive"))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The --stitch-* flags."""
    group = parser.add_argument_group("stitch")
    for name, text in OPTIONS.items():
        group.add_argument(f"--stitch-{name.replace('_', '-')}", metavar="VALUE", help=text)


def export_flags(parsed: argparse.Namespace, environ: MutableMapping[str, str] = os.environ) -> None:
    """Parsed flags as variables, over those that are set. Raises SettingsError."""
    for name in OPTIONS:
        value = getattr(parsed, f"stitch_{name}", None)
        if value is not None:
            environ[variable(name)] = value
    Settings.read(environ)


def _parse(name: str, text: str) -> Any:
    kinds = {field.name: str(field.type) for field in fields(Settings)}
    try:
        if name in ("run", "id", "receive"):
            return check_run_id(text)
        if name == "kv_mode" and text not in ("in_place", "retract"):
            raise ValueError("it is in_place or retract")
        if name == "destination" and text not in ("disk", "cpu", "auto"):
            raise ValueError("it is disk, cpu or auto")
        if name == "roots":
            return tuple(Path(os.path.realpath(part)) for part in text.split(":") if part)
        if name == "constants":
            return tuple(part for part in text.split(":") if part)
        if name in ("host_dir", "cache", "profile"):
            return Path(os.path.abspath(text))
        if name == "niceness":
            return whole(text, most=LEAST_PRIORITY)
        if kinds[name] in ("int", "int | None"):
            return whole(text, least=1)
        if kinds[name] == "float":
            value = decimal(text)
            if name in ABOVE_ZERO and value == 0:
                raise ValueError("it is a number above 0")
            return value
        return {"0": False, "1": True}[text] if kinds[name] == "bool" else text
    except (ValueError, KeyError) as error:
        raise SettingsError(f"{variable(name)}={text!r} cannot be used: {error}") from error
