"""Plugins by name: entry points, and a table of our own for a clone that was never installed."""

from __future__ import annotations

import functools
from importlib import metadata
from importlib.metadata import EntryPoint
from typing import Any

# What the distribution registers; `pip install` makes entry points of the same names.
OURS: dict[str, dict[str, str]] = {
    "stitch.stores": {
        "file": "stitch_core.stores.local:open_url",
        "memory": "stitch_core.stores.memory:open_url",
        "modal": "stitch_modal.store:open_url",
        "s3": "stitch_s3.store:open_url",
    },
    "stitch.engines": {"embedded": "stitch_embedded.replica:open_engine"},
    "stitch.pools": {
        "dns": "stitch_gateway.pools:open_dns",
        "modal_flash": "stitch_gateway.modal_flash:open_modal_flash",
        "static": "stitch_gateway.pools:open_static",
        "store": "stitch_gateway.pools:open_store",
    },
    "stitch.commands": {
        "consumer": "stitch_gateway.consumer_command:add_parser",
        "gateway": "stitch_gateway.command:add_parser",
        "prove": "stitch_embedded.prove_command:add_parser",
        "recipe": "stitch_recipes.command:add_parser",
    },
}

# The extra that brings a name, where it is not the name itself.
EXTRAS = {
    "consumer": "gateway", "dns": "gateway", "static": "gateway", "store": "gateway", "prove": "embedded",
    "modal_flash": "modal", "recipe": "recipes",
}  # fmt: skip
# The extras that bring a module, for commands that need it only once they run.
MODULES = {
    "aiohttp": ("cli", "gateway"), "uvicorn": ("cli", "embedded"), "boto3": ("s3",), "botocore": ("s3",),
    "modal": ("modal",), "pydantic": ("recipes",), "yaml": ("recipes",), "jinja2": ("embedded",),
    "safetensors": ("embedded",), "tokenizers": ("embedded",), "torch": ("embedded",),
}  # fmt: skip
ELSEWHERE: dict[str, tuple[str, ...]] = {}
NO_ENGINE = {"sglang": "; `sglang serve` itself is the replica, with STITCH_STORE set: see SGLANG_FORK.md"}


class PluginMissing(ValueError):
    """No plugin of that name is installed here; the message says what is, and what to install."""


def entry_points(group: str, name: str | None = None) -> metadata.EntryPoints:
    """What is installed here under a group, or under a name of it."""
    return _installed().select(group=group, **({} if name is None else {"name": name}))


@functools.cache
def _installed() -> Any:
    """Once: it reads a file of every distribution here, which took most of the start of ``stitch``."""
    return metadata.entry_points()


def names(group: str) -> list[str]:
    """The names that a group has here, sorted."""
    return sorted({*OURS.get(group, {}), *(entry.name for entry in entry_points(group=group))})


def load(group: str, name: str) -> Any:
    """What the plugin ``name`` of ``group`` registered. Raises PluginMissing."""
    for entry in entry_points(group=group, name=name):
        return _load(entry)
    if name in OURS.get(group, {}):
        return _load(EntryPoint(name, OURS[group][name], group))
    kind = group.removeprefix("stitch.").removesuffix("s")
    hint = f"; it comes with {_extra(name)}" if name in ELSEWHERE.get(group, ()) else ""
    if kind == "engine":
        hint = NO_ENGINE.get(name, hint)
    raise PluginMissing(f"there is no {kind} {name!r} here (known: {', '.join(names(group))}){hint}")


def _load(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except ModuleNotFoundError as error:
        raise PluginMissing(f"{entry.name} needs {error.name}: pip install {_extra(entry.name)}") from error
    except (ImportError, AttributeError) as error:
        raise PluginMissing(f"{entry.name} is installed but cannot be loaded: {error}") from error


def what_brings(module: str | None, command: str) -> str | None:
    """How to install a module that ``command`` misses; None where no extra brings it."""
    name = (module or "").partition(".")[0]
    if name not in MODULES:
        return None
    mine = EXTRAS.get(command, command)
    extra = mine if mine in MODULES[name] else MODULES[name][0]
    return f"{command} needs {name}: pip install {_extra(extra)}"


def _extra(name: str) -> str:
    return f"'stitch-rl[{EXTRAS.get(name, name)}]'"
