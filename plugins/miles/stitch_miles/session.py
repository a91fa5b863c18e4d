"""``--session-sample-postprocessor-path stitch_miles.session.postprocess``, with ``--use-session-server v2``.

An agent's model calls go through Miles' session server, a process of its own, which makes samples of them
and keeps of each answer only its oldest version. The flag above has this module loaded there. Miles notes the
times of every call beside its tokens and merges the notes call by call; the answer's report goes along with
them, so that a sample has the reports of exactly the calls that are in it, whatever was cut, retried or
branched off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from miles.rollout.session.samples import merge
from miles.rollout.session.v2.postprocessor_hub import default_postprocess

from stitch_core.trainers.rollout import SESSION, read_report
from stitch_core.trainers.signatures import probe, require

from .symbols import SESSION_SERVER

NOTES, OURS = "lifecycle", "stitch"


def postprocess(leaf_samples: list[Any], session_metadata: dict[str, Any]) -> list[Any]:
    """Miles' own, then ``metadata["stitch"]``: one report for each model call in a sample, in order.

    A call without a report has its fields as None; who receives the samples refuses it. A post-processor of
    a user's own ends with this one.
    """
    told = [_take(sample) for sample in leaf_samples]
    by_id = {id(sample): reports for sample, reports in zip(leaf_samples, told, strict=True)}
    samples = default_postprocess(leaf_samples, session_metadata)
    for sample in samples:
        # After Miles': what an agent calls "stitch" must not stand for what made its tokens.
        sample.metadata = {**sample.metadata, OURS: by_id[id(sample)]}
    return samples


def _take(sample: Any) -> list[dict[str, Any]]:
    notes = (sample.metadata or {}).get(NOTES, [])
    listed = notes if isinstance(notes, list) else [notes]
    return [note.pop(OURS) for note in listed if OURS in note]


def _install() -> None:
    """Once in a process; Miles' module holds the function by name."""
    require("stitch_miles.session", probe(SESSION_SERVER))
    stock: Callable[..., None] = merge.attach_lifecycle_metadata
    if hasattr(stock, "stitch_wraps"):
        return

    @functools.wraps(stock)
    def noting(sample: Any, record: Any, *args: Any, **kwargs: Any) -> None:
        stock(sample, record, *args, **kwargs)
        sample.metadata[NOTES][OURS] = read_report(record.response) | {"source": SESSION}

    noting.stitch_wraps = stock  # type: ignore[attr-defined]
    merge.attach_lifecycle_metadata = noting


_install()
