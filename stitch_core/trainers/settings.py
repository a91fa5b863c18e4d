"""The ``stitch_*`` settings of a training run, from the framework's arguments.

slime and Miles set every key of their ``--custom-config-path`` YAML on the arguments. Both would let a
misspelt key pass in silence, and slime drops unknown flags: here each is an error with the nearest name.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..fleet import wanted_problem
from ..stores import BadUrl, open_store
from ..versions import VersionError, check_run_id
from ..waking import BadWakeUrl, wake_urls

PREFIX = "stitch_"


class SettingsError(ValueError):
    """Settings that cannot be used; the message names each key and what to write instead."""


@dataclass(frozen=True)
class TrainerSettings:
    """What a run needs to know of Stitch.

    ``run`` and ``store`` are required. ``boot`` is the HF checkpoint directory that is version 0 (the
    framework's ``hf_checkpoint`` by default), ``work`` scratch space on every host, ``channel`` one to point
    at the run when it is claimed. A rollout request must be served by the head at its start or a version at
    most ``lag`` before it; a sample more than ``max_staleness`` behind is not trained on, where the framework
    has a buffer that asks. ``consumer`` names those requests at the gateway, ``eval_consumer`` those of
    evaluation. ``keep_files`` leaves published directories where the framework wrote them. ``patience``:
    seconds for which a publish waits for a store that does not answer, before the trainer stops.
    ``inner_rollout`` and ``inner_generate`` are functions of the user's own (dotted names) that ours call
    instead of the framework's.

    ``async_`` publishes behind the next step, where our own encoder does it. ``prove`` applies each delta
    to a proven copy before the head moves. ``wait_replicas``: after each version wait until so many replicas,
    or (a float) such a fraction of the live ones, serve it, for ``wait_replicas_timeout`` seconds; then
    ``wait_replicas_then`` warn, or stop. ``anchor_every``: versions between two fulls. ``override`` resumes
    at a version that a rollback gave up. ``alone`` vouches that no other trainer writes the run, which stores
    without conditional writes need. ``encoding`` of the deltas that our own encoder writes: "xor", as stock
    receivers read it, or "sparse", about half as large. ``compact`` runs ``stitch compact`` on rank 0's host.
    ``wake``: URLs of gateways or replicas that are told when a version is published.
    """

    run: str
    store: str
    boot: Path
    work: Path
    channel: str | None = None
    lag: int = 0
    max_staleness: int | None = None
    consumer: str = "rollout"
    eval_consumer: str = "eval"
    keep_files: bool = False
    patience: float = 600.0
    inner_rollout: str | None = None
    inner_generate: str | None = None
    async_: bool = False
    prove: bool = False
    wait_replicas: int | float | None = None
    wait_replicas_timeout: float = 300.0
    wait_replicas_then: str = "warn"
    anchor_every: int | None = None
    override: bool = False
    alone: bool = False
    encoding: str = "xor"
    compact: bool = False
    wake: tuple[str, ...] = ()


FIELDS = {f.name.rstrip("_"): f.name for f in dataclasses.fields(TrainerSettings)}
KEYS = tuple(FIELDS)


def read_settings(args: Any, argv: Sequence[str] = ()) -> TrainerSettings:
    """The settings on ``args``. ``argv`` is the command line, if it is known, to find dropped flags.

    Raises SettingsError with everything that is wrong.
    """
    values = {k.removeprefix(PREFIX): v for k, v in vars(args).items() if k.startswith(PREFIX)}
    problems = [
        f"{PREFIX}{key} is not a setting{_nearest(key, KEYS, PREFIX)}" for key in values if key not in KEYS
    ]
    problems += dropped_flags(argv, args)
    values = {k: v for k, v in values.items() if k in KEYS and v is not None}
    if "boot" not in values and getattr(args, "hf_checkpoint", None):
        values["boot"] = args.hf_checkpoint
    for key in ("run", "store", "boot"):
        if key not in values:
            problems.append(f"{PREFIX}{key} is missing: add it to the YAML of --custom-config-path")
    for key, value in values.items():
        problem = _problem(key, value)
        if problem:
            problems.append(f"{PREFIX}{key}: {problem}")
    if problems:
        raise SettingsError("; ".join(problems))
    for key in ("boot", "work"):
        if key in values:
            values[key] = Path(os.path.abspath(values[key]))
    if "wake" in values:
        values["wake"] = wake_urls(values["wake"])
    values.setdefault("work", Path(tempfile.gettempdir()) / f"stitch-{values['run']}")
    return TrainerSettings(**{FIELDS[key]: value for key, value in values.items()})


def dropped_flags(argv: Sequence[str], args: Any) -> list[str]:
    """What is wrong with each ``--stitch-*`` flag that the framework's parser did not turn into a setting,
    and with each other flag that names a function of ours, which no argument then has."""
    problems = []
    held = {value for values in vars(args).values() for value in _texts(values)}
    for word, after in zip(argv, [*argv[1:], ""], strict=False):
        flag, equals, value = word.partition("=")
        value = value if equals else after
        if flag.startswith("--stitch"):
            key = flag.removeprefix("--").replace("-", "_").removeprefix(PREFIX)
            if key not in KEYS:
                problems.append(f"{flag} is not a setting{_nearest(key, KEYS, '--stitch-')}")
            elif not hasattr(args, PREFIX + key):
                problems.append(
                    f"{flag} was dropped by the framework's parser: write it as {PREFIX}{key} in the YAML of "
                    "--custom-config-path"
                )
        elif flag.startswith("--") and value.startswith(PREFIX) and "." in value and value not in held:
            near = difflib.get_close_matches(flag.removeprefix("--").replace("-", "_"), vars(args), 1, 0.5)
            hint = f", did you mean --{near[0].replace('_', '-')}?" if near else ""
            problems.append(f"{flag} {value} was dropped by the framework's parser{hint}")
    return problems


def _texts(value: Any) -> list[str]:
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]


def _nearest(key: str, known: Iterable[str], prefix: str) -> str:
    names = list(known)
    near = difflib.get_close_matches(key, names, 1, 0.5)
    shown = [name.replace("_", "-") if prefix.startswith("--") else name for name in near or names]
    if near:
        return f", did you mean {prefix}{shown[0]}?"
    return f": known are {', '.join(prefix + name for name in shown)}"


def _problem(key: str, value: Any) -> str | None:
    kind = KINDS.get(key)
    if kind is not None:
        return kind(value)
    if not isinstance(value, str | Path) or not str(value):
        return f"expected text, got {value!r}"
    try:
        if key == "run":
            check_run_id(value)
        if key == "store":
            open_store(str(value))
            if urlsplit(str(value)).scheme == "memory":
                return f"{value} ends with the process that opened it: no replica would see a version of it"
    except (VersionError, BadUrl) as error:
        return str(error)
    return None


def _whole(value: Any) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return None
    return f"expected a number of versions from 0 on, got {value!r}"


def _from_one(value: Any) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return None
    return f"expected a number of versions from 1 on, got {value!r}"


def _seconds(value: Any) -> str | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return None
    return f"expected seconds from 0 on, got {value!r}"


def _switch(value: Any) -> str | None:
    return None if isinstance(value, bool) else f"expected true or false, got {value!r}"


def _then(value: Any) -> str | None:
    return None if value in ("warn", "stop") else f"expected warn or stop, got {value!r}"


def _encoding(value: Any) -> str | None:
    return None if value in ("xor", "sparse") else f"expected xor or sparse, got {value!r}"


def _urls(value: Any) -> str | None:
    try:
        wake_urls(value)
    except BadWakeUrl as error:
        return str(error)
    return None


KINDS: Mapping[str, Callable[[Any], str | None]] = {
    "lag": _whole, "max_staleness": _whole, "anchor_every": _from_one, "patience": _seconds,
    "wait_replicas_timeout": _seconds, "wait_replicas": wanted_problem, "wait_replicas_then": _then,
    "encoding": _encoding,
    "keep_files": _switch, "async": _switch, "prove": _switch, "override": _switch, "alone": _switch,
    "compact": _switch, "wake": _urls,
}  # fmt: skip


def as_config(settings: TrainerSettings) -> Mapping[str, Any]:
    """The settings as the YAML spells them, for a report."""
    return {PREFIX + key: getattr(settings, field) for key, field in FIELDS.items()}
