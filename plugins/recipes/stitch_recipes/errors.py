"""Errors of recipes, told by file and field."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import ValidationError


class RecipeError(ValueError):
    """A recipe or a site that cannot be used; the message names the file and the field."""


def describe(where: str, error: ValidationError, hint: Callable[[str], str] = lambda field: "") -> str:
    """One line for each field that is wrong; ``hint``: what is said more of a field of the first level."""
    lines = []
    for problem in error.errors():
        field = ".".join(map(str, problem["loc"])) or "the table"
        more = hint(str(problem["loc"][0])) if problem["loc"] else ""
        lines.append(f"{where}: {field}: {problem['msg'].removeprefix('Value error, ')}{more}")
    return "\n".join(lines)
