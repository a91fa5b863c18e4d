"""The one control message that the plugin adds between SGLang's HTTP process and its schedulers.

Imported only where the plugin is active; SGLang's messages are msgspec structs.
"""

# No postponed annotations: msgspec reads them when the class is made.

from typing import Optional

from sglang.srt.managers.io_struct import BaseReq, hook_custom_types

DONE = "done"
REFUSED = "refused"
UNCERTAIN = "uncertain"

COMMUNICATOR = "stitch_activate"


class StitchActivateReqInput(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """Pause in ``mode``, load ``model_path`` (None: the weights are the same), label, go on."""

    label: str
    mode: str
    model_path: Optional[str] = None  # noqa: UP045
    load_format: Optional[str] = None  # noqa: UP045


class StitchActivateReqOutput(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """``outcome``: done; refused, with nothing changed; or uncertain, and then the engine stays paused."""

    outcome: str
    message: str = ""


def register() -> None:
    """Make the messages known to this process; the HTTP process also learns to await the answer."""
    from sglang.srt.managers import tokenizer_control_mixin

    hook_custom_types(StitchActivateReqInput, StitchActivateReqOutput)
    spec = (COMMUNICATOR, StitchActivateReqOutput)
    if spec not in tokenizer_control_mixin._COMMUNICATOR_SPECS:
        tokenizer_control_mixin._COMMUNICATOR_SPECS.append(spec)
