"""The settings as ``--stitch-*`` flags, for frameworks that let a plugin add some."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from ..digits import decimal, whole
from ..fleet import read_wanted
from .settings import FIELDS, PREFIX, TrainerSettings

READERS: Mapping[str, Callable[[str], Any]] = {"int": whole, "float": decimal, "int | float": read_wanted}

HELP = {
    "run": "the run's id",
    "store": "URL of the store, such as file:/data/stitch",
    "boot": "HF checkpoint directory that is version 0 (default: --hf-checkpoint)",
    "work": "scratch space on every host",
    "channel": "a channel to point at the run when it is claimed",
    "lag": "how many versions behind the head a rollout may start",
    "max_staleness": "how many versions behind a sample may be when it is trained on (fully async)",
    "consumer": "name of rollout requests at the gateway",
    "eval_consumer": "name of evaluation requests at the gateway",
    "keep_files": "leave published directories where the framework wrote them",
    "patience": "seconds for which a publish waits for a store that does not answer",
    "inner_rollout": "a rollout function of your own",
    "inner_generate": "a generate function of your own",
    "async": "publish behind the next step (Stitch's own encoder)",
    "prove": "apply each delta to a proven copy before the head moves",
    "wake": "URLs of gateways or replicas to tell of each new version, with commas between them",
    "wait_replicas": "after each version wait until so many replicas (1.0: all that live) serve it",
    "wait_replicas_timeout": "seconds for which to wait for replicas",
    "wait_replicas_then": "then warn or stop",
    "anchor_every": "versions between two full representations",
    "override": "resume at a version that a rollback gave up",
    "encoding": "of the deltas (Stitch's own encoder): xor, or sparse, about half as large",
    "compact": "merge deltas into spans beside the trainer, so that replicas join cheaply",
    "alone": "nothing else writes the run (for stores without conditional writes)",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting; a parser that has them is left as it is.

    Without a default, so that what is not given stays with the YAML and with TrainerSettings.
    """
    for key, text in HELP.items():
        flag = f"--{PREFIX}{key}".replace("_", "-")
        if flag in parser._option_string_actions:
            continue
        annotation = TrainerSettings.__annotations__[FIELDS[key]].removesuffix(" | None")
        if annotation == "bool":
            parser.add_argument(flag, action="store_true", default=None, help=f"Stitch: {text}")
        else:
            kind = READERS.get(annotation, str)
            parser.add_argument(flag, type=kind, default=None, help=f"Stitch: {text}")
