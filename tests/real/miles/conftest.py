"""These tests run in the environment of miles-rl (`make test` does); in others they are not collected."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.miles.processes import World

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("miles") is None else []


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A store, a boot checkpoint and the processes of one run, ended in the end."""
    world = World(tmp_path)
    try:
        yield world
    finally:
        world.close()
