"""These tests run in the environment of miles-rl (`make test` does); in others they are not collected."""

import importlib.util

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("miles") is None else []
