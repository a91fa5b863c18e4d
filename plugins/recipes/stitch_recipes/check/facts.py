"""What is not known is marked so, and nothing that is known is."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from ..schema import Recipe


def problems(recipe: Recipe) -> Iterator[str]:
    """Facts left out without a reason, reasons for what is there, and checkpoints that do not exist."""
    used = {recipe.serve} | ({recipe.trainer.checkpoint} if recipe.trainer else set())
    for name in sorted(used - set(recipe.checkpoints)):
        yield f"serve, trainer.checkpoint: there is no checkpoints.{name}"
    for name, checkpoint in recipe.checkpoints.items():
        if (checkpoint.source is None) == (checkpoint.prepared is None):
            yield f"checkpoints.{name}: it needs a source or how it is prepared, and not both"
        if checkpoint.prepared is not None and checkpoint.prepared.of not in recipe.checkpoints:
            yield f"checkpoints.{name}.prepared.of: there is no checkpoints.{checkpoint.prepared.of}"
        if _of_itself(recipe, name):
            yield f"checkpoints.{name}.prepared.of: it is prepared from itself"
        for word in ("{source}", "{target}"):
            if checkpoint.prepared is not None and word not in checkpoint.prepared.command:
                yield f"checkpoints.{name}.prepared.command: it does not say {word}"
        made = checkpoint.prepared
        if made is not None and made.gpus and recipe.trainer is None and name in _made_for(recipe):
            yield f"checkpoints.{name}.prepared.gpus: they are a trainer's, and this recipe only serves"
    if recipe.serve in recipe.checkpoints:
        yield from _left_out(recipe)
    for path in recipe.unknown:
        if not _is_path(recipe, path.split(".")):
            yield f"unknown.{path}: there is no such field"


def _made_for(recipe: Recipe) -> set[str]:
    """The served checkpoint, and what it is made of."""
    names: set[str] = set()
    name: str | None = recipe.serve
    while name is not None and name in recipe.checkpoints and name not in names:
        names.add(name)
        made = recipe.checkpoints[name].prepared
        name = made.of if made is not None else None
    return names


def _of_itself(recipe: Recipe, name: str) -> bool:
    """Whether the way to what a checkpoint is made of comes back to it."""
    made, passed = recipe.checkpoints[name].prepared, set[str]()
    while made is not None and made.of in recipe.checkpoints and made.of not in passed:
        passed.add(made.of)
        made = recipe.checkpoints[made.of].prepared
    return name in passed


def _left_out(recipe: Recipe) -> Iterator[str]:
    served = recipe.served
    facts = {
        f"checkpoints.{recipe.serve}.image_gb": served.image_gb,
    }
    for name in {recipe.serve, recipe.trainer.checkpoint if recipe.trainer else recipe.serve}:
        source = recipe.checkpoints[name].source if name in recipe.checkpoints else None
        if source is not None:
            facts[f"checkpoints.{name}.source.revision"] = 1.0 if source.revision else None
    for path, value in facts.items():
        if value is None and path not in recipe.unknown:
            yield f"{path}: left out, and unknown does not say why"
        if value is not None and path in recipe.unknown:
            yield f"unknown.{path}: the field has a value"
    if served.image_gb is not None and served.image_ranks is None:
        yield f"checkpoints.{recipe.serve}.image_ranks: of how many ranks is image_gb?"


def _is_path(part: object, steps: list[str]) -> bool:
    """Whether a path leads to a field of the model, to a key of a table, or into a free table."""
    if not steps:
        return True
    if isinstance(part, BaseModel):
        return steps[0] in type(part).model_fields and _is_path(getattr(part, steps[0]), steps[1:])
    if isinstance(part, dict):
        return any(
            ".".join(steps[:length]) in part and _is_path(part[".".join(steps[:length])], steps[length:])
            for length in range(1, len(steps) + 1)
        )
    return part is None and len(steps) == 1
