"""These tests run in the environment of stock SGLang (`make test` does); in others they are not collected."""

import importlib.util

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("sglang") is None else []
