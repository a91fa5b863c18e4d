"""Errors of recipes, told by file and field."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import ValidationError


class RecipeError(ValueError):
    """A recipe or a site that cannot be used; the message names the file and the field."""


def describe(where: str, error: ValidationError, hint: Callable[[str], str] = lambda field: "") -> str:
    """One line for each field that is wrong; ``hint``: what is said more of a field of the first level."""
    return "\n".join(
        f"{where}: {'.'.join(map(str, problem['loc'])) or 'the table'}: {problem['msg'].removeprefix('Value error, ')}"
        + (hint(str(problem["loc"][0])) if problem["loc"] else "")
        for problem in error.errors()
    )
