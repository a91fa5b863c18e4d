"""No test leaves a thread: what it opened is closed, and what is closed has none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from stitch_core.trainers import data
from stitch_core.trainers.head_reader import HeadReader
from stitch_core.trainers.own_delta import OwnDelta
from stitch_core.trainers.publication import GroupPublisher

OPENED = (OwnDelta, GroupPublisher, HeadReader)
"""What has threads, in the order of closing: OwnDelta may have a publish under way."""


def left() -> set[str]:
    """Threads of trainers. Those of a local store that a test opened to look end with the store."""
    names = {thread.name for thread in threading.enumerate()}
    return {name for name in names if name.startswith(("stitch-publish", "stitch-behind", "stitch-head"))}


@pytest.fixture(autouse=True)
def no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    opened: dict[type, list[Any]] = {kind: [] for kind in OPENED}

    def recorded(kind: type) -> Any:
        made = kind.__init__

        def __init__(self: Any, *args: Any, **named: Any) -> None:
            made(self, *args, **named)
            opened[kind].append(self)

        return __init__

    for kind in OPENED:
        monkeypatch.setattr(kind, "__init__", recorded(kind))
    assert not left(), "of a test before this one"
    yield
    for kind in OPENED:
        for one in opened[kind]:
            one.close()
            one.close()
    data._head_reader.cache_clear()
    assert not left()
