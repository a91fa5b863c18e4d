"""Memory and disk of a replica against what it takes, and requests against what it certainly takes."""

from __future__ import annotations

from collections.abc import Iterator

from ..footprint import GIB, SLACK, SLACK_GIB, memory_gib, needed
from ..schema import Recipe


def problems(recipe: Recipe) -> Iterator[str]:
    """Limits below what has to fit, and requests that are not what is used, with both numbers."""
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
    used = memory_gib(recipe)
    most = int(used * SLACK) + SLACK_GIB
    if not used <= engine.memory_request_gib <= most:
        why = (
            "its host would have no room for what it certainly uses"
            if engine.memory_request_gib < used
            else "GPUs of a host would stay without a replica"
        )
        yield (
            f"engine.memory_request_gib: {engine.memory_request_gib}, but one replica takes {used:,} GiB, "
            f"{engine.gpus} ranks of the engine with it: {why}; from {used:,} to {most:,} is fine"
        )
    if (trainer := recipe.trainer) is not None:
        request, limit = trainer.memory_request_gib, trainer.memory_limit_gib
        if request is not None and limit is not None and request > limit:
            yield f"trainer.memory_request_gib: {request}, above its limit"
