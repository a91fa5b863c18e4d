"""The layout of a checkpoint at full size against what was published of it: seconds for the largest."""

from __future__ import annotations

from collections.abc import Iterator

from ..layout.formats import totals
from ..layout.geometry import Geometry
from ..schema import Checkpoint, Recipe


def problems(recipe: Recipe) -> Iterator[str]:
    """Of the checkpoints that the recipe serves and trains from."""
    used = {recipe.serve} | ({recipe.trainer.checkpoint} if recipe.trainer else set())
    for name in sorted(used & set(recipe.checkpoints)):
        yield from of_checkpoint(name, recipe.model.geometry, recipe.checkpoints[name])


def of_checkpoint(name: str, geometry: Geometry, checkpoint: Checkpoint) -> Iterator[str]:
    """Bytes to the last digit that was published, and the number of tensors. Raises LayoutError."""
    if not checkpoint.bytes_checked:
        return
    if checkpoint.canonical_gb is None:
        yield f"checkpoints.{name}.bytes_checked: there is no canonical_gb to compare with"
        return
    count, size = totals(geometry, checkpoint)
    digits = len(repr(checkpoint.canonical_gb).partition(".")[2])
    if f"{size / 1e9:.{digits}f}" != f"{checkpoint.canonical_gb:.{digits}f}":
        said = checkpoint.canonical_gb
        yield f"checkpoints.{name}.canonical_gb: {said}, but the layout has {size / 1e9:.9g}"
    if checkpoint.tensors not in (count, None):
        yield f"checkpoints.{name}.tensors: {checkpoint.tensors}, but the layout has {count}"
