"""Everything of SGLang that the plugin touches, by name and signature, and the check that it is still so.

SGLang logs a hook that it cannot apply and starts without it, which would be a replica that says nothing true
about versions. So the plugin checks first, and ends the process.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

RELEASE = "0.5.23"


class Changed(Exception):
    """A symbol that is not there, or not as the plugin knows it; the message names it."""


@dataclass(frozen=True)
class Symbol:
    """``parameters``: the names of a callable's parameters or of a struct's fields that are relied on.

    With ``exact`` there may be no others without a default.
    """

    target: str
    parameters: tuple[str, ...] = ()
    exact: bool = True


SRT = "sglang.srt"
SCHEDULER = f"{SRT}.managers.scheduler.Scheduler"
MANAGER = f"{SRT}.managers.tokenizer_manager.TokenizerManager"
LOADER = f"{SRT}.model_loader.loader.DefaultModelLoader"
IO = f"{SRT}.managers.io_struct"

ADD_FLAGS = Symbol(f"{SRT}.server_args.ServerArgs.add_cli_args", ("parser",))
PARSED = Symbol(f"{SRT}.server_args.ServerArgs.from_cli_args", ("args",))
LAUNCH = Symbol(
    f"{SRT}.entrypoints.engine.Engine._launch_subprocesses",
    (
        "server_args",
        "init_tokenizer_manager_func",
        "run_scheduler_process_func",
        "run_detokenizer_process_func",
    ),
)
SERVE = Symbol(
    f"{SRT}.entrypoints.http_server._setup_and_run_http_server",
    (
        "server_args",
        "tokenizer_manager",
        "template_manager",
        "port_args",
        "scheduler_infos",
        "subprocess_watchdog",
    ),
)
GENERATE = Symbol(f"{MANAGER}.generate_request", ("self", "obj"))
ABORT = Symbol(f"{MANAGER}.abort_request", ("self", "rid", "abort_all"))
RENAME = Symbol(f"{IO}.GenerateReqInput.regenerate_rid", ("self",))
DISPATCHER = Symbol(f"{SCHEDULER}.init_request_dispatcher", ("self",))
CAPTURE = Symbol(
    f"{SRT}.model_executor.model_runner.ModelRunner.init_cuda_graphs", ("self", "capture_decode_cuda_graph")
)
TAKE = Symbol(f"{SCHEDULER}.handle_generate_request", ("self", "recv_req"))

HOOKED = (ADD_FLAGS, PARSED, LAUNCH, SERVE, GENERATE, ABORT, RENAME, DISPATCHER, CAPTURE, TAKE)

USED = (
    Symbol(f"{IO}.hook_custom_types", ("new_types",)),
    Symbol(f"{IO}.PauseGenerationReqInput", ("mode",), exact=False),
    Symbol(f"{IO}.ContinueGenerationReqInput", ("torch_empty_cache",), exact=False),
    Symbol(f"{IO}.UpdateWeightFromDiskReqInput", ("model_path", "load_format", "flush_cache"), exact=False),
    Symbol(
        f"{IO}.GenerateReqInput",
        ("rid", "extra_key", "input_ids", "sampling_params", "return_logprob", "logprob_start_len"),
        exact=False,
    ),
    Symbol(f"{SRT}.managers.tokenizer_control_mixin._COMMUNICATOR_SPECS"),
    Symbol(f"{SRT}.managers.communicator.FanOutCommunicator.__call__", ("self", "obj")),
    Symbol("sglang.utils.TypeBasedDispatcher.__iadd__", ("self", "other")),
    Symbol(f"{SCHEDULER}.pause_generation", ("self", "recv_req")),
    Symbol(f"{SCHEDULER}.continue_generation", ("self", "recv_req")),
    Symbol(f"{SCHEDULER}.record_weight_version_change", ("self", "new_version")),
    Symbol(f"{SCHEDULER}.collect_inflight_reqs", ("self",)),
    Symbol(
        f"{SRT}.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        ".update_weights_from_disk",
        ("self", "recv_req"),
    ),
    Symbol(f"{LOADER}.restore_weights_before_loading", ("model", "target_device")),
    Symbol(f"{LOADER}.load_weights_only", ("model", "weights", "target_device")),
    Symbol(f"{LOADER}.postprocess_weights", ("model", "target_device")),
    Symbol(
        f"{SRT}.model_executor.model_runner_components.weight_updater._unsupported_derived_weight_cache_error",
        ("model",),
    ),
    Symbol(
        f"{SRT}.utils.weight_versions.compute_weight_version_spans",
        ("events", "current_version", "num_output_tokens"),
    ),
    Symbol(f"{SRT}.utils.weight_versions.WeightVersionEvent", ("old_version", "num_output_tokens")),
    Symbol(f"{SRT}.environ.envs.SGLANG_WARMUP_TIMEOUT"),
    Symbol(f"{SRT}.runtime_context.get_serving"),
    Symbol(f"{SRT}.runtime_context.get_parallel"),
    Symbol(f"{MANAGER}.auto_create_handle_loop", ("self",)),
    Symbol(f"{MANAGER}.config_value", ("self", "name")),
    Symbol(f"{MANAGER}._update_weight_version_if_provided", ("self", "weight_version")),
    Symbol(f"{SRT}.server_args.ServerArgs.resolved_dict", ("self",)),
    Symbol("sglang.version.__version__"),
    Symbol(f"{SRT}.managers.tokenizer_manager.ServerStatus"),
    Symbol(f"{SRT}.entrypoints.http_server.app"),
    Symbol(f"{SRT}.utils.auth.auth_level", ("level",)),
    Symbol(f"{SRT}.utils.common.kill_process_tree", ("parent_pid",)),
)


def check(symbols: Iterable[Symbol] = (*HOOKED, *USED)) -> None:
    """Raises Changed for the first symbol that is not as it should be."""
    for symbol in symbols:
        try:
            found = pkgutil.resolve_name(symbol.target)
        except (ImportError, AttributeError) as error:
            raise Changed(f"{symbol.target} is not there: {error}") from error
        if symbol.parameters:
            _check_parameters(symbol, found)


def _check_parameters(symbol: Symbol, found: Any) -> None:
    names = getattr(found, "__struct_fields__", None)
    required = set()
    if names is None:
        try:
            parameters = inspect.signature(found).parameters
        except (TypeError, ValueError) as error:
            raise Changed(f"{symbol.target} has no signature: {error}") from error
        names = tuple(parameters)
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        required = {
            name for name, one in parameters.items()
            if one.default is inspect.Parameter.empty and one.kind not in variadic
        }  # fmt: skip
    missing = [name for name in symbol.parameters if name not in names]
    extra = sorted(required - set(symbol.parameters)) if symbol.exact else []
    if missing or extra:
        raise Changed(
            f"{symbol.target} has changed: it has ({', '.join(names)}), "
            f"expected ({', '.join(symbol.parameters)})"
        )
