"""The command lines of a run's processes: what every launcher starts, whatever it runs on.

Flags that Stitch needs are here and in training.py, once (docs/trainers.md, SGLANG_FORK.md);
recipes have others.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .schema import Flags, Recipe
from .site import Site

GATEWAY_PORT = 30000
REPLICA_PORT = 30100
CONFIG = "stitch.yaml"


@dataclass(frozen=True)
class Process:
    """A program, its arguments and what it adds to its environment.

    On several ``nodes`` it runs on each at once, with NODE_RANK and MASTER_ADDR. ``gpus``: it needs those of
    a trainer's node. ``makes``: the directory that is there once it ended well; such a step is done once.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 1
    gpus: bool = False
    makes: str | None = None

    def shell(self) -> str:
        """As one line of a POSIX shell."""
        given = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        return " ".join([*given, *map(shlex.quote, self.argv)])


def replica(recipe: Recipe, site: Site, model: str, address: str | None = None) -> Process:
    """One replica that serves the checkpoint in ``model``; it follows the run by itself."""
    engine = recipe.engine
    memory = engine.canonical_on == "memory"
    anchors = None if recipe.versions.prove else recipe.versions.anchor_every
    environment = {
        "STITCH_STORE": site.store,
        "STITCH_RUN": site.run,
        "STITCH_DESTINATION": engine.destination,
        "STITCH_KV_MODE": engine.kv_mode,
        "STITCH_HOST_DIR": "/dev/shm/stitch" if memory else f"{site.nvme}/stitch",
        **({"STITCH_ADDRESS": address} if address else {}),
        **({"STITCH_ANCHOR_EVERY": str(anchors)} if anchors else {}),
        **engine.environment,
    }
    argv = (
        "sglang", "serve", "--model-path", model, "--host", "0.0.0.0", "--port", str(REPLICA_PORT),
        "--tp-size", str(engine.gpus), *flags(engine.flags),
    )  # fmt: skip
    return Process(argv, environment)


def gateway(recipe: Recipe, site: Site, pool: str | None = None, peers: str | None = None) -> Process:
    """The gateway; without ``pool`` replicas are found by their records. ``peers``: the other gateways."""
    argv = ["stitch", "gateway", "--store", site.store, "--run", site.run, "--host", "0.0.0.0"]
    argv += ["--port", str(GATEWAY_PORT), *(["--pool", pool] if pool else [])]
    argv += ["--peers", peers] if peers else []
    if recipe.trainer is not None:
        argv += ["--facade", "--lag", str(recipe.versions.lag)]
    return Process(tuple(argv))


def directory(recipe: Recipe, site: Site, checkpoint: str) -> str:
    """Where a checkpoint of the recipe lies on every host."""
    return f"{site.models}/{recipe.name.partition('/')[0]}-{checkpoint}"


def claim(recipe: Recipe, site: Site) -> Process:
    """What creates the run, so that replicas have something to follow; not again, since it fences."""
    base = directory(recipe, site, recipe.serve)
    return Process(("stitch", "claim", "--store", site.store, "--run", site.run, "--base", base))


def known(site: Site) -> Process:
    """What fails unless the run was created."""
    return Process(("stitch", "versions", "--store", site.store, "--run", site.run))


def compactor(site: Site) -> Process:
    """What keeps joins short, on any host."""
    return Process(("stitch", "compact", "--store", site.store, "--run", site.run, "--follow"))


def collector(recipe: Recipe, site: Site) -> Process:
    """What deletes what nobody can need; run now and then."""
    grace = f"{recipe.versions.grace_hours:g}h"
    return Process(("stitch", "gc", "--store", site.store, "--run", site.run, "--grace", grace))


def settings(recipe: Recipe, site: Site) -> dict[str, Any]:
    """The YAML that ``--custom-config-path`` names (docs/trainers.md)."""
    versions = recipe.versions
    functions = recipe.trainer.functions if recipe.trainer else None
    chosen = {
        "stitch_run": site.run,
        "stitch_store": site.store,
        "stitch_lag": versions.lag,
        "stitch_encoding": versions.encoding,
        "stitch_max_staleness": versions.max_staleness,
        "stitch_prove": versions.prove or None,
        # From the proven copy; without one the replicas upload fulls (STITCH_ANCHOR_EVERY).
        "stitch_anchor_every": versions.anchor_every if versions.prove else None,
        **{f"stitch_inner_{name}": path for name, path in (functions or {}).items()},
    }
    return {key: value for key, value in chosen.items() if value is not None}


def flags(chosen: Flags) -> list[str]:
    """Flags as arguments: true is the bare flag, false leaves it out."""
    words: list[str] = []
    for name, value in chosen.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def lines(words: Iterable[str]) -> str:
    """Arguments as lines of a shell script, one flag with its values a line."""
    text = ""
    for word in words:
        text += (" \\\n  " if word.startswith("--") else " ") + shlex.quote(word)
    return text.lstrip()
