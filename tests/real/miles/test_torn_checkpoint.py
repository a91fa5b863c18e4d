"""A trainer that was killed between a model's checkpoint and Miles' note of how far its prompts are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.miles.processes import ROOT, World
from stitch_core.policy_publisher import PolicyPublisher

pytestmark = pytest.mark.real

SOURCE = """
import json
import sys
from argparse import Namespace
from stitch_miles.data import StitchDataSource

root = sys.argv[1]
args = Namespace(
    rollout_global_dataset=True, hf_checkpoint=f"{root}/boot", chat_template_path=None, dump_details=None,
    prompt_data=f"{root}/prompts.jsonl", rollout_max_prompt_len=None, input_key="input", multimodal_keys=None,
    label_key="label", metadata_key=None, tool_key=None, apply_chat_template=False, rollout_seed=1,
    apply_chat_template_kwargs=None, rollout_shuffle=True, n_samples_per_prompt=2, buffer_filter_path=None,
    save=f"{root}/ckpt", load=f"{root}/ckpt", stitch_run="math", stitch_store=f"file:{root}/store",
)
if sys.argv[2] == "run":
    source = StitchDataSource(args)
    for rollout in (0, 1):
        source.get_samples(3)
        source.save(rollout)
    source.get_samples(3)
else:
    source = StitchDataSource(args)
    source.load(2)
print(json.dumps([[sample.index for sample in group] for group in source.get_samples(1)]))
"""


def test_its_prompts_go_on_from_the_last_note(world: World) -> None:
    """Miles alone would ask for the first prompt again, and train on all of them twice."""
    PolicyPublisher.start(world.store, "math", world.root / "boot", world.root / "work").close()
    assert indices(world.root, "run") == [[18, 19]]
    # Megatron's checkpoint says rollout 2; the note of it is not there.
    assert indices(world.root, "resume") == [[12, 13]]


def indices(root: Path, how: str) -> list[list[int]]:
    paths = [str(ROOT), str(ROOT / "plugins" / "miles")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SOURCE, str(root), how],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    made: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return made
