"""Whether `stitch profile` has tried this model with this release and these flags; what it found."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stitch_core.files import PosixFiles
from stitch_core.profile_record import NAME, Record, RecordError, Setup, read_records

from .settings import Settings
from .symbols import RELEASE

logger = logging.getLogger(__name__)

FLAGS = (
    "device", "dtype", "quantization", "kv_cache_dtype", "json_model_override_args", "tp_size", "dp_size",
    "ep_size", "enable_dp_attention", "enable_dp_lm_head", "moe_dense_tp_size", "attention_backend",
    "prefill_attention_backend", "decode_attention_backend", "linear_attn_backend", "mamba_backend",
    "fp8_gemm_runner_backend", "fp4_gemm_runner_backend", "bf16_gemm_backend", "moe_runner_backend",
    "moe_a2a_backend", "disable_cuda_graph", "disable_decode_cuda_graph", "disable_prefill_cuda_graph",
    "enable_torch_compile", "enable_deterministic_inference", "speculative_algorithm", "enable_lora",
)  # fmt: skip
"""Those of SGLang's that choose what a forward pass computes with, and so what it may keep of weights."""

VARIABLES = ("SGLANG_OPT_", "SGLANG_USE_", "SGLANG_EXTERNAL_MODEL_PACKAGE")


class Profiled:
    """What the record says of this replica. The boot checkpoint's state comes when it is known."""

    def __init__(self, settings: Settings, server_args: Any, boot: Path) -> None:
        self._path = settings.profile or boot / NAME
        self._flags = flags_of(settings, server_args, os.environ)
        self._boot: str | None = None
        self._found: list[Record] = []
        self._problem: str | None = None

    def boots(self, state: str) -> None:
        """``state`` of the boot checkpoint. Reads the record; says in the log what it has."""
        if self._boot == state:
            return
        self._boot = state
        self.look()
        logger.warning("stitch: %s", self.said()["why"])

    def look(self) -> None:
        """Read the record anew."""
        setup = self._setup()
        if setup is None:
            return
        try:
            records = read_records(self._path, PosixFiles())
        except (RecordError, OSError) as error:
            self._found, self._problem = [], str(error)
        else:
            self._found, self._problem = [one for one in records if one.setup == setup], None

    def said(self) -> dict[str, Any]:
        """``profiled``: true, false where a profile failed, null where there is none."""
        failed = [f"{one.path}: {name}" for one in self._found for name in one.failed]
        if failed:
            why = f"stitch profile failed with this model, release and flags ({'; '.join(failed)})"
        elif self._found:
            why = f"stitch profile has passed by way of {', '.join(one.path for one in self._found)}"
        elif self._boot is None:
            why = "the boot checkpoint is not known yet"
        else:
            why = self._problem or (
                f"{self._path} has no record of this model, release and flags: run stitch profile"
            )
        return {"profiled": None if not self._found else not failed, "why": why}

    def status(self) -> dict[str, Any]:
        """The same with the setup, as ``stitch profile`` takes it into its record."""
        setup = self._setup()
        shown = None if setup is None else {"boot": setup.boot, "engine": setup.engine, "flags": setup.flags}
        return {**self.said(), "record": str(self._path), "setup": shown}

    def _setup(self) -> Setup | None:
        return None if self._boot is None else Setup(self._boot, f"sglang {RELEASE}", self._flags)


def flags_of(settings: Settings, server_args: Any, environ: Mapping[str, str]) -> dict[str, Any]:
    """What matters of SGLang's flags, its variables and ours, as it is after JSON."""
    flags = {name: getattr(server_args, name, None) for name in FLAGS}
    plain = {k: v if isinstance(v, bool | int | float | str | None) else str(v) for k, v in flags.items()}
    variables = {name: value for name, value in environ.items() if name.startswith(VARIABLES)}
    return {
        **plain, **dict(sorted(variables.items())), "stitch_destination": settings.destination,
        "stitch_constants": ":".join(settings.constants),
    }  # fmt: skip
