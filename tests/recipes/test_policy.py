"""The local recipe's policy: one list of tensors that transformers, engine and Stitch read alike."""

from pathlib import Path

import pytest
import torch

from recipes.local import task
from recipes.local.policy import Policy, to_publish, write_checkpoint
from stitch_core.checkpoint import Checkpoint
from stitch_core.files import PosixFiles
from stitch_embedded.config import ModelConfig
from stitch_embedded.weights import CheckpointFiles


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(seed=3)


@pytest.fixture(scope="module")
def checkpoint(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy") / "boot"
    write_checkpoint(directory, policy.rollout_weights())
    return directory


def test_a_seed_gives_one_policy() -> None:
    first, again, other = (Policy(seed).rollout_weights() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_the_engine_reads_the_checkpoint(checkpoint: Path, policy: Policy) -> None:
    config = ModelConfig.read(checkpoint)
    assert config.eos_ids == (task.EOS,)
    read = CheckpointFiles(checkpoint, config).read(None, torch.bfloat16, torch.bfloat16)
    expected = policy.rollout_weights()
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in expected)


def test_what_is_published_has_the_checkpoints_layout_and_bytes(checkpoint: Path, policy: Policy) -> None:
    stored = Checkpoint.open(checkpoint, PosixFiles())
    tensors = to_publish(policy.rollout_weights())
    assert tensors.keys() == stored.tensors.keys()
    for name, tensor in tensors.items():
        assert (tensor.dtype, tensor.shape) == (stored.tensors[name].dtype, stored.tensors[name].shape)
        assert bytes(tensor.data) == stored.read(name)


def test_rollout_weights_do_not_follow_the_masters() -> None:
    policy = Policy(seed=0)
    weights = policy.rollout_weights()
    before = weights["model.norm.weight"].clone()
    with torch.no_grad():
        policy.model.norm.weight.add_(1.0)
    assert torch.equal(weights["model.norm.weight"], before)


@pytest.mark.slow
def test_the_training_forward_is_transformers(checkpoint: Path) -> None:
    """fp32 against fp32 on the same BF16-rounded weights."""
    from transformers import Qwen3ForCausalLM

    theirs = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ours = Policy(seed=0)
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.randint(task.VOCAB, (3, 23), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
