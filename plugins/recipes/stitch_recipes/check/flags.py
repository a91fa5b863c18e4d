"""Flags held against the lists in ``recipes/flags``, which the programs' own parsers made."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .. import catalogue
from ..errors import RecipeError
from ..schema import COMMIT, Flags, FlagValue

SHORT = 9
"""Digits of a commit in the name of its list."""


@dataclass(frozen=True)
class FlagList:
    """The flags of one revision of one program.

    ``scripts`` are the framework's lists of Megatron arguments, ``functions`` those that its functions add.
    """

    program: str
    revision: str
    flags: Mapping[str, Mapping[str, Any]]
    scripts: frozenset[str] = frozenset()
    functions: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)

    def with_functions(self, paths: Iterable[str]) -> FlagList:
        """With the flags that these functions of the framework add."""
        added = [self.functions.get(path, {}) for path in paths]
        return replace(
            self, flags={name: entry for table in (self.flags, *added) for name, entry in table.items()}
        )


@functools.cache
def flag_list(program: str, revision: str) -> FlagList:
    """The list of a declared revision. Raises RecipeError if there is none."""
    directory = catalogue.home() / "flags"
    known = revision[:SHORT] if COMMIT.fullmatch(revision) else revision
    path = directory / f"{program}-{known}.json"
    if not path.is_file():
        there = ", ".join(sorted(file.stem for file in directory.glob(f"{program}-*.json")))
        raise RecipeError(
            f"no flags of {program} {revision} are known ({there}): scripts/flag_lists.py makes them"
        )
    document = json.loads(path.read_text("utf-8"))
    scripts = frozenset(document.get("model_scripts", ()))
    return FlagList(program, known, document["flags"], scripts, document.get("functions", {}))


def problems(where: str, chosen: Flags, known: FlagList) -> Iterator[str]:
    """Flags that the program does not have, and values that its parser would refuse."""
    for name, value in chosen.items():
        entry = known.flags.get(name)
        if entry is None:
            near = difflib.get_close_matches(name, known.flags, n=1)
            hint = f", did you mean --{near[0]}?" if near else ""
            yield f"{where}.{name}: {known.program} {known.revision} has no --{name}{hint}"
        elif value is not False and (wrong := _refused(value, entry)):
            yield f"{where}.{name}: {wrong}"


def _refused(value: FlagValue, entry: Mapping[str, Any]) -> str | None:
    """Why the parser would refuse a value, as far as the list says."""
    nargs = entry["nargs"]
    if value is True:
        return None if nargs in (0, "?", "*") else f"it takes {nargs} value(s), not none"
    values = value if isinstance(value, list) else [value]
    if nargs == 0:
        return f"it takes no value: write true, not {value!r}"
    if isinstance(nargs, int) and nargs != len(values):
        return f"it takes {nargs} value(s), not {len(values)}"
    for one in values:
        if "choices" in entry and str(one) not in map(str, entry["choices"]):
            return f"{one!r} is none of {', '.join(map(str, entry['choices']))}"
        kind = {"int": int, "float": float}.get(entry.get("type", ""))
        if kind is not None and not _reads(kind, str(one)):
            return f"{one!r} is no {entry['type']}"
    return None


def _reads(kind: type, text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True
