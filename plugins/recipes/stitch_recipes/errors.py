"""Errors of recipes, told by file and field."""

from __future__ import annotations

from pydantic import ValidationError


class RecipeError(ValueError):
    """A recipe or a site that cannot be used; the message names the file and the field."""


def describe(where: str, error: ValidationError) -> str:
    """One line for each field that is wrong."""
    return "\n".join(
        f"{where}: {'.'.join(str(part) for part in problem['loc']) or 'the table'}: {problem['msg']}"
        for problem in error.errors()
    )
