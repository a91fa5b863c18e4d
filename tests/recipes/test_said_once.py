"""No recipe repeats what another has, and no block is there for nobody."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from stitch_recipes import catalogue

MOST = 7
"""Values that two files may have alike: sizes of groups, or of what one GPU holds, which agree by chance."""

FREE = (
    "model",
    "checkpoints",
    "summary",
    "uses",
    "serve",
    "unknown",
    "notes",
    "fleet",
    "delta_density",
    "asks",
)
"""What says of one model what it is."""


def documents() -> dict[str, dict[str, Any]]:
    home = catalogue.home()
    return {
        file.stem: catalogue.read_toml(file)
        for file in [home / "blocks.toml", *(home / "models").glob("*.toml")]
    }


def own(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every value that a table says itself, with its path."""
    for key, value in tree.items():
        if key in FREE:
            continue
        if isinstance(value, dict):
            yield from own(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", repr(value)


def tables() -> dict[str, set[tuple[str, str]]]:
    return {
        f"{file} [{kind}.{name}]": set(own(table))
        for file, document in documents().items()
        for kind in ("blocks", "recipes")
        for name, table in document.get(kind, {}).items()
    }


def test_no_two_tables_say_the_same() -> None:
    alike = {
        f"{one} and {other}": sorted(said[0] for said in a & b)
        for (one, a), (other, b) in itertools.combinations(tables().items(), 2)
        if len(a & b) > MOST
    }
    assert alike == {}


def test_every_block_is_used_and_more_than_once_if_all_models_may_use_it() -> None:
    used: dict[str, set[str]] = {}
    for file, document in documents().items():
        for kind in ("blocks", "recipes"):
            for name, table in document.get(kind, {}).items():
                for block in table.get("uses", []):
                    used.setdefault(block, set()).add(f"{file}.{name}")
    for file, document in documents().items():
        for name in document.get("blocks", {}):
            assert len(used.get(name, ())) > 1, f"{file} [blocks.{name}] is used by {used.get(name)}"
