"""The models that there are recipes for, read without their recipes."""

import tomllib
from functools import cache

from stitch_recipes import catalogue
from stitch_recipes.schema import Checkpoint, Model

LARGE = {"glm-5.2", "kimi-k2.6", "kimi-k3", "qwen3-235b-a22b"}
"""Seconds, at full size."""


@cache
def model(name: str) -> tuple[Model, dict[str, Checkpoint]]:
    document = tomllib.loads((catalogue.home() / "models" / f"{name}.toml").read_text())
    checkpoints = {key: Checkpoint.model_validate(one) for key, one in document["checkpoints"].items()}
    return Model.model_validate(document["model"]), checkpoints


def names() -> list[str]:
    return sorted(file.stem for file in (catalogue.home() / "models").glob("*.toml"))


def checkpoints() -> list[tuple[str, str]]:
    return [(name, key) for name in names() for key in model(name)[1]]
