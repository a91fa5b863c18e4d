"""Memory and disk of a replica against what its destination needs (SGLANG_FORK.md, Memory)."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ..layout.formats import totals
from ..layout.geometry import Geometry
from ..schema import Checkpoint, Recipe

JOURNAL = 0.02
"""The host checkpoint's redo journal, as a part of the model: SGLANG_FORK.md."""

GIB = 2**30


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


def problems(recipe: Recipe) -> Iterator[str]:
    """Limits below what has to fit, with both numbers."""
    engine = recipe.engine
    if engine.memory_request_gib > engine.memory_limit_gib:
        yield f"engine.memory_request_gib: {engine.memory_request_gib}, above its limit"
    if recipe.serve not in recipe.checkpoints:
        return
    served = recipe.served
    if served.image_gb is not None and served.image_ranks not in (None, engine.gpus):
        yield f"engine.gpus: {engine.gpus}, but the image's size is known for {served.image_ranks} ranks"
    memory, disk = needed(recipe)
    for name, wanted, given in (
        ("memory_limit_gib", memory, engine.memory_limit_gib), ("disk_gib", disk, engine.disk_gib),
    ):  # fmt: skip
        if wanted > given * GIB:
            yield (
                f"engine.{name}: {given} GiB, but canonical checkpoint and images take {wanted / GIB:,.0f} "
                f"(destination {engine.destination}, canonical on {engine.canonical_on}): raise it"
            )
    if (trainer := recipe.trainer) is not None:
        request, limit = trainer.memory_request_gib, trainer.memory_limit_gib
        if request is not None and limit is not None and request > limit:
            yield f"trainer.memory_request_gib: {request}, above its limit"
