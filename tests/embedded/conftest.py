"""Fixtures of the embedded engine's tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def no_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines start without checking themselves, which is most of the time that a tiny one takes."""
    monkeypatch.setattr("stitch_embedded.engine.self_check", lambda *_, **__: None)
