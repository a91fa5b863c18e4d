"""Update times that the public reference has published: ``recipes/published.toml``, never computed."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from ..catalogue import home
from ..errors import RecipeError, describe
from ..schema import Part

Way = Literal["memory", "nvme", "disk"]
Seconds = Annotated[float, Field(gt=0)]


class Published(Part):
    """One row, in seconds. Where the total is published as a range, ``note`` has it and ``total`` is None."""

    recipes: list[str] = Field(description="ours of the same checkpoint")
    what: str
    path: Way = Field(description="of the engine's update: canonical in memory or on NVMe, or from disk")
    preparation: Seconds
    pause: Seconds
    total: Seconds | None = None
    delta_gb: float | None = None
    note: str | None = None
    source: str


class _Table(Part):
    rows: list[Published]


def published(path: Path | None = None) -> list[Published]:
    """All rows. Raises RecipeError with file and field."""
    file = path or home() / "published.toml"
    try:
        return _Table.model_validate(tomllib.loads(file.read_text("utf-8"))).rows
    except OSError as error:
        raise RecipeError(f"{file}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"{file}: {error}") from error
    except ValidationError as error:
        raise RecipeError(describe(str(file), error)) from error


def of_recipe(name: str, canonical_on: str) -> Published | None:
    """The row of a recipe's checkpoint, by way of images, with the canonical checkpoint there."""
    found = (row for row in published() if name in row.recipes and row.path == canonical_on)
    return next(found, None)
