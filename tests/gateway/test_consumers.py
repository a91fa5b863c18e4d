"""What named consumers demand: kept in the store, the same at every gateway, never made up."""

import asyncio
import json
import random
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from stitch_core.cli.main import main
from stitch_core.head import FormatError
from stitch_core.manifest import canonical_json
from stitch_core.ports import Blob, Unavailable
from stitch_core.stores.memory import MemoryStore
from stitch_gateway.consumer_rules import KEY, ConsumerRefused, Rule, change, decode, load
from tests.gateway.fleet import Fleet
from tests.gateway.trainer import RunStore

PROMPT = {"text": "hi"}
NONCES = count()


async def put(store: Any, name: str, rule: Rule | None) -> Rule | None:
    return await change(store, name, rule, rng=random.Random(0), nonce=lambda: f"n{next(NONCES)}")


async def ask(fleet: Fleet, consumer: str | None, run: str | None = None, **fields: Any) -> Any:
    """The version that answered, or the type of the refusal."""
    headers = {"X-Stitch-Consumer": consumer} if consumer else {}
    headers |= {"X-Stitch-Run": run} if run else {}
    status, value = await fleet.post({**PROMPT, **fields}, headers=headers)
    return value["meta_info"]["weight_version_start"] if status == 200 else value["error"]["type"]


async def seen(fleet: Fleet, consumers: int) -> None:
    view = fleet.gateway.consumers.view
    assert view is not None
    await fleet.until(lambda: view.error is None and len(view.rules) == consumers)


# --------------------------------------------------------------------------------------- the document


async def test_set_change_delete() -> None:
    store = MemoryStore()
    assert await load(store) == {}
    assert await put(store, "eval", Rule(exact=120)) is None
    assert await put(store, "train", Rule(lag=2, run="r")) is None
    assert await put(store, "eval", Rule(exact=121)) == Rule(exact=120)
    assert await load(store) == {"eval": Rule(exact=121), "train": Rule(lag=2, run="r")}
    assert await put(store, "eval", None) == Rule(exact=121)
    with pytest.raises(ConsumerRefused, match="no consumer eval"):
        await put(store, "eval", None)


async def test_changes_at_the_same_time_are_all_kept() -> None:
    store = MemoryStore()
    await asyncio.gather(*(put(store, f"c{i}", Rule(lag=i)) for i in range(4)))
    assert await load(store) == {f"c{i}": Rule(lag=i) for i in range(4)}


async def test_a_change_whose_outcome_is_unknown_is_settled_by_reading(monkeypatch: Any) -> None:
    store = MemoryStore()
    swap, calls = store.swap, []

    async def lost(key: str, tag: str | None, data: bytes) -> str:
        calls.append(data)
        tag_now = await swap(key, tag, data)
        if len(calls) == 1:
            raise Unavailable("no answer")
        return tag_now

    monkeypatch.setattr(store, "swap", lost)
    await put(store, "eval", Rule(exact=1))
    assert len(calls) == 1
    assert await load(store) == {"eval": Rule(exact=1)}


def document(**fields: Any) -> bytes:
    rule = {"exact": 1, "lag": None, "run": None, **fields}
    return canonical_json({"format": "stitch.consumers/1", "mover": "", "consumers": {"a": rule}})


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"\xff", b"[]", document()[:-1], document() + b"\n", document(exact=-1),
        document(exact="1"), document(lag=2), document(exact=None), document(run="a/b"), document(more=1),
        document().replace(b'"a"', b'"a~"'), document().replace(b"consumers/1", b"consumers/2"),
    ],
)  # fmt: skip
def test_C02_what_is_no_document_is_an_error(data: bytes) -> None:
    with pytest.raises(FormatError, match="consumers"):
        decode(data)


# ------------------------------------------------------------------------------------------ at gateways


async def test_every_gateway_gives_a_consumer_the_same(fleet: Fleet) -> None:
    fleet.add(7), fleet.add(8)
    store = RunStore()
    await store.publish(8)
    await put(store, "eval", Rule(exact=7))
    await put(store, "train", Rule(lag=0))
    second = Fleet()
    second.servers = fleet.servers
    for each in (fleet, second):
        await each.start(store=store, run="r", head_poll=0.02, hold=0.5)
    try:
        for each in (fleet, second):
            for _ in range(4):
                assert await ask(each, "eval") == 7
                assert await ask(each, "train") == 8
            assert {await ask(each, None) for _ in range(20)} == {7, 8}
            assert await ask(each, "eval", weight_version={"min_version": 8}) == 8  # what a request says
            assert await ask(each, "eval", run="s") == "WeightVersionNotReady"
        await put(store, "eval", Rule(exact=8))
        for each in (fleet, second):
            view = each.gateway.consumers.view
            await each.until(lambda view=view: view.rules["eval"].exact == 8)
            assert await ask(each, "eval") == 8
        await put(store, "eval", None)
        await seen(fleet, 1)
        assert {await ask(fleet, "eval") for _ in range(20)} == {7, 8}
        assert (await fleet.get("/status"))[1]["consumers"]["count"] == 1
    finally:
        await second.stack.aclose()


async def test_a_consumers_run_and_the_head_of_another_run(fleet: Fleet) -> None:
    fleet.add(7), fleet.add(3, "s")
    store = RunStore()
    await store.publish(7)
    head = (await store.load("runs/r/head")).data
    await store.replace("runs/s/head", head)
    await put(store, "other", Rule(exact=3, run="s"))
    await put(store, "behind", Rule(lag=4))
    await fleet.start(store=store, run="r", head_poll=0.02, hold=0.2)
    await seen(fleet, 2)
    assert await ask(fleet, "other") == 3
    assert await ask(fleet, "other", run="r") == 7  # the rule is of another run
    assert await ask(fleet, "behind", run="s") == 3
    await put(store, "behind", Rule(lag=3))
    await fleet.until(lambda: fleet.gateway.consumers.view.rules["behind"].lag == 3)
    assert await ask(fleet, "behind", run="s") == "WeightVersionNotReady"
    assert await ask(fleet, "behind") == 7


async def test_a_lag_behind_nobody_knows_whose_head(fleet: Fleet) -> None:
    fleet.add(7)
    store = RunStore()
    await put(store, "train", Rule(lag=1))
    await fleet.start(store=store, head_poll=0.02)
    assert await ask(fleet, "train") == "InvalidRequest"


async def test_the_store_says_more_than_an_option(fleet: Fleet) -> None:
    fleet.add(7)
    store = RunStore()
    await store.publish(8)
    await put(store, "rollout", Rule(lag=1))
    await fleet.start(store=store, run="r", head_poll=0.02, hold=0.2, lag=0)
    assert await ask(fleet, None) == 7


class AwayStore(RunStore):
    away = False

    async def load(self, key: str) -> Blob:
        if self.away and key == KEY:
            raise Unavailable("the store is away")
        return await super().load(key)


async def test_C02_C18_consumers_that_cannot_be_read(fleet: Fleet) -> None:
    """At the start nothing is made up; later the last good reading stands."""
    fleet.add(7)
    store = AwayStore()
    store.away = True
    await put_behind(store)
    await fleet.start(store=store, head_poll=0.02, hold=0.2)
    assert await ask(fleet, "eval") == "EngineUnavailable"
    assert await ask(fleet, "eval", weight_version={"min_version": 1}) == 7  # needs nothing of the store
    store.away = False
    assert await ask(fleet, "eval") == 7
    await store.replace(KEY, b"{")
    await fleet.until(lambda: fleet.gateway.consumers.view.error is not None)
    assert "FormatError" in (await fleet.get("/status"))[1]["consumers"]["error"]
    assert await ask(fleet, "eval") == 7


async def put_behind(store: AwayStore) -> None:
    store.away = False
    await put(store, "eval", Rule(exact=7))
    store.away = True


# --------------------------------------------------------------------------------------------- command


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code = main(["consumer", *words])
    out = capsys.readouterr().out
    return code, json.loads(out) if "--json" in words and out else out


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = ("--store", f"file:{tmp_path}")
    assert run(capsys, "set", *at, "eval", "--exact", "120") == (
        0, "consumer eval gets exactly version 120\n"
    )  # fmt: skip
    code, value = run(capsys, "set", *at, "train", "--lag", "2", "--run", "r", "--json")
    assert (code, value) == (
        0, {"consumer": "train", "exact": None, "lag": 2, "run": "r", "before": None}
    )  # fmt: skip
    code, value = run(capsys, "list", *at, "--json")
    assert [row["consumer"] for row in value] == ["eval", "train"]
    assert "lag 2" in run(capsys, "list", *at)[1]
    assert run(capsys, "delete", *at, "eval")[0] == 0
    assert run(capsys, "delete", *at, "eval")[0] == 2
    assert run(capsys, "set", *at, "a~b", "--lag", "0")[0] == 2


def test_an_empty_run_of_a_consumer_made_all_of_them_unreadable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--run "$RUN"``, with a variable that is not set."""
    at = ("--store", f"file:{tmp_path}")
    assert run(capsys, "set", *at, "eval", "--lag", "1")[0] == 0
    assert run(capsys, "set", *at, "train", "--lag", "2", "--run", "")[0] == 2
    assert [row["consumer"] for row in run(capsys, "list", *at, "--json")[1]] == ["eval"]


async def test_what_could_not_be_read_again_is_not_written() -> None:
    store = MemoryStore()
    for rule in (Rule(), Rule(exact=1, lag=1), Rule(exact=10**18), Rule(lag=1, run="")):
        with pytest.raises(FormatError):
            await change(store, "eval", rule, rng=random.Random(0), nonce=lambda: "n")
    assert store.state.objects == {}


@pytest.mark.parametrize("words", [[], ["--exact", "1", "--lag", "1"], ["--exact", "-1"], ["--lag", "x"]])
def test_command_usage(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["consumer", "set", "--store", f"file:{tmp_path}", "eval", *words])
