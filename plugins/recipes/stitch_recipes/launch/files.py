"""Rendered files: the same text for the same recipe and site, never written over one that was edited."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import RecipeError

_MARK = re.compile(r"^# rendered: (?P<what>[^\n]*), digest (?P<digest>[0-9a-f]{32})\n", re.MULTILINE)


@dataclass(frozen=True)
class File:
    """One file of a rendering: ``name`` in its directory, ``text`` in a language whose comments begin with #.

    One that begins with ``#!`` is a program.
    """

    name: str
    text: str


def write(files: Sequence[File], out: Path, what: str, *, force: bool = False) -> list[str]:
    """Write a rendering of ``what`` into ``out``; the names that changed.

    A file there that a person edited, or that was not rendered, is refused before anything is written, and so
    is a directory with the rendering of something else, unless ``force``. What an earlier rendering left and
    this one lacks goes, if nobody edited it. Raises RecipeError.
    """
    if out.exists() and not out.is_dir():
        raise RecipeError(f"{out} is there, and no directory")
    try:
        return _write(files, out, what, force)
    except OSError as error:
        raise RecipeError(f"{error.filename or out}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"a file in {out} is no text: {error}; render into another directory") from error


def _write(files: Sequence[File], out: Path, what: str, force: bool) -> list[str]:
    out.mkdir(parents=True, exist_ok=True)
    marked = {file.name: _marked(file.text, what) for file in files}
    there = {path.name: path.read_text("utf-8") for path in sorted(out.iterdir()) if path.is_file()}
    edited = [name for name in marked if name in there and not _as_rendered(there[name])]
    if edited and not force:
        raise RecipeError(
            f"{out}: {', '.join(edited)}: edited, or not rendered; --force writes over them, or render into "
            "another directory and compare"
        )
    others = sorted({mark["what"] for text in there.values() if (mark := _MARK.search(text))} - {what})
    if others and not force:
        raise RecipeError(
            f"{out} has the rendering of {', '.join(others)}: render {what} into another directory; --force "
            "replaces what is there"
        )
    changed = [name for name, text in marked.items() if there.get(name) != text]
    for name in changed:
        _replace(out / name, marked[name])
    for name in there.keys() - marked.keys():
        if _as_rendered(there[name]):
            (out / name).unlink(missing_ok=True)
    return changed


def _marked(text: str, what: str) -> str:
    """With the line that tells an edit: first, or below a program's first line."""
    first, rest = ("", text)
    if text.startswith("#!"):
        first, _, rest = text.partition("\n")
        first += "\n"
    return f"{first}# rendered: {what}, digest {_digest(first + rest)}\n{rest}"


def _as_rendered(text: str) -> bool:
    mark = _MARK.search(text)
    return mark is not None and _digest(text[: mark.start()] + text[mark.end() :]) == mark["digest"]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _replace(path: Path, text: str) -> None:
    """Whole or not at all: a file that was cut off would look like an edited one."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        new.write_text(text, "utf-8")
        new.chmod(0o755 if text.startswith("#!") else 0o644)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
