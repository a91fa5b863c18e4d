"""What a rendered Modal app is made of: the arguments of its functions and servers.

The app itself defines them, since Modal imports it again in every container; ``run.yaml`` beside it has the
recipe and the site. Bounds and behaviour of the SDK: modal 1.6.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import modal
import yaml

from ..processes import GATEWAY_PORT, REPLICA_PORT
from ..schema import Recipe, Trainer
from ..site import Site
from .common import (
    DRAIN_SECONDS,
    PREPARE_SECONDS,
    PROFILE_SECONDS,
    READY_SECONDS,
    SERVICE_IMAGE,
    engine_image,
    engine_setup,
    needed,
    service_setup,
    trainer_image,
    trainer_setup,
)

RUN_FILE = "run.yaml"
STORE_MOUNT = "/stitch-store"
DAY = 86400
HOUR = 3600
GIB = 1024  # MiB
LEAST_MEMORY_MIB = 128  # what Modal asks for where nothing is said
LEAST_DISK_GIB, MOST_DISK_GIB = 512, 3072
RETRIES = modal.Retries(max_retries=10, backoff_coefficient=2.0, initial_delay=10.0, max_delay=60.0)
"""Of the trainer. A function ends after a day, too, and is tried again then."""

Arguments = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Deployment:
    """One run on Modal. ``here``: the directory of its app.py."""

    recipe: Recipe
    site: Site
    here: Path

    @classmethod
    def read(cls, app_file: str) -> Deployment:
        """That of a rendered app.py."""
        here = Path(app_file).resolve().parent
        document = yaml.safe_load((here / RUN_FILE).read_text("utf-8"))
        recipe, site = Recipe.model_validate(document["recipe"]), Site.model_validate(document["site"])
        return cls(recipe, site, here)

    @property
    def pool(self) -> str:
        """Where a gateway finds the replicas."""
        return f"modal_flash:{self.site.name}/Replica"

    @property
    def training(self) -> Trainer:
        """Raises ValueError for a recipe that only serves."""
        if self.recipe.trainer is None:
            raise ValueError(f"{self.recipe.name} only serves")
        return self.recipe.trainer

    def replicas(self) -> Arguments:
        """Of ``app.server``: a pool that Modal scales."""
        engine, fleet = self.recipe.engine, self.recipe.fleet
        return {
            "image": self._image(engine_image(self.recipe, self.site), engine_setup(self.site, "recipes")),
            "gpu": f"{engine.gpu}:{engine.gpus}",
            "memory": (engine.memory_request_gib * GIB, engine.memory_limit_gib * GIB),
            "ephemeral_disk": _disk(engine.disk_gib),
            "volumes": {self.site.models: self.models, **self._store},
            "secrets": self._secrets,
            "cloud": self.site.cloud,
            "compute_region": self.site.region,
            "routing_region": self.site.routing_region,
            "port": REPLICA_PORT,
            # Gateways get in by the site's token; without one nothing could show them to Modal.
            "unauthenticated": self.site.modal_proxy_secret is None,
            "min_containers": needed(self.recipe),
            "max_containers": fleet.max_replicas,
            "target_concurrency": fleet.concurrency,
            "scaledown_window": 900,
            "startup_timeout": READY_SECONDS,
            "exit_grace_period": DRAIN_SECONDS,
        }

    def gateway(self) -> Arguments:
        """Of ``app.server``: for agents and evaluation; the trainer has one of its own."""
        return {
            **self._service(),
            "secrets": self._gateway_secrets,
            "cpu": 2.0,
            "memory": 4 * GIB,
            "routing_region": self.site.routing_region,
            "port": GATEWAY_PORT,
            "min_containers": self.recipe.fleet.gateways,
            "startup_timeout": 300,
            "exit_grace_period": DRAIN_SECONDS,
        }

    def trainer(self) -> Arguments:
        """Of ``app.function``. It may be started again at any time: it claims the run and resumes."""
        trainer = self.training
        return {
            "image": self._image(*self.preparing_image()),
            "secrets": self._gateway_secrets,  # one runs beside the trainer
            "gpu": f"{trainer.gpu}:{trainer.gpus_per_node}",
            "memory": _memory(trainer.memory_request_gib, trainer.memory_limit_gib),
            "ephemeral_disk": _disk(trainer.disk_gib),
            "volumes": {
                **self.prepared,
                self.site.saves: self.saved,
                **self._store,
            },
            "cloud": self.site.cloud,
            "region": self.site.region,
            "timeout": DAY,
            "startup_timeout": HOUR,
            "retries": RETRIES,
            "max_containers": trainer.nodes,
        }

    def clustered(self, function: T) -> T:
        """A trainer of several nodes, below ``app.function``; one of one node as it is."""
        return _clustered(function, self.training.nodes)

    def clustered_to_convert(self, function: T) -> T:
        """The same of a conversion."""
        return _clustered(function, self.training.conversion.nodes)

    def download(self) -> Arguments:
        """Of ``app.function``: prompts, and checkpoints from the hub."""
        return {**self._preparing(), "cpu": 8.0, "memory": 32 * GIB}

    def convert(self) -> Arguments:
        """Of ``app.function``: what no repository has, on one of the trainer's nodes."""
        trainer = self.training
        memory = _memory(trainer.memory_request_gib, trainer.memory_limit_gib)
        return {
            **self._preparing(),
            "gpu": f"{trainer.gpu}:{trainer.gpus_per_node}",
            "memory": memory,
            "ephemeral_disk": _disk(trainer.disk_gib),
        }

    def service(self) -> Arguments:
        """Of ``app.function``: Stitch's own commands."""
        volumes = {self.site.models: self.models, **self._store}
        return {
            **self._service(),
            "cpu": 2.0,
            "memory": 8 * GIB,
            "volumes": volumes,
            "timeout": READY_SECONDS + HOUR,
        }

    def saves(self) -> Arguments:
        """Of ``app.function``: what removes old checkpoints, of which each trainer node has a part."""
        return {**self._service(), "volumes": {self.site.saves: self.saved}, "timeout": HOUR}

    def ready(self) -> Arguments:
        """Of ``app.function``: the gate before training, which asks a gateway of its own."""
        return {**self.service(), "secrets": self._gateway_secrets}

    def profile(self) -> Arguments:
        """Of ``app.function``: one update of a replica of its own, which has all that the pool's have."""
        replica = self.replicas()
        same = ("image", "gpu", "memory", "ephemeral_disk", "cloud")
        return {
            **{name: replica[name] for name in same},
            "region": self.site.region,
            "volumes": {self.site.models: self.models},
            "timeout": PROFILE_SECONDS,
            "startup_timeout": HOUR,
            "single_use_containers": True,
        }

    def _preparing(self) -> Arguments:
        return {
            "image": self._image(*self.preparing_image()),
            "secrets": self._secrets,
            "volumes": self.prepared,
            "timeout": PREPARE_SECONDS,
            "retries": modal.Retries(max_retries=2),
        }

    def preparing_image(self) -> tuple[str, list[str]]:
        """Tag and setup of an image that can download: the trainer's, or the engine's where none trains."""
        if self.recipe.trainer is None:
            return engine_image(self.recipe, self.site), engine_setup(self.site, "recipes")
        setup = trainer_setup(self.training, self.site, "recipes", "gateway", "cli", "modal")
        return trainer_image(self.training, self.site), setup

    def _service(self) -> Arguments:
        image = self._image(SERVICE_IMAGE, service_setup(self.site, "recipes", "modal"))
        return {"image": image, "secrets": self._secrets, "volumes": self._store}

    def _image(self, tag: str, setup: list[str]) -> modal.Image:
        image = modal.Image.from_registry(tag).entrypoint([])
        if setup:
            image = image.run_commands(*setup)
        mounted = {"STITCH_MODAL_MOUNT": STORE_MOUNT} if self._store else {}
        # Last, so that another site is no new image.
        return image.env(mounted).add_local_file(str(self.here / RUN_FILE), f"/root/{RUN_FILE}")

    @property
    def _secrets(self) -> list[modal.Secret]:
        return [modal.Secret.from_name(name) for name in self.site.secrets]

    @property
    def _gateway_secrets(self) -> list[modal.Secret]:
        """Of what runs a gateway over the pool: nothing else needs the way in."""
        name = self.site.modal_proxy_secret
        return [*self._secrets, *([modal.Secret.from_name(name)] if name else [])]

    @property
    def models(self) -> modal.Volume:
        """Apart from the store's: engines keep files of it open, which would bar a reload."""
        return _volume(self.site.models_claim)

    @property
    def saved(self) -> modal.Volume:
        """Of the trainer's checkpoints."""
        return _volume(self.site.saves_claim)

    @property
    def prepared(self) -> dict[str, modal.Volume]:
        """Where preparing writes, by place: checkpoints, and for a trainer prompts."""
        data = {self.site.data: _volume(self.site.data_claim)} if self.recipe.trainer else {}
        return {self.site.models: self.models, **data}

    @property
    def _store(self) -> dict[str, modal.Volume]:
        """The whole Volume of a modal: store, so that its prefix means the same everywhere; docs/modal.md."""
        url = urlsplit(self.site.store)
        if url.scheme != "modal":
            return {}
        environment = parse_qs(url.query).get("environment", [None])[0]
        return {STORE_MOUNT: modal.Volume.from_name(url.netloc, environment_name=environment)}


def _clustered(function: T, nodes: int) -> T:
    return modal.clustered(size=nodes, rdma=True)(function) if nodes > 1 else function


def _volume(name: str) -> modal.Volume:
    return modal.Volume.from_name(name, create_if_missing=True, version=2)


def _memory(request: int | None, limit: int | None) -> int | tuple[int, int] | None:
    """In MiB, of GiB."""
    asked = LEAST_MEMORY_MIB if request is None else request * GIB
    if limit is None:
        return None if request is None else asked
    return asked, limit * GIB


def _disk(gib: int | None) -> int | None:
    """In MiB; what every container has anyway need not be asked for."""
    return None if gib is None or gib < LEAST_DISK_GIB else min(gib, MOST_DISK_GIB) * GIB
