"""Ids at engines carry run and consumer, so that a trainer's abort-all ends its own requests alone."""

from typing import Any

import pytest

from stitch_core.versions import VersionError, request_scope
from tests.replica.scripted import Replica

pytestmark = pytest.mark.virtual_time

MINE = {"weight_version": {"run": "r"}, "text": "hi"}
HEADERS = {"x-stitch-consumer": "rollout"}


@pytest.mark.parametrize(
    ("body", "headers", "seen", "answered"),
    [
        ({**MINE, "rid": "a"}, HEADERS, "r~rollout~a~", "a"),
        ({"text": "hi", "rid": "a"}, {**HEADERS, "x-stitch-run": "r"}, "r~rollout~a~", "a"),
        ({"text": "hi", "rid": "a"}, HEADERS, "~rollout~a~", "a"),
        ({**MINE, "rid": "a"}, {}, "r~~a~", "a"),
        ({"text": "hi", "rid": "a~b%"}, {}, "~~a%7Eb%25~", "a~b%"),
    ],
)
async def test_engine_id(body: dict[str, Any], headers: dict[str, str], seen: str, answered: str) -> None:
    replica = Replica()
    replica.engine.body["meta_info"]["id"] = seen
    call = await replica.client.post("/generate", body, headers=headers)
    assert call.json()["meta_info"]["id"] == answered
    assert replica.engine.seen["rid"] == seen
    assert "x-stitch-consumer" not in replica.engine.headers


async def test_an_id_of_our_own_has_the_scope_too() -> None:
    replica = Replica()
    await replica.client.post("/generate", MINE, headers=HEADERS)
    assert replica.engine.seen["rid"].startswith("r~rollout~")


async def test_an_abort_by_scope_needs_nothing_of_the_engine() -> None:
    replica = Replica()
    replica.engine.hang.clear()
    asked = replica.client.start("POST", "/generate", {**MINE, "rid": "a"}, headers=HEADERS)
    await replica.engine.called.wait()
    for scope, aborted in (("r~eval~", []), ("s~rollout~", []), ("r~rollout~", ["r~rollout~a~"])):
        answer = await replica.client.post("/abort_request", {"rid": scope})
        assert (answer.status, answer.json()) == (200, {"requests": len(aborted)})
        assert replica.aborted == aborted
    await asked.finished()


@pytest.mark.parametrize("consumer", ["", "a~b", "a b", ".a", None, 7])
def test_names_that_cannot_be_consumers(consumer: object) -> None:
    with pytest.raises(VersionError):
        request_scope("r", consumer)


async def test_C13_a_consumer_that_cannot_be_is_refused() -> None:
    replica = Replica()
    call = await replica.client.post("/generate", MINE, headers={"x-stitch-consumer": "a~b"})
    assert (call.status, replica.engine.path) == (400, "")
