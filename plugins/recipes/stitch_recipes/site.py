"""What a user sets: names, addresses and secrets. Everything else is the recipe's."""

from __future__ import annotations

import difflib
import json
import textwrap
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints, ValidationError

from stitch_core import plugins
from stitch_core.stores import GROUP

from .catalogue import read_toml
from .errors import RecipeError, describe
from .schema import Environment, Part

Label = Annotated[str, StringConstraints(pattern=r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$")]
Secret = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
# Whatever is rendered quotes them all the same. This is so that nobody need ask.
Word = Annotated[str, StringConstraints(pattern=r"""^[^\s\x00-\x1f\x7f"'`$\\]+$""")]
Directory = Annotated[str, StringConstraints(pattern=r"^/[A-Za-z0-9._/@+=,-]*[A-Za-z0-9._@+=,-]$")]
# It becomes an argument of ssh, which would take a leading dash for an option.
Host = Annotated[
    str, StringConstraints(pattern=r"^([A-Za-z_][A-Za-z0-9._-]*@)?[A-Za-z0-9][A-Za-z0-9.-]{0,252}$")
]
Selector = dict[
    Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,253}$")],
    Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{0,63}$")],
]
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20"]


BEGINNINGS = {"file": "file:/", "s3": "s3://", "modal": "modal://"}


def _store(url: str) -> str:
    scheme = url.partition(":")[0]
    begins = BEGINNINGS.get(scheme, f"{scheme}:")
    ours = scheme in plugins.names(GROUP) and scheme != "memory"  # which no other process sees
    if not ours or not url.startswith(begins) or url == begins:
        raise ValueError("no store's URL: file:/directory, s3://bucket/prefix or modal://volume/prefix")
    return url


class Site(Part):
    """Names of one user's cluster. Each has a default that says what to put there, or that works."""

    run: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")] = Field(
        "my-run", description="the run's id; a new one for each new run, the same to resume"
    )
    store: Annotated[Word, AfterValidator(_store)] = Field(
        "s3://my-bucket/stitch", description="the store's URL: file:, s3: or modal:"
    )
    name: Label = Field(
        "stitch", description="begins the names of apps, services and deployments; one for each run at a time"
    )
    secrets: list[Secret] = Field(
        [],
        description="names of secrets that hold the store's keys and tokens, such as HF_TOKEN, never their "
        "values: of Kubernetes or Modal; ssh: of files ~/.config/stitch/NAME.env on every host",
    )
    environment: Environment = Field(
        {}, description="variables of the trainer: what the recipe asks for, or what replaces its own"
    )
    package: Word = Field(
        "stitch-rl",
        description="what pip installs on the stock images: a release, git+https://..., or a file there; "
        "without a version (stitch-rl==...) what starts in the middle of a run may be newer than the rest",
    )
    trainer_image: Word | None = Field(
        None, description="an image that has Stitch, in place of the framework's own"
    )
    engine_image: Word | None = Field(None, description="an image that has Stitch, in place of SGLang's own")
    models: Directory = Field("/models", description="where checkpoints lie, the same on every host")
    data: Directory = Field("/data", description="where prompts lie, on the trainer's hosts")
    saves: Directory = Field(
        "/saves", description="where the trainer saves its checkpoints; shared by its hosts"
    )
    nvme: Directory = Field("/nvme", description="a fast local disk of every replica's host")

    hosts: list[Host] = Field([], description="ssh: user@host of each trainer node, the head first")
    replicas: list[Host] = Field(
        [], description="ssh: user@host of each replica; a host as often as it has room for one"
    )
    gateway: Host | None = Field(None, description="ssh: user@host of the gateway; else the trainer's head")
    ssh: list[str] = Field(
        SSH, min_length=1, description="ssh: what runs a line on a host; both are added to it"
    )
    directory: Directory = Field("/var/tmp/stitch", description="ssh: for scripts, logs and process ids")
    activate: Directory | None = Field(
        None, description="ssh: a file that every script reads first, such as an environment's bin/activate"
    )

    namespace: Label = Field("default", description="Kubernetes: for the commands that are printed")
    models_claim: Label = Field(
        "models",
        description="Kubernetes: the PersistentVolumeClaim of models, for many readers; Modal: the Volume",
    )
    data_claim: Label = Field("data", description="Kubernetes, Modal: of data")
    saves_claim: Label = Field("saves", description="Kubernetes, Modal: of saves, for many writers")
    store_claim: Label | None = Field(
        None, description="Kubernetes: of the directory of a file: store, for many writers"
    )
    nvme_class: Label | None = Field(
        None, description="Kubernetes: storage class of nvme; else the node's disk for containers"
    )
    trainer_nodes: Selector = Field({}, description="Kubernetes: node labels for the trainer")
    trainer_network: Selector = Field(
        {},
        description="Kubernetes: the network devices that each node of a trainer of several gets, so many of "
        "each, such as 8 of rdma/ib; without any, NCCL is left to the pods' own slower network",
    )
    engine_nodes: Selector = Field({}, description="Kubernetes: node labels for replicas")

    cloud: Word | None = Field(None, description="Modal: the cloud for GPUs")
    region: Word | None = Field(None, description="Modal: the region for GPUs")
    modal_proxy_secret: Secret | None = Field(
        None,
        description="Modal: a Secret with MODAL_PROXY_KEY and MODAL_PROXY_SECRET, the proxy auth token that "
        "gateways show; replicas are then reached by nobody without one (docs/modal.md)",
    )
    routing_region: Word = Field("us-east", description="Modal: where requests enter, near the trainer")


def read_site(path: Path | None) -> Site:
    """The site in a TOML file, the defaults without one. Raises RecipeError with file and field."""
    if path is None:
        return Site.model_validate({})
    try:
        return Site.model_validate(read_toml(path))
    except ValidationError as error:
        raise RecipeError(describe(str(path), error, _hint)) from error


def _hint(name: str) -> str:
    """What a field is for, or the nearest to one that there is not."""
    if (field := Site.model_fields.get(name)) is not None:
        return f"; {name} is {field.description}"
    near = difflib.get_close_matches(name, Site.model_fields, n=1)
    return f"; did you mean {near[0]}?" if near else "; stitch recipe site prints all that there are"


def template() -> str:
    """A ``site.toml`` to fill in: every field with what it is for, at its default."""
    text = "# Names, addresses and secrets of one cluster; all that a recipe does not know.\n"
    for name, field in Site.model_fields.items():
        words = textwrap.wrap(field.description or "", 100)
        text += "\n" + "".join(f"# {line}\n" for line in words)
        default = field.get_default(call_default_factory=True)
        text += f'# {name} = "..."\n' if default is None else f"{name} = {_toml(default)}\n"
    return text


def _toml(value: Any) -> str:
    """Strings, lists and tables of them: JSON's strings are TOML's."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in value.items()) + " }"
    return json.dumps(value)
