"""Miles' example agent for Harbor (examples/swe-agent-harbor-docker), with a connection for every agent.

    --custom-agent-function-path stitch_recipes.harbor.run

A trial is one request that lasts as long as the trial, and the example's client opens no more than its
transport's 100: the limits beside it are no limits of a transport that is given, and no setting raises them.
Agents that wait for a connection use up their AGENT_TRIAL_TIMEOUT. Only the trainer's processes can import
this, which have the example's directory and httpx.
"""

from __future__ import annotations

import importlib
from functools import partial
from types import SimpleNamespace

httpx = importlib.import_module("httpx")
example = importlib.import_module("swe_agent_function")

limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
wide = partial(httpx.AsyncHTTPTransport, limits=limits)
example.httpx = SimpleNamespace(**{**vars(httpx), "AsyncHTTPTransport": wide})  # type: ignore[attr-defined]

run = example.run
abort = example.abort
"""Miles looks for it beside ``run``."""
