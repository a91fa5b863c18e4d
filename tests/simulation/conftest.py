"""What every simulated world keeps to."""

import threading

import pytest


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler of the machine decides when a thread runs, so a seed with threads is not one world."""

    def refuse(thread: threading.Thread) -> None:
        raise AssertionError(f"a simulated world started a thread: {thread.name}")

    monkeypatch.setattr(threading.Thread, "start", refuse)
