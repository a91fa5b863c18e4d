"""What a user sets: names, addresses and secrets. Everything else is the recipe's."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, ValidationError

from .errors import RecipeError, describe
from .schema import Part

Label = Annotated[str, StringConstraints(pattern=r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$")]


class Site(Part):
    """Names of one user's cluster. Each has a default that says what to put there, or that works."""

    run: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")] = Field(
        "my-run", description="the run's id; a new one for each new run, the same to resume"
    )
    store: str = Field("s3://my-bucket/stitch", description="the store's URL: file:, s3: or modal:")
    name: Label = Field("stitch", description="begins the names of apps, services and deployments")
    namespace: Label = Field("default", description="of Kubernetes")
    trainer_image: str | None = Field(None, description="in place of the framework's own image")
    engine_image: str | None = Field(None, description="in place of SGLang's own image")
    package: str = Field("stitch-rl", description="what pip installs on both images")
    models: str = Field("/models", description="where checkpoints lie, the same on every host")
    data: str = Field("/data", description="where prompts lie, on the trainer's hosts")
    saves: str = Field("/saves", description="where the trainer saves its checkpoints; shared by its hosts")
    nvme: str = Field("/nvme", description="a fast local disk of every replica's host")
    secrets: list[str] = Field(
        [], description="names of secrets that hold the store's keys and tokens, never their values"
    )
    hosts: list[str] = Field([], description="ssh: user@host of each trainer node, the head first")
    replicas: list[str] = Field([], description="ssh: user@host of each replica")
    gateway: str | None = Field(None, description="ssh: user@host of the gateway; else the trainer's head")


def read_site(path: Path | None) -> Site:
    """The site in a TOML file, the defaults without one. Raises RecipeError with file and field."""
    if path is None:
        return Site.model_validate({})
    try:
        return Site.model_validate(tomllib.loads(path.read_text("utf-8")))
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"{path}: {error}") from error
    except ValidationError as error:
        raise RecipeError(describe(str(path), error)) from error
