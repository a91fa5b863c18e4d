"""The control messages that the plugin adds between SGLang's HTTP process and its schedulers.

Imported only where the plugin is active; SGLang's messages are msgspec structs.
"""

# No postponed annotations: msgspec reads them when the class is made.

from typing import Any, Optional

from sglang.srt.managers.io_struct import BaseReq, hook_custom_types

DONE = "done"
REFUSED = "refused"
UNCERTAIN = "uncertain"

ACTIVATING = "stitch_activate"
STAGING = "stitch_stage"


class StitchActivateReqInput(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """Pause in ``mode``, load, label, go on.

    What is loaded: the stage ``staged`` from the ranks' images, else ``model_path`` from disk, else nothing:
    the weights are the same.
    """

    label: str
    mode: str
    model_path: Optional[str] = None  # noqa: UP045
    load_format: Optional[str] = None  # noqa: UP045
    staged: Optional[str] = None  # noqa: UP045


class StitchActivateReqOutput(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """``outcome``: done; refused, with nothing changed; or uncertain, and then the engine stays paused."""

    outcome: str
    message: str = ""
    pause: float = 0.0  # seconds
    copy: float = 0.0  # seconds of them that the weights took
    bytes: int = 0  # copied, by the rank that copied most


class StitchStageReqInput(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """``action``: test and stage begin the stage ``id`` of ``path``; poll asks how it is; cancel ends it.

    ``state``: what ``path`` must turn out to hold ("": anything).
    """

    action: str
    id: str
    path: str = ""
    state: str = ""


class StitchStageReqOutput(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """``reports``: see RankStager.report, one for each rank."""

    id: str
    reports: list[dict[str, Any]]


def register() -> None:
    """Make the messages known to this process; the HTTP process also learns to await the answer."""
    from sglang.srt.managers import tokenizer_control_mixin

    hook_custom_types(
        StitchActivateReqInput, StitchActivateReqOutput, StitchStageReqInput, StitchStageReqOutput
    )
    for spec in ((ACTIVATING, StitchActivateReqOutput), (STAGING, StitchStageReqOutput)):
        if spec not in tokenizer_control_mixin._COMMUNICATOR_SPECS:
            tokenizer_control_mixin._COMMUNICATOR_SPECS.append(spec)
