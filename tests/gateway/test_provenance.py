"""The provenance log: a line for every answer, whatever became of it, and questions to many of them."""

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from stitch_core.cli import provenance as command
from stitch_core.provenance import Lines, entries, staleness
from stitch_gateway import provenance
from stitch_gateway.provenance import ProvenanceLog, Trace
from tests.gateway.fleet import Fleet, RawReplica, chunked
from tests.replica.scripted import generated, span


def lines(directory: Path) -> list[dict[str, Any]]:
    return list(Lines([directory]))


async def logged(fleet: Fleet, directory: Path, count: int) -> list[dict[str, Any]]:
    await fleet.until(lambda: len(lines(directory)) >= count)
    return lines(directory)


async def test_an_answer_has_its_line(fleet: Fleet, tmp_path: Path) -> None:
    server = fleet.add(8)
    server.engine.body = generated(span("r/weight_v000008", 0, 3))
    await fleet.start(run="r", provenance=tmp_path)
    headers = {"X-Stitch-Session": "game-17", "X-Stitch-Consumer": "eval"}
    before = time.time()
    assert (await fleet.post({"text": "secret words", "rid": "mine"}, headers=headers))[0] == 200
    (line,) = await logged(fleet, tmp_path, 1)
    assert before <= line["time"] <= time.time()
    wanted = {
        "run": "r", "session": "game-17", "consumer": "eval", "id": "mine", "replica": server.id,
        "route": "/generate", "admitted": 8, "outcome": "whole", "start": 8, "end": 8, "oldest": 8,
        "spans": [[8, 0, 3]], "tokens": 3,
    }  # fmt: skip
    assert {key: line.get(key) for key in wanted} == wanted
    assert "secret" not in json.dumps(line)


async def test_refusals_have_none_and_metrics_count(fleet: Fleet, tmp_path: Path) -> None:
    fleet.add(8)
    await fleet.start(run="r", provenance=tmp_path, hold=0.05)
    assert (await fleet.post({"text": "x", "weight_version": {"exact_version": 99}}))[0] in (409, 410)
    assert (await fleet.post({"text": "x"}))[0] == 200
    assert len(await logged(fleet, tmp_path, 1)) == 1
    async with fleet.session.get(fleet.url + "/metrics") as answer:
        assert 'stitch_gateway_provenance_answers_total{outcome="written"} 1' in await answer.text()


FINAL = {
    "text": "x", "meta_info": {
        "id": "own", "finish_reason": {"type": "stop"}, "run": "r", "weight_version": "7",
        "weight_version_start": 7, "weight_version_end": 8, "kv": "mixed",
        "weight_versions": [{"version": 7, "start": 0, "end": 2}, {"version": 8, "start": 2, "end": 5}],
    },
}  # fmt: skip


def event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


def stream(*values: Any, done: bool = True) -> bytes:
    events = [event(json.dumps(value) if not isinstance(value, str) else value) for value in values]
    return b"".join(events) + (event("[DONE]") if done else b"")


@pytest.mark.parametrize("end", ["whole", "cut", "unreported"])
async def test_streams(fleet: Fleet, tmp_path: Path, end: str) -> None:
    first = stream({"text": "x", "meta_info": {"id": "own"}}, done=False)
    last = b"" if end == "unreported" else stream(FINAL)
    answer = chunked(first, last) if last else chunked(first)
    if end != "cut":
        answer += b"0\r\n\r\n"
    async with RawReplica(answer).running() as raw:
        await fleet.start(raw.url, run="r", provenance=tmp_path, until_ready=1)
        async with fleet.session.post(fleet.url + "/generate", json={"text": "x", "stream": True}) as got:
            await got.read()
        (line,) = await logged(fleet, tmp_path, 1)
        await fleet.stack.aclose()  # before the replica that it asks again and again
    assert line["outcome"] == end
    if end == "unreported":
        assert (line["admitted"], "spans" in line) == (7, False)
    else:
        assert (line["spans"], line["tokens"], line["oldest"]) == ([[7, 0, 2], [8, 2, 5]], 5, 7)


async def test_a_client_that_leaves_has_a_line_too(fleet: Fleet, tmp_path: Path) -> None:
    first = stream({"text": "x", "meta_info": {"id": "own"}}, done=False)

    class Stalls(RawReplica):
        async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                reader.feed_data(head)
            writer.write(chunked(first) if head.startswith(b"POST") else b"")
            if head.startswith(b"GET"):
                await super()._serve(reader, writer)
                return
            await reader.read()
            writer.close()

    async with Stalls(b"").running() as raw:
        await fleet.start(raw.url, run="r", provenance=tmp_path, until_ready=1)
        got = await fleet.session.post(fleet.url + "/generate", json={"text": "x", "stream": True})
        await got.content.readany()
        got.close()
        (line,) = await logged(fleet, tmp_path, 1)
        await fleet.stack.aclose()
    assert (line["outcome"], line["admitted"]) == ("left", 7)


def test_openai_answers_batches_and_copies() -> None:
    meta = {
        "run": "r", "weight_version": "7", "weight_version_start": 7, "weight_version_end": 8,
        "weight_versions": [[{"version": 7, "start": 0, "end": 9}], [{"version": 8, "start": 0, "end": 4}]],
    }  # fmt: skip
    found = list(entries({"id": "a", "metadata": meta}))
    assert [(e["index"], e["start"], e["end"], e["tokens"]) for e in found] == [(0, 7, 7, 9), (1, 8, 8, 4)]
    batch = list(entries([FINAL, {**FINAL, "index": 5}]))
    assert [entry["index"] for entry in batch] == [0, 5]
    assert list(entries({"choices": []})) == list(entries("x")) == list(entries(None)) == []


def trace(log: ProvenanceLog, **fields: Any) -> Trace:
    return Trace(log, {"run": "r", "consumer": "rollout", "session": "s", "id": "x", "head": 9, **fields})


def test_files_are_begun_anew_and_the_oldest_go(tmp_path: Path) -> None:
    log = ProvenanceLog(tmp_path, file_bytes=600, keep=3)
    for number in range(30):
        trace(log, id=str(number)).end("whole", json.dumps(FINAL).encode())
    log.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3
    assert all(0 < path.stat().st_size <= 600 for path in files)
    assert log.written == 30
    own = json.dumps(FINAL).encode()
    again = ProvenanceLog(tmp_path, file_bytes=600, keep=3)
    trace(again).end("whole", own)
    again.close()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_disk_that_is_slow_or_full_costs_lines_not_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "MOST_WAITING_BYTES", 1000)
    log = ProvenanceLog(tmp_path)
    monkeypatch.setattr(log, "_write", lambda _: time.sleep(0.05))
    for _ in range(8):
        trace(log).end("whole", b"x" * 400)
    assert log.dropped >= 4

    def full(_: bytes) -> None:
        raise OSError("no room")

    monkeypatch.setattr(log, "_write", full)
    dropped = log.dropped
    trace(log).end("whole", b"")
    log.close()
    assert log.dropped > dropped


def options(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"session": None, "request": None, "staleness": False, "json": True, **given})


async def test_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def line(**fields: Any) -> str:
        base = {"time": 7200.0, "run": "r", "consumer": "rollout", "session": "s", "id": "a", "head": 9,
                "oldest": 9, "spans": [[9, 0, 4]], "tokens": 4}  # fmt: skip
        return json.dumps({**base, **fields}) + "\n"

    (tmp_path / "b.jsonl").write_text(
        line(time=7300.0, id="b", oldest=7, spans=[[7, 0, 2], [9, 2, 4]])
        + line(time="7300")
        + line(time=float("inf"))
        + line(time=10**400)
        + "[" * 100_000
        + "\n"
        + '{"time": 1, "torn'
    )
    (tmp_path / "a.jsonl").write_text(
        line() + line(id="c", session="other", head=None) + line(time=11000.0, consumer="eval", oldest=4)
    )
    assert await command.run(options(paths=[tmp_path], session="s")) == 0
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert answer["versions"] == {"r": [7, 9]}
    assert [found["id"] for found in answer["answers"]] == ["a", "b", "a"]
    assert said.err == "5 lines cannot be read\n"
    assert await command.run(options(paths=[tmp_path], request="c")) == 0
    assert json.loads(capsys.readouterr().out)["answers"][0]["session"] == "other"
    assert await command.run(options(paths=[tmp_path], session="nobody")) == 1
    capsys.readouterr()
    assert await command.run(options(paths=[tmp_path], staleness=True)) == 0
    hours = json.loads(capsys.readouterr().out)["hours"]
    assert [(h["hour"], h["consumer"], h["answers"], h["max"], h["unknown"]) for h in hours] == [
        (7200, "rollout", 3, 2, 1), (10800, "eval", 1, 5, 0),
    ]  # fmt: skip
    assert hours[0]["mean"] == 1.0
    assert await command.run(options(paths=[tmp_path], staleness=True, json=False)) == 0
    assert "1970-01-01 02:00" in capsys.readouterr().out
    assert await command.run(options(paths=[tmp_path], session="s", json=False)) == 0
    assert "7[0:2] 9[2:4]" in capsys.readouterr().out
    assert staleness([]) == {}
