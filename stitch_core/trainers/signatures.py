"""What a plugin relies on in its framework, looked up: one table, and the names of what is missing."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


class FrameworkChanged(Exception):
    """The framework lacks what the plugin needs, or has it in another form; the message has the table."""


@dataclass(frozen=True)
class Symbol:
    """``module:name`` in the framework, and the parameters that we pass or wrap (None: it has to be there).

    ``need`` says for what, in a word or two. An optional one only switches its feature off.
    """

    path: str
    parameters: tuple[str, ...] | None
    need: str
    optional: bool = False


@dataclass(frozen=True)
class Finding:
    symbol: Symbol
    status: Literal["ok", "absent", "changed"]
    detail: str = ""

    @property
    def fatal(self) -> bool:
        return self.status != "ok" and not (self.symbol.optional and self.status == "absent")


def resolve(path: str) -> Any:
    """The object at ``module:dotted.name``. Raises ImportError, AttributeError."""
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split(".") if name else ():
        found = getattr(found, part)
    return found


def probe(symbols: Sequence[Symbol]) -> list[Finding]:
    """Look each symbol up."""
    return [_probe(symbol) for symbol in symbols]


def _probe(symbol: Symbol) -> Finding:
    try:
        found = resolve(symbol.path)
    except (ImportError, AttributeError) as error:
        return Finding(symbol, "absent", str(error))
    if symbol.parameters is None:
        return Finding(symbol, "ok")
    parameters = tuple(inspect.signature(found).parameters)
    if parameters[: len(symbol.parameters)] != symbol.parameters:
        return Finding(
            symbol, "changed", f"takes ({', '.join(parameters)}), known is ({', '.join(symbol.parameters)})"
        )
    return Finding(symbol, "ok")


def table(title: str, findings: Sequence[Finding]) -> str:
    """The findings as text, one line each."""
    width = max((len(finding.symbol.need) for finding in findings), default=0)
    lines = [title]
    for finding in findings:
        status = "off" if finding.status == "absent" and finding.symbol.optional else finding.status
        detail = f"  {finding.detail}" if finding.detail and status != "off" else ""
        lines.append(f"  {finding.symbol.need.ljust(width)}  {status:8}{finding.symbol.path}{detail}")
    return "\n".join(lines)


def require(title: str, findings: Sequence[Finding]) -> None:
    """Raises FrameworkChanged, with the table, if anything that is needed is not as it was known to be."""
    broken = [finding for finding in findings if finding.fatal]
    if broken:
        names = ", ".join(finding.symbol.path for finding in broken)
        raise FrameworkChanged(f"not as Stitch knows it: {names}\n{table(title, findings)}")
