"""Ids of copies, and aborts by the beginning of an id."""

from __future__ import annotations

from typing import Any

from stitch_sglang.names import around_abort_request, around_regenerate_rid


class Request:
    rid: Any = "mine~"

    def regenerate(self) -> Any:
        self.rid = ["x", "y"] if isinstance(self.rid, list) else "new"
        return self.rid


class Manager:
    def __init__(self, *known: str) -> None:
        self.rid_to_state = dict.fromkeys(known)
        self.aborted: list[tuple[str, bool]] = []

    def abort(self, rid: str = "", abort_all: bool = False) -> None:
        self.aborted.append((rid, abort_all))


def aborted(manager: Manager, **arguments: Any) -> list[tuple[str, bool]]:
    around_abort_request(Manager.abort, manager, **arguments)
    return manager.aborted


def test_a_copy_keeps_the_id_in_front() -> None:
    request = Request()
    assert around_regenerate_rid(Request.regenerate, request) == request.rid == "mine~new"
    request.rid = ["a", "b"]
    assert around_regenerate_rid(Request.regenerate, request) == ["x", "y"]


def test_a_known_id_is_that_request_alone() -> None:
    assert aborted(Manager("a~", "a~1"), rid="a~") == [("a~", False)]


def test_an_unknown_id_is_all_that_begin_so() -> None:
    assert aborted(Manager("a~1", "a~2", "b~1"), rid="a~") == [("a~1", False), ("a~2", False)]
    assert aborted(Manager("b~1"), rid="a~") == []


def test_abort_all_passes() -> None:
    assert aborted(Manager("a~1"), abort_all=True) == [("", True)]
    assert aborted(Manager("a~1"), rid="") == [("", False)]
