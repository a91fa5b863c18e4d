"""Continuous batching at its token boundaries: what a pause changes and what it must not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from stitch_embedded.config import ModelConfig
from stitch_embedded.report import Span, version_fields
from stitch_embedded.sampling import SamplingParams
from stitch_embedded.scheduler import Outcome, Request, Scheduler
from tests.embedded.models import config_json, live, nudged, random_tensors

CONFIG = ModelConfig.from_dict(config_json())
V0 = random_tensors(CONFIG, 0)
V1 = nudged(V0, 1)


def scheduler(**options: int) -> Scheduler:
    return Scheduler(
        live(CONFIG, V0), "v0", **{"max_len": 40, "max_running": 8, "prefill_rows": 16} | options
    )


def request(rid: str = "r", prompt: int = 6, new: int = 10, **options: object) -> Request:
    tokens = [(7 * i + len(rid)) % CONFIG.vocab for i in range(prompt)]
    return Request(rid, tokens, SamplingParams(max_new_tokens=new), seed=5, **options)  # type: ignore[arg-type]


def finish(s: Scheduler, each_step: Callable[[int], None] = lambda _: None) -> dict[str, Outcome]:
    out = {}
    for step in range(500):
        each_step(step)
        if s.idle:
            break
        s.step()
        out |= {e.request.rid: e.outcome for e in s.take_events() if e.outcome}
    return out | {e.request.rid: e.outcome for e in s.take_events() if e.outcome}


def alone(one: Request) -> Outcome:
    s = scheduler()
    s.add(one)
    return finish(s)[one.rid]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_without_activation_changes_nothing(mode: str) -> None:
    s = scheduler()
    for rid in ("a", "bb", "ccc"):
        s.add(request(rid))

    def pause(step: int) -> None:
        if step in (3, 4, 9):
            s.pause(mode)  # type: ignore[arg-type]
            s.resume()

    got = finish(s, pause)
    for rid in ("a", "bb", "ccc"):
        expected = alone(request(rid))
        assert (got[rid].tokens, got[rid].logprobs) == (expected.tokens, expected.logprobs)


def test_chunked_prefill_and_company_change_nothing() -> None:
    s = scheduler(prefill_rows=3, max_running=3)
    for i in range(7):
        s.add(request("x" * (i + 1), prompt=1 + 4 * i))
    got = finish(s)
    for i in range(7):
        expected = alone(request("x" * (i + 1), prompt=1 + 4 * i))
        assert got["x" * (i + 1)].logprobs == expected.logprobs


def test_paused_generates_nothing_and_takes_requests() -> None:
    s = scheduler()
    s.pause("in_place")
    s.add(request())
    assert not s.ready
    assert not s.idle
    s.resume()
    assert s.ready
    assert len(finish(s)["r"].tokens) == 10


def test_in_place_keeps_kv_and_labels_tokens() -> None:
    s = scheduler()
    s.add(request())

    def activate(step: int) -> None:
        if step == 4:
            s.pause("in_place")
            s.activate(V1, "v1")
            s.resume()

    out = finish(s, activate)["r"]
    assert out.spans(6) == (Span("v0", 0, 4), Span("v1", 4, 10))
    fields = version_fields(6, 10, out.passes, out.label)
    assert (fields["kv"], fields["kv_versions"]) == ("mixed", [{"version": "v0", "start": 0, "end": 5}])


def test_retract_recomputes_under_the_new_weights() -> None:
    s = scheduler()
    s.add(request())

    def activate(step: int) -> None:
        if step == 4:
            s.pause("retract")
            s.activate(V1, "v1")
            s.resume()

    out = finish(s, activate)["r"]
    fields = version_fields(6, 10, out.passes, out.label)
    assert out.spans(6) == (Span("v0", 0, 4), Span("v1", 4, 10))
    assert (fields["kv"], fields["kv_versions"]) == ("uniform", [{"version": "v1", "start": 0, "end": 5}])
    # exactly as if v1 had been given the whole prefix as its prompt
    fresh = Scheduler(live(CONFIG, V1), "v1", max_len=40)
    prefix = request().prompt + out.tokens[:4]
    scored = Request("s", prefix + out.tokens[4:], SamplingParams(max_new_tokens=0), prompt_logprobs_from=10)
    fresh.add(scored)
    assert finish(fresh)["s"].prompt_logprobs == out.logprobs[4:]


def test_activation_inside_a_prompt() -> None:
    s = scheduler(prefill_rows=4)
    s.add(request(prompt=10, new=3))

    def activate(step: int) -> None:
        if step == 2:
            s.activate(V1, "v1")

    out = finish(s, activate)["r"]
    fields = version_fields(10, 3, out.passes, out.label)
    assert fields["weight_versions"] == [{"version": "v1", "start": 0, "end": 3}]
    assert [s["version"] for s in fields["kv_versions"]] == ["v0", "v1"]
    assert fields["kv_versions"][0]["end"] == 8
    assert fields["kv"] == "mixed"


def test_abort_gives_what_there_is() -> None:
    s = scheduler(max_running=1)
    s.add(request("run"))
    s.add(request("wait"))
    for _ in range(3):
        s.step()
    assert s.abort(lambda r: True) == 2
    got = {e.request.rid: e.outcome for e in s.take_events() if e.outcome}
    assert got["run"].finish["type"] == "abort"
    assert len(got["run"].tokens) == 3
    assert got["wait"].tokens == []
    assert s.idle
    s.add(request("next"))
    assert finish(s)["next"].logprobs == alone(request("next")).logprobs


def test_abort_while_retracted_reports_what_computed_the_tokens() -> None:
    s = scheduler()
    s.add(request())
    for _ in range(3):
        s.step()
    s.pause("retract")
    s.activate(V1, "v1")
    s.abort(lambda r: True)
    out = s.take_events()[-1].outcome
    assert out is not None
    assert out.spans(6) == (Span("v0", 0, 3),)
    assert version_fields(6, 3, out.passes, out.label)["kv_versions"][0]["version"] == "v0"


def test_kv_never_crosses_requests() -> None:
    """Not even as a leftover that is not a number."""
    s = scheduler(max_running=1)
    bad = {name: torch.full_like(t, float("nan")) for name, t in V0.items()}
    s.activate(bad, "bad")
    s.add(request("poison", prompt=20))
    assert finish(s)["poison"].logprobs[0] != 0  # nan
    s.activate(V0, "v0")
    s.add(request("clean"))
    assert finish(s)["clean"].logprobs == alone(request("clean")).logprobs


def test_ends() -> None:
    free = alone(request())
    third = free.tokens[2]
    first = free.tokens.index(third)
    out = alone(request(stop_ids=frozenset({third})))
    assert out.finish == {"type": "stop", "matched": third}
    assert out.tokens == free.tokens[: first + 1]
    assert free.finish == {"type": "length", "length": 10}
    barred = Request(
        "r",
        request().prompt,
        SamplingParams(max_new_tokens=10, min_new_tokens=8),
        seed=5,
        stop_ids=frozenset(range(0, 37, 2)),
    )
    out = alone(barred)
    assert all(token % 2 for token in out.tokens[:8])
    text = request(stop_text=lambda tokens: "stop" if len(tokens) == 2 else None)
    assert alone(text).finish == {"type": "stop", "matched": "stop"}


def test_prompt_logprobs() -> None:
    generated = alone(request())
    prompt = request().prompt + generated.tokens
    scored = Request("r", prompt, SamplingParams(max_new_tokens=0), prompt_logprobs_from=0)
    out = alone(scored)
    assert out.tokens == []
    assert out.finish == {"type": "length", "length": 0}
    assert out.prompt_logprobs[5:] == generated.logprobs
    assert len(out.prompt_logprobs) == len(prompt) - 1
    fields = version_fields(len(prompt), 0, out.passes, out.label)
    assert fields["kv_versions"] == [{"version": "v0", "start": 0, "end": len(prompt) - 1}]
    chunked = scheduler(prefill_rows=3)
    chunked.add(Request("r", prompt, SamplingParams(max_new_tokens=0), prompt_logprobs_from=4))
    assert finish(chunked)["r"].prompt_logprobs == out.prompt_logprobs[3:]


def test_top_logprobs() -> None:
    out = alone(request(top_logprobs=3))
    assert [len(top) for top in out.tops] == [3] * 10
    for token, value, top in zip(out.tokens, out.logprobs, out.tops, strict=True):
        assert all(value <= v or (value, token) in top for v, _ in top)


def test_streams_get_every_token_once() -> None:
    s = scheduler()
    s.add(request(stream=True))
    tokens: list[int] = []
    while not s.idle:
        s.step()
        for event in s.take_events():
            tokens += event.tokens
            if event.outcome:
                assert event.outcome.tokens[:-1] == tokens
