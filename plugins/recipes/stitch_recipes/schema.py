"""What a recipe says, as types. A recipe is one table of a file in ``recipes/models`` (see catalogue.py).

Sizes in GB are 10^9 bytes, in GiB 2^30. A fact that nobody has published is no number: the field is left out
and ``unknown`` says why. Where a number comes from is a comment beside it in the file.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from .layout.geometry import Geometry, Positive, Quantization

FlagValue = bool | int | float | str | list[str | int]
"""Of a flag: true is the bare flag, false leaves it out (and undoes a block's), a list is several values."""

Flags = dict[Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-zA-Z0-9_-]*$")], FlagValue]
"""Flags by name without the dashes."""

COMMIT = re.compile(r"[0-9a-f]{40}")
"""All of a commit's digits: a server gives none by a shorter name."""

Variable = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*$")]
Environment = dict[Variable, str]

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]{0,40}$")]


class Part(BaseModel):
    """Refuses fields that it does not know and values of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Source(Part):
    """Where a checkpoint's files come from."""

    repository: str = Field(description="on the Hugging Face hub, owner/name")
    revision: str | None = Field(None, description="the commit, 40 hex digits; None: see unknown")


class Prepared(Part):
    """How files are made that no repository has."""

    of: Name = Field(description="the checkpoint that it is converted from")
    command: str = Field(
        description="a shell command of the trainer's image; {source} and {target} are directories, of which "
        "{target} is not there yet, {miles} and {slime} where the image has the framework"
    )
    gpus: bool = Field(True, description="it computes on the GPUs of a trainer's node")


class Checkpoint(Part):
    """One representation of the model's weights, served or trained from."""

    source: Source | None = Field(None, description="where it is downloaded; this or prepared")
    prepared: Prepared | None = None
    quantization: Quantization = "bf16"
    canonical_gb: float | None = Field(None, description="bytes of its tensors")
    tensors: int | None = Field(None, description="how many")
    image_gb: float | None = Field(None, description="bytes of one rank's image at image_ranks")
    image_ranks: int | None = Field(None, description="tensor-parallel ranks that image_gb is for")
    not_quantized: list[str] = Field(
        [], description="regular expressions of modules that stay in BF16, beside those of the quantization"
    )
    group_size: Positive | None = Field(
        None, description="inputs that share a scale: of int4-packed; of fp8-block128, if not 128 by 128"
    )
    immutable: list[str] = Field([], description="prefixes of tensors that training never changes")
    bytes_checked: bool = Field(
        False, description="the layout gives canonical_gb to its last digit, and tensors where it is known"
    )


class Model(Part):
    """A model, whatever its representation."""

    title: str
    geometry: Geometry = Field(description="what its config.json says")
    unverified: list[str] = Field([], description="what in its layout is inferred, and from what")


class Conversion(Part):
    """How the trained checkpoint becomes Megatron's: the framework's tools/convert_hf_to_torch_dist.py."""

    nodes: Annotated[int, Field(ge=1)] = Field(
        1, description="of the trainer's; the model must fit on their GPUs"
    )
    flags: Flags = Field({}, description="parallel sizes; without any the tool splits layers over all ranks")
    environment: Environment = {}


class Data(Part):
    """A file that the trainer reads, below the site's directory of data."""

    what: str
    command: str | None = Field(
        None, description="a shell command of the trainer's image that writes {target}; None: a user makes it"
    )


class Trainer(Part):
    """The training side. Flags that Stitch needs are added by training.py and are not here."""

    framework: Literal["miles", "slime"]
    revision: str = Field(
        description="a commit of the framework's main branch, 40 hex digits, or a release of miles-rl"
    )
    script: Literal["train.py", "train_async.py"] = "train_async.py"
    model_script: str = Field(description="the framework's own Megatron arguments, scripts/models/<this>")
    checkpoint: Name = Field(description="the checkpoint that is trained from")
    gpu: str = Field(description="as Modal and Kubernetes labels name it, such as H200")
    nodes: Annotated[int, Field(ge=1)]
    gpus_per_node: Annotated[int, Field(ge=1, le=8)] = 8
    memory_request_gib: Annotated[int, Field(ge=1)] | None = None
    memory_limit_gib: Annotated[int, Field(ge=1)] | None = None
    disk_gib: Annotated[int, Field(ge=1)] | None = None
    conversion: Conversion = Conversion.model_validate({})
    flags: Flags = {}
    files: dict[str, dict[str, Any]] = Field(
        {}, description="flags whose value is a YAML file of this content"
    )
    functions: dict[Literal["generate", "rollout"], str] = Field(
        {}, description="the run's own functions, which Stitch's call (stitch_inner_generate, ..._rollout)"
    )
    environment: Environment = {}
    asks: dict[Variable, str] = Field(
        {}, description="variables that only a site can know, and what each says"
    )
    modules: list[str] = Field(
        [], description="directories of the framework's repository with modules that flags name"
    )
    data: dict[str, Data] = Field({}, description="by path, as flags name it after {data}/")


class Engine(Part):
    """One replica: a stock SGLang server with the plugin."""

    release: str = "0.5.23"
    gpu: str
    gpus: Annotated[int, Field(ge=1, le=8)] = Field(description="tensor-parallel ranks of one replica")
    flags: Flags = {}
    environment: Environment = {}
    destination: Literal["cpu", "disk", "auto"] = Field("auto", description="SGLANG_FORK.md, Destinations")
    canonical_on: Literal["memory", "nvme"] = Field("memory", description="where the host checkpoint lies")
    images: Literal[1, 2] = Field(1, description="images of a rank that memory is asked for")
    kv_mode: Literal["in_place", "retract"] = "in_place"
    memory_request_gib: Annotated[int, Field(ge=1)] = Field(
        description="what one replica certainly uses: canonical checkpoint and images, as far as they lie "
        "in memory, and the engine's own (footprint.py). With less it is evicted where a host is full; with "
        "more GPUs of a host stay without a replica, for memory that nobody uses"
    )
    memory_limit_gib: Annotated[int, Field(ge=1)] = Field(
        description="with room for a second image of each rank, loads and requests' own data"
    )
    disk_gib: Annotated[int, Field(ge=1)] = Field(
        description="a limit; requested is what the canonical checkpoint takes of it, if it lies there"
    )


class Fleet(Part):
    """How many replicas, and in front of them one gateway or several."""

    min_replicas: Annotated[int, Field(ge=0)]
    max_replicas: Annotated[int, Field(ge=1)] | None = None
    gateways: Annotated[int, Field(ge=1)] = 1
    concurrency: Annotated[int, Field(ge=1)] | None = Field(
        None, description="requests that one replica is given at once; what an autoscaler aims at"
    )


class Versions(Part):
    """How versions are made, kept and demanded. Settings of docs/trainers.md, intervals in versions."""

    encoding: Literal["xor", "sparse"] = "xor"
    publish_every: Annotated[int, Field(ge=1)] = Field(1, description="training steps")
    lag: Annotated[int, Field(ge=0)] = 1
    max_staleness: Annotated[int, Field(ge=1)] | None = None
    save_every: Annotated[int, Field(ge=1)] | None = Field(None, description="rollouts between checkpoints")
    keep_saves: Annotated[int, Field(ge=2)] | None = Field(
        None,
        description="checkpoints of the trainer that stay, the newest ones; two at least, since the newest "
        "may be torn; None: as many as reach back to the oldest version that a rollback can go to",
    )
    anchor_every: Annotated[int, Field(ge=1)] | None = None
    compact: bool = True
    prove: bool = False
    grace_hours: Annotated[float, Field(gt=0)] = Field(24.0, description="of the collector")
    step_seconds: Annotated[float, Field(gt=0)] | None = Field(
        None, description="published seconds of a training step, for what depends on it"
    )

    @property
    def kept_saves(self) -> int:
        """See ``keep_saves``: the collector keeps two anchors, a trainer resumes from a save before them."""
        if self.keep_saves is not None:
            return self.keep_saves
        if self.save_every is None or self.anchor_every is None:
            return 2
        return math.ceil(2 * self.anchor_every * self.publish_every / self.save_every) + 1


class Recipe(Part):
    """Everything that a run of one model needs, but for names and secrets (site.py)."""

    summary: str
    name: str = Field(description="<file>/<table>, filled in by the catalogue")
    model: Model
    checkpoints: dict[Name, Checkpoint]
    serve: Name = Field(description="the checkpoint that replicas boot from: version 0 of the run")
    trainer: Trainer | None = Field(None, description="none for a recipe that only serves")
    engine: Engine
    fleet: Fleet
    versions: Versions
    delta_density: dict[Literal["quantized", "high_precision"], float] = Field(
        {},
        description="changed elements of a version, as fractions: the public table's synthetic deltas",
    )
    unknown: dict[str, str] = Field({}, description="by path, such as checkpoints.fp8.image_gb: why")
    notes: list[str] = []

    @property
    def served(self) -> Checkpoint:
        """The checkpoint that replicas boot from."""
        return self.checkpoints[self.serve]
