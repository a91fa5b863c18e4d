"""What one replica takes of its host: memory and disk (SGLANG_FORK.md, Memory)."""

from __future__ import annotations

import functools
import math

from .layout.formats import totals
from .layout.geometry import Geometry
from .schema import Checkpoint, Recipe

GIB = 2**30

JOURNAL = 0.02
"""The host checkpoint's redo journal, as a part of the model: SGLANG_FORK.md."""

OWN_GIB = 24
"""Memory of the engine's own processes, for each rank: an assumption. The one published peak that has more
than checkpoint and images, 1,630 GB of GLM-5.2 in FP8 on four ranks, has about that."""

SLACK, SLACK_GIB = 1.25, 32
"""How far above what is used a request may be: so that numbers may be round."""


def size(recipe: Recipe) -> float:
    """Bytes of the served checkpoint: as published, else as the layout gives them."""
    served = recipe.served
    if served.canonical_gb is not None:
        return served.canonical_gb * 1e9
    return float(_bytes(recipe.model.geometry.model_dump_json(), served.model_dump_json()))


@functools.lru_cache(maxsize=64)
def _bytes(geometry: str, checkpoint: str) -> int:
    """By the layout of tens of thousands of tensors, which several rules ask for."""
    return totals(Geometry.model_validate_json(geometry), Checkpoint.model_validate_json(checkpoint))[1]


def needed(recipe: Recipe) -> tuple[float, float]:
    """Bytes of memory and of disk beside the engine's own; unknown images count as the checkpoint."""
    served, engine = recipe.served, recipe.engine
    canonical = size(recipe)
    ranks = engine.gpus
    images = served.image_gb * 1e9 * ranks if served.image_gb is not None else canonical
    memory = 0.0 if engine.destination == "disk" else images * engine.images
    kept = canonical * (1 + JOURNAL)
    return (memory + kept, 0.0) if engine.canonical_on == "memory" else (memory, kept)


def memory_gib(recipe: Recipe) -> int:
    """Memory that one replica certainly uses, the engine's own with it."""
    return math.ceil(needed(recipe)[0] / GIB) + OWN_GIB * recipe.engine.gpus


def disk_gib(recipe: Recipe) -> int:
    """Disk that one replica certainly uses."""
    return math.ceil(needed(recipe)[1] / GIB)
