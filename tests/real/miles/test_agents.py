"""Agents with Miles' ``train_async.py --fully-async --use-session-server v2``, from STITCH_MILES' checkout.

Their model calls go through the session server, a process of its own, to the gateway. One run for the module,
killed and resumed.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.miles.processes import Child, World
from stitch_core.manifest import Manifest
from stitch_core.stores.local import LocalStore
from tests.real.miles.agents import gateway, template
from tests.small_run import chain_of

pytestmark = pytest.mark.real
CHECKOUT = os.environ.get("STITCH_MILES", "")
if not CHECKOUT:
    pytest.skip("platform: no checkout of Miles, set STITCH_MILES to one", allow_module_level=True)

ROLLOUTS, KILLED_AFTER, MOST_STALE, BATCH = 6, 3, 3, 4


def train(world: World, port: str) -> Child:
    driver = Path(__file__).with_name("checkout_driver.py")
    return world.start(
        "trainer", str(driver), str(world.root), port, str(ROLLOUTS), CHECKOUT, "fully-async",
        "--async-max-concurrent-samples", "8", "--async-unused-samples-handler", "retry",
        "--use-session-server", "v2", "--chat-template-path", str(template(world)),
        "--session-sample-postprocessor-path", "stitch_miles.session.postprocess",
        # Flags of the inner function, which the YAML names.
        "--custom-agent-function-path", "two_turns.run", "--max-seq-len", "120",
        "--custom-rm-path", "two_turns.reward",
    )  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("agents"))
    try:
        yield world
    finally:
        world.close()


@pytest.fixture(scope="module")
def trained(world: World) -> dict[int, list[dict[str, Any]]]:
    """The samples of every rollout."""
    world.settings(
        stitch_run="math", stitch_store=world.store, stitch_work=f"{world.root}/work",
        stitch_channel="latest", stitch_lag=1, stitch_max_staleness=MOST_STALE,
        stitch_inner_generate="miles.rollout.generate_hub.agentic_tool_call.generate",
    )  # fmt: skip
    port = gateway(world).url().rpartition(":")[2]
    world.replica("a", "--engine-opt=pace=0.05")
    world.replica("b", "--engine-opt=pace=0.05", kv_mode="retract")
    first = train(world, port)
    first.until(lambda text: f"[disk delta v={KILLED_AFTER + 2}]" in text, "some versions")
    first.kill()
    second = train(world, port)
    assert second.wait() == 0, second.text()[-6000:]
    paths = {n: world.root / f"samples_{n}.pt" for n in range(ROLLOUTS)}
    return {n: torch.load(path, weights_only=False)["samples"] for n, path in paths.items()}


def test_every_token_of_an_agents_sample_has_its_version(trained: dict[int, list[dict[str, Any]]]) -> None:
    """Call by call, in order: spans over what the policy wrote, and nothing over what the agent wrote."""
    turns, versions = [], []
    for sample in (sample for group in trained.values() for sample in group):
        reports = sample["metadata"]["stitch"]
        turns.append(len(reports))
        for report in reports:
            spans = report["spans"]
            assert (report["run"], report["source"]) == ("math", "session")
            assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
            assert (report["start"], report["end"]) == (spans[0]["version"], spans[-1]["version"])
        assert sum(report["spans"][-1]["end"] for report in reports) == sum(sample["loss_mask"])
        bounds = {str(report[end]) for report in reports for end in ("start", "end")}
        assert bounds == set(sample["weight_versions"])
        versions.append(len(bounds))
        assert all("stitch" not in note for note in listed(sample["metadata"]["lifecycle"]))
    assert max(turns) == 2
    assert max(versions) > 1


def listed(notes: Any) -> list[dict[str, Any]]:
    return notes if isinstance(notes, list) else [notes]


def test_their_staleness_is_bounded(world: World, trained: dict[int, list[dict[str, Any]]]) -> None:
    versions: list[Manifest] = asyncio.run(chain_of(LocalStore(world.root / "store"), "math"))
    made = {m.step: m.number for m in versions if m.step is not None}
    behind = [
        made[rollout] - 1 - min(map(int, sample["weight_versions"]))
        for rollout, group in trained.items()
        for sample in group
        if rollout in made  # not if it was killed between checkpoint and publishing
    ]
    assert len(behind) >= (ROLLOUTS - 1) * BATCH
    assert max(behind) <= MOST_STALE
    assert {m.epoch for m in versions} == {1, 2}


GROUPS = """
import asyncio
import sys
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
from miles.rollout.fully_async_data_buffer import DataBufferConstructorInput, DataBufferInput
from miles.utils.types import Sample
from stitch_core.trainers.rollout import Unattributed
from stitch_miles.buffer import StitchDataBuffer

args = SimpleNamespace(
    stitch_run="r", stitch_store="file:/store", stitch_boot="/boot", rollout_batch_size=4,
    max_weight_staleness=None, async_data_buffer_capacity_factor=2.0, dynamic_sampling_filter_path=None,
    stitch_max_staleness=2,
)
unused = []
buffer = StitchDataBuffer(DataBufferConstructorInput(args, unused.append))

def made(index, versions, status=Sample.Status.COMPLETED, recorded=True):
    reports = [{"run": "r", "start": int(v), "end": int(v), "source": "session"} for v in versions]
    sample = Sample(index=index, weight_versions=versions, status=status, response_length=len(versions))
    sample.metadata = {"stitch": reports} if recorded else {"stitch": "an agent's own"}
    return sample

async def main():
    async def put(name, *trajectories):
        try:
            await buffer.put(DataBufferInput(prompt_group=name, group=[list(one) for one in trajectories]))
        except Unattributed as error:
            print(error)
    # One trajectory's second branch is old, its first and the other trajectory are not.
    await put("stale", [made(0, ["7"]), made(0, ["7", "4"])], [made(1, ["7"])])
    await put("gave up", [made(2, [], Sample.Status.ABORTED)], [made(3, ["7"])])
    await put("cut off", [made(4, ["7"], Sample.Status.ABORTED)])
    await put("unknown", [made(5, ["7"], recorded=False)])
    await put("fresh", [made(6, ["6", "7"])], [made(7, ["5"])])
    print((await buffer.get(current_version=7)).prompt_group, unused)

asyncio.run(main())
"""


def test_the_buffer_counts_every_branch_and_hands_back_what_was_given_up() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", GROUPS, CHECKOUT], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    refused, taken = done.stdout.splitlines()[-2:]
    assert "sample 5 has a response and no version record" in refused
    assert taken == "fresh ['gave up', 'cut off', 'stale']"
