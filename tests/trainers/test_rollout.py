"""Promise 1 at the rollout: every request carries its demand, every sample what made it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stitch_core.trainers.rollout import (
    SESSION,
    Demand,
    Unattributed,
    attributed,
    current_episode,
    from_session,
    install,
    read_report,
    record,
    record_session,
)
from stitch_core.trainers.rollout_side import one_episode, recording
from stitch_core.trainers.settings import TrainerSettings

URL = "http://gw:1/generate"


class Framework:
    """A package with a post of its own, another module that imported it, and a generate function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[tuple[str, Any, Any]] = []
        self.versions = (7, 8)
        self.run = "r"
        self.http, self.user = ModuleType("fakefw.http"), ModuleType("fakefw.rollout")
        self.http.post = self.user.post = self._post  # type: ignore[attr-defined]
        for module in (ModuleType("fakefw"), self.http, self.user):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    async def _post(self, url: str, payload: Any, max_retries: int = 60, headers: Any = None) -> Any:
        self.requests.append((url, payload, headers))
        start, end = self.versions
        return {
            "meta_info": {
                "run": self.run, "weight_version": str(start), "weight_version_start": start,
                "weight_version_end": end, "weight_versions": [{"version": start, "start": 0, "end": 3}],
            }
        }  # fmt: skip

    async def generate(self, args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        answer = await self.user.post(URL, {"text": "2+2="}, headers={"X-Own": "1"})
        sample.weight_versions.append(answer["meta_info"]["weight_version"])
        sample.response_length = 3
        return sample


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> Framework:
    return Framework(monkeypatch)


def sample(**values: Any) -> SimpleNamespace:
    known: dict[str, Any] = {"metadata": {"label": 4}, "weight_versions": [], "group_index": 3, "index": 0}
    return SimpleNamespace(**(known | values))


def set_up(framework: Framework, head: int = 8, **settings: Any) -> None:
    found = TrainerSettings("r", "memory:", Path("/boot"), Path("/work"), **settings)
    install(Demand(found, lambda lag: head - lag), framework.http, "fakefw")


def test_a_request_carries_demand_session_and_consumer(framework: Framework) -> None:
    set_up(framework, lag=2)
    asyncio.run(recording(framework.generate)(None, sample(), {}))
    url, payload, headers = framework.requests[0]
    assert (url, payload["text"]) == (URL, "2+2=")
    assert payload["weight_version"] == {"min_version": 6, "run": "r"}
    assert headers == {
        "X-Stitch-Run": "r", "X-Stitch-Consumer": "rollout", "X-SMG-Routing-Key": "group-3", "X-Own": "1"
    }  # fmt: skip


def test_c11_a_sample_records_start_end_and_spans(framework: Framework) -> None:
    set_up(framework, lag=1)
    made = asyncio.run(recording(framework.generate)(None, sample(), {}))
    assert made.weight_versions == ["7", "8"]
    assert made.metadata["label"] == 4
    assert made.metadata["stitch"] == [
        {"run": "r", "start": 7, "end": 8, "spans": [{"version": 7, "start": 0, "end": 3}]}
    ]
    # A sample that was aborted and goes on adds to its record.
    framework.versions = (8, 8)
    made = asyncio.run(recording(framework.generate)(None, made, {}))
    assert [report["start"] for report in made.metadata["stitch"]] == [7, 8]
    assert attributed(made) is made


@pytest.mark.parametrize(
    ("versions", "run", "head", "message"),
    [
        ((7, 8), "r", 8, "the answer is of versions 7 to 8, demanded was {'min_version': 8, 'run': 'r'}"),
        ((8, 8), "other", 8, "the answer is of run other, demanded was run r"),
        ((None, 8), "r", 8, "does not say which versions made it: are rollout requests sent to the gateway"),
    ],
)
def test_an_answer_that_breaks_the_demand_is_not_trained_on(
    framework: Framework, versions: Any, run: str, head: int, message: str
) -> None:
    set_up(framework, head)
    framework.versions, framework.run = versions, run
    with pytest.raises(Unattributed) as caught:
        asyncio.run(recording(framework.generate)(None, sample(), {}))
    assert message in str(caught.value)


def test_other_requests_pass_as_they_are_and_an_explicit_demand_stays(framework: Framework) -> None:
    set_up(framework)
    post = framework.http.post
    asyncio.run(post("http://gw:1/abort_request", {"abort_all": True}))
    assert framework.requests.pop() == ("http://gw:1/abort_request", {"abort_all": True}, None)
    framework.versions = (5, 5)
    asyncio.run(post(URL, {"weight_version": {"exact_version": 5}}))
    assert framework.requests.pop()[1] == {"weight_version": {"exact_version": 5}}


def test_installing_again_wraps_once(framework: Framework) -> None:
    set_up(framework, 8)
    set_up(framework, 7)
    assert framework.http.post is framework.user.post
    asyncio.run(framework.http.post(URL, {}))
    assert len(framework.requests) == 1
    assert framework.requests[0][1]["weight_version"]["min_version"] == 7


def test_a_hook_in_the_same_task_finds_what_a_users_own_function_asked(framework: Framework) -> None:
    set_up(framework, lag=1)

    async def generate_then_hook() -> Any:
        made = await framework.generate(None, sample(), {})
        episode = current_episode()
        assert episode is not None
        record(made, episode)
        return made

    assert asyncio.run(generate_then_hook()).metadata["stitch"][0]["end"] == 8


def test_requests_of_tasks_that_a_users_function_starts_belong_to_all_of_its_samples(
    framework: Framework,
) -> None:
    set_up(framework)
    framework.versions = (8, 8)

    async def fan_out(args: Any, one: Any, sampling_params: Any, evaluation: bool = False) -> Any:
        made = [one, sample(index=1)]
        await asyncio.gather(*(framework.generate(args, each, {}) for each in made))
        for each in made:  # as the sample hook does, one by one
            episode = current_episode()
            assert episode is not None
            record(each, episode)
            record(each, episode)
        return made

    made = asyncio.run(one_episode(one_episode(fan_out))(None, sample(), {}, evaluation=True))
    assert [len(each.metadata["stitch"]) for each in made] == [2, 2]
    assert all(attributed(each) is each for each in made)
    assert framework.requests[0][2]["X-Stitch-Consumer"] == "eval"


def test_a_sample_that_asked_nothing_gets_no_record_of_another(framework: Framework) -> None:
    set_up(framework, lag=1)

    async def one_task() -> Any:
        first = await framework.generate(None, sample(), {})
        episode = current_episode()
        assert episode is not None
        record(first, episode)
        second = sample(index=1, response_length=3)
        record(second, episode)
        return second

    second = asyncio.run(one_task())
    with pytest.raises(Unattributed, match="sample 1 has a response and no version record"):
        attributed(second)
    with pytest.raises(Unattributed, match="sample 0 has a response and no version record"):
        attributed(sample(response_length=3))


def test_a_prompt_that_is_asked_again_has_no_record_of_the_answer_that_was_thrown_away(
    framework: Framework,
) -> None:
    """Both frameworks' ``reset_for_retry`` keep metadata."""
    set_up(framework, head=7)
    generate = recording(framework.generate)
    one = asyncio.run(generate(None, sample(), {}))
    one.response_length, one.weight_versions = 0, []
    framework.versions = (8, 9)
    again = asyncio.run(generate(None, one, {}))
    (report,) = again.metadata["stitch"]
    assert (report["start"], report["end"], again.metadata["label"]) == (8, 9, 4)


@pytest.mark.parametrize("said", ["an agent's own", ["7"], {"run": "r", "start": 7}, []])
def test_what_an_agent_calls_stitch_is_no_record(said: Any) -> None:
    """An agent's answer becomes metadata of its samples, under whatever names it likes."""
    agents = sample(metadata={"stitch": said}, response_length=3)
    assert not from_session(agents)
    with pytest.raises(Unattributed, match="sample 0 has a response and no version record"):
        attributed(agents)


def kept(start: int, end: int, run: str = "r") -> dict[str, Any]:
    """A session server's report of one model call."""
    spans = [{"version": start, "start": 0, "end": 3}]
    meta = {"run": run, "weight_version_start": start, "weight_version_end": end, "weight_versions": spans}
    return read_report({"choices": [], "metadata": meta}) | {"source": SESSION}


def test_c11_what_a_session_server_kept_is_an_agents_record() -> None:
    agents = sample(metadata={"stitch": [kept(7, 8), kept(8, 9)]}, weight_versions=["6", "8"])
    assert from_session(agents)
    record_session(agents, "r")
    # The first call's oldest version is that of keys and values that it was computed over.
    assert agents.weight_versions == ["6", "8", "7", "9"]
    assert attributed(agents) is agents
    assert not from_session(sample(metadata={"stitch": [{"run": "r", "start": 1, "end": 1}]}))
    assert not from_session(sample())


@pytest.mark.parametrize(
    ("reports", "oldest", "message"),
    [
        ([kept(7, 8), read_report({}) | {"source": SESSION}], ["7", "8"], "does not say which versions"),
        ([kept(7, 8), kept(7, 7, "other")], ["7", "7"], "is of run other, demanded was run r"),
        ([kept(7, 8), kept(8, 8)], ["7"], "has 2 model calls, and their oldest versions are ['7']"),
        ([kept(7, 8)], ["r/weight_v000007"], "do all replicas run this version of Stitch"),
        ([kept(7, 8)], [None], "do all replicas run this version of Stitch"),
    ],
)
def test_a_model_call_that_nobody_can_attribute_is_not_trained_on(
    reports: list[dict[str, Any]], oldest: list[Any], message: str
) -> None:
    """A label that is no number counts for nothing in Miles' staleness: the sample would pass as fresh."""
    with pytest.raises(Unattributed) as caught:
        record_session(sample(metadata={"stitch": reports}, weight_versions=oldest), "r")
    assert message in str(caught.value)
