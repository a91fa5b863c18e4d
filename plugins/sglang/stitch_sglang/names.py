"""Request ids: copies of a request (n > 1) keep its id in front, so that an abort by that id reaches them.

SGLang gives copies ids of their own, and drops an abort of an id that it does not know.
"""

from __future__ import annotations

from typing import Any


def around_regenerate_rid(original: Any, request: Any) -> Any:
    """GenerateReqInput.regenerate_rid: the old id, and SGLang's new one behind it."""
    before = request.rid
    after = original(request)
    if isinstance(before, str) and isinstance(after, str):
        request.rid = before + after
    return request.rid


def around_abort_request(original: Any, manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """TokenizerManager.abort_request: the request of that id, else its copies, whose ids begin so.

    No other's does: see stitch_core.request_ids.
    """
    if abort_all or not rid or rid in manager.rid_to_state:
        original(manager, rid=rid, abort_all=abort_all)
        return
    for one in [known for known in manager.rid_to_state if known.startswith(rid)]:
        original(manager, rid=one)
