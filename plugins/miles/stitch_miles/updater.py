"""The weight updater for releases of Miles that write no deltas: their gather, Stitch's encoder."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from stitch_core.manifest import Manifest
from stitch_core.safetensors import Tensor
from stitch_core.trainers.hooks import trainer
from stitch_core.trainers.own_delta import OwnDelta, check_policy
from stitch_core.trainers.torch_bytes import as_tensor

from .symbols import MIXIN

logger = logging.getLogger("stitch")
OUTPUT = "lm_head.weight"


def updater_class() -> type:
    """The updater, on the installed Miles' own gather."""
    import torch
    import torch.distributed
    from miles.backends.training_utils.parallel import get_parallel_state
    from miles.utils.distributed_utils import get_gloo_group

    from stitch_core.trainers.signatures import resolve

    mixin: Any = resolve(MIXIN)

    class StitchDeltaUpdater(mixin):
        """Publishes the policy at every ``update_weights``; collective. Never talks to an engine."""

        def __init__(
            self, args: Any, model: Any, weights_getter: Any, *, model_name: str, quantization_config: Any,
            is_lora: bool = False,
        ) -> None:  # fmt: skip
            if is_lora:
                raise NotImplementedError("LoRA adapters are not published: train the full weights")
            self.args, self.model, self.model_name = args, model, model_name
            self.quantization_config = quantization_config
            self.weight_version = 0
            self._group_name = "stitch"
            self._delta: OwnDelta | None = None
            self._began: dict[int | None, float] = {}

        def connect_rollout_engines(self, rollout_engines: Any, rollout_engine_lock: Any, **_: Any) -> None:
            """Replicas follow the store; there is nothing to connect."""
            self.rollout_engines = rollout_engines

        def disconnect_rollout_engines(self) -> None:
            pass

        @property
        def _is_source(self) -> bool:
            state = get_parallel_state()
            return bool(state.intra_dp_cp.rank == 0 and state.tp.rank == 0)

        def update_weights(self) -> None:
            """Gather, encode, publish. The first are the weights that the trainer starts with."""
            here = trainer()
            self._began[here.step] = time.monotonic()
            with torch.no_grad():
                tensors = self._gather()
            if self._delta is None:
                check_policy(here.group, here.settings.boot, here.files, tensors)
                here.begin()
                self._delta = OwnDelta(here.publisher, here.files)
                here.publisher.on_published = self._timed(here.publisher.on_published)
            self.weight_version = self._delta.publish(tensors, step=here.step, wait=here.ends)

        def _timed(self, published: Callable[[Manifest], None]) -> Callable[[Manifest], None]:
            """Also says how long it took: with ``stitch_async`` longer than ``update_weights`` does."""

            def timed(manifest: Manifest) -> None:
                published(manifest)
                began = self._began.pop(manifest.step, None)
                if began is not None:
                    seconds = time.monotonic() - began
                    logger.info("version %d took %.3f s from gather to head", manifest.number, seconds)

            return timed

        def _gather(self) -> dict[str, Tensor]:
            tensors: dict[str, Tensor] = {}
            tied = not self.args.untie_embeddings_and_output_weights

            def keep(bucket: list[tuple[str, Any]], pbar: Any = None) -> None:
                # Where embeddings are tied, a pipeline's last stage has a copy that a checkpoint lacks.
                kept = ((name, value) for name, value in bucket if not (tied and name == OUTPUT))
                tensors.update((name, as_tensor(value)) for name, value in kept)

            self._gather_and_update_non_expert_weights(keep, None)
            torch.distributed.barrier(group=get_gloo_group())
            self._gather_and_update_expert_weights(keep, None)
            torch.distributed.barrier(group=get_gloo_group())
            return tensors

    return StitchDeltaUpdater
