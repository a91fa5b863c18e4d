"""Truth: what the live scheduler reported is what the replay recomputes, to the bit, whatever happened in
between.
"""

from __future__ import annotations

import random

import pytest
import torch

from stitch_embedded.config import ModelConfig
from stitch_embedded.replay import Replayer, ReplayError, Trajectory
from stitch_embedded.report import version_fields
from stitch_embedded.sampling import SamplingParams
from stitch_embedded.scheduler import Outcome, Request, Scheduler
from tests.embedded.models import config_json, live, nudged, random_tensors

MAX_LEN = 40


class Life:
    """A scheduler driven at random: requests, pauses in both modes, activations, aborts; every outcome is
    kept.
    """

    def __init__(self, seed: int, *, kind: str, dtype: torch.dtype, modes: tuple[str, ...]) -> None:
        self.rng = random.Random(seed)
        self.config = ModelConfig.from_dict(config_json(kind))
        self.versions = [("v0", random_tensors(self.config, seed, dtype))]
        self.modes = modes
        self.scheduler = Scheduler(
            live(self.config, self.versions[0][1]), "v0", max_len=MAX_LEN, max_running=12, prefill_rows=9
        )
        self.done: list[tuple[Request, Outcome]] = []

    def run(self, requests: int) -> None:
        added = 0
        while added < requests or not self.scheduler.idle:
            dice = self.rng.random()
            if added < requests and dice < 0.3:
                added += self.add(min(self.rng.choice((1, 2, 8)), requests - added))
            elif dice < 0.45:
                self.activate()
            elif dice < 0.48 and self.scheduler.running:
                self.scheduler.abort({self.rng.choice(self.scheduler.running)}.__contains__)
            else:
                self.scheduler.step()
            self.done += [(e.request, e.outcome) for e in self.scheduler.take_events() if e.outcome]

    def add(self, copies: int) -> int:
        prompt = [self.rng.randrange(37) for _ in range(self.rng.choice((1, 2, 5, 11, 25)))]
        params = SamplingParams(
            max_new_tokens=self.rng.randint(1, 14),
            temperature=self.rng.choice((1.0, 1.0, 0.7, 0.0)),
            top_p=self.rng.choice((1.0, 0.8)),
        )
        for copy in range(copies):
            self.scheduler.add(Request(f"r_{copy}", prompt, params, self.rng.getrandbits(64), frozenset({2})))
        return copies

    def activate(self) -> None:
        for _ in range(self.rng.choice((1, 1, 2))):
            self.scheduler.pause(self.rng.choice(self.modes))
        if self.rng.random() < 0.8:
            label = f"v{len(self.versions)}"
            tensors = nudged(self.versions[-1][1], len(self.versions))
            self.versions.append((label, tensors))
            self.scheduler.activate(tensors, label)
        self.scheduler.resume()

    def trajectories(self) -> list[Trajectory]:
        """As a client would have them: through the fields of the response."""
        out = []
        for request, o in self.done:
            fields = version_fields(len(request.prompt), len(o.tokens), o.passes, o.label)
            if set(self.modes) == {"in_place"}:
                assert "kv_passes" not in fields
            out.append(Trajectory.of(request.prompt, o.tokens, fields, request.params.temperature))
        return out


MODES = [("in_place",), ("retract",), ("in_place", "retract")]


@pytest.mark.parametrize("modes", MODES, ids=["in_place", "retract", "both"])
@pytest.mark.parametrize(("kind", "dtype"), [("qwen3", torch.bfloat16), ("qwen2", torch.float32)])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_replay_equals_life(modes: tuple[str, ...], kind: str, dtype: torch.dtype, seed: int) -> None:
    life = Life(seed, kind=kind, dtype=dtype, modes=modes)
    life.run(60)
    trajectories = life.trajectories()
    spanning = sum(len(o.spans(len(r.prompt))) > 1 for r, o in life.done)
    assert spanning > 10
    replayer = Replayer(life.config, MAX_LEN, dtype=dtype, rows_per_call=64)
    got = replayer.replay(life.versions, trajectories)
    assert got == [o.logprobs for _, o in life.done]


def test_no_other_labels_fit() -> None:
    """The same trajectories under shifted labels give other bits."""
    life = Life(5, kind="qwen3", dtype=torch.bfloat16, modes=("in_place", "retract"))
    life.run(60)
    names = [label for label, _ in life.versions]
    claimed = [t for t in life.trajectories() if t.tokens and names[-1] not in t.versions()]
    shifted = [t.relabelled(lambda v: names[names.index(v) + 1]) for t in claimed]
    replayer = Replayer(life.config, MAX_LEN)
    right, wrong = replayer.replay(life.versions, claimed), replayer.replay(life.versions, shifted)
    assert len(claimed) > 30
    assert sum(a != b for a, b in zip(right, wrong, strict=True)) >= 0.95 * len(claimed)


def test_call_size_does_not_matter() -> None:
    life = Life(6, kind="qwen3", dtype=torch.bfloat16, modes=("in_place",))
    life.run(30)
    expected = [o.logprobs for _, o in life.done]
    for rows in (4, 7, 300):
        replayer = Replayer(life.config, MAX_LEN, rows_per_call=rows)
        assert replayer.replay(iter(life.versions), life.trajectories()) == expected


def test_what_cannot_be_replayed() -> None:
    life = Life(7, kind="qwen3", dtype=torch.bfloat16, modes=("in_place",))
    life.run(30)
    replayer = Replayer(life.config, MAX_LEN)
    with pytest.raises(ReplayError, match="was not given"):
        replayer.replay(life.versions[:1], life.trajectories())
    with pytest.raises(ReplayError, match="came before"):
        replayer.replay(reversed(life.versions), life.trajectories())
    with pytest.raises(ReplayError, match="has no tensor"):
        replayer.replay([(label, {}) for label, _ in life.versions], life.trajectories())
    with pytest.raises(ReplayError, match="more than max_len"):
        Replayer(life.config, 8).replay(life.versions, life.trajectories())
    t = next(t for t in life.trajectories() if t.tokens)
    spans = [{"version": "v0", "start": 0, "end": len(t.tokens)}]
    fields = {"weight_versions": spans, "kv_versions": [], "kv": "uniform"}
    with pytest.raises(ValueError, match="covers"):
        Trajectory.of(t.prompt, [*t.tokens, 1], fields)
