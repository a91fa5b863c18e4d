"""The recipes' layouts at full size, against the classes of transformers that read the same config.json.

On torch's device without memory. Those classes keep all experts of a layer in one tensor, and do not have the
layers for multi-token prediction, whose layout is that of a layer.
"""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stitch_core.files import PosixFiles
from stitch_recipes.layout.config import config_json
from stitch_recipes.layout.geometry import Geometry
from stitch_recipes.layout.scaled import scaled
from stitch_recipes.layout.synthesis import stored, write_checkpoint
from stitch_recipes.layout.tensors import tensors
from stitch_recipes.schema import Checkpoint
from tests.recipes.layout.models import model

from .server import SGLangServer

pytestmark = pytest.mark.real

Shapes = dict[str, tuple[int, ...]]

MODELS = [
    "glm-4.5-air",
    "glm-4.7-flash",
    "glm-5.2",
    "moonlight-16b-a3b",
    "qwen3-0.6b",
    "qwen3-30b-a3b",
    "qwen3-4b",
]


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_are_those_of_the_class_that_the_config_names(name: str) -> None:
    described = model(name)[0].geometry
    for geometry in (described, scaled(described)):
        expected = of_transformers(geometry)
        if geometry.tied_head_stored:  # which the class does not have, but the published file
            expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
        assert layout(geometry) == expected


async def test_stock_sglang_serves_a_scaled_checkpoint_and_knows_every_tensor(tmp_path: Path) -> None:
    """The one with most kinds of tensors among those that SGLang can serve without a GPU."""
    geometry, how = scaled(model("glm-4.5-air")[0].geometry), Checkpoint()
    content = ((one.tensor, one.at(0)) for one in stored(geometry, how))
    write_checkpoint(tmp_path / "model", PosixFiles(), geometry, how, content)
    server = SGLangServer(tmp_path / "model", tmp_path, {}, ("--skip-tokenizer-init",))
    try:
        await server.until_ready("/health")
        answer = await server.generate([5, 6, 7, 8], new=8)
    finally:
        server.stop()
    assert len(answer["output_ids"]) == 8
    assert all(token < geometry.vocab_size for token in answer["output_ids"])
    assert "not found" not in server.log.read_text(errors="replace")


def layout(geometry: Geometry) -> Shapes:
    """Experts of a layer in one tensor, gate above up."""
    found: Shapes = {}
    for tensor in tensors(geometry):
        layer = re.search(r"\.layers\.(\d+)\.", tensor.name)
        if layer and int(layer[1]) >= geometry.num_hidden_layers:
            continue
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", tensor.name)
        if expert is None:
            found[tensor.name] = tensor.shape
            continue
        out, into = tensor.shape
        down = expert[3] == "down"
        together = f"{expert[1]}.{'down_proj' if down else 'gate_up_proj'}"
        found[together] = (int(expert[2]) + 1, out if down else 2 * out, into)
    return found


def of_transformers(geometry: Geometry) -> Shapes:
    keys = config_json(geometry, Checkpoint())
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    assert [type(built).__name__] == keys["architectures"]
    found = {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()}
    if geometry.tie_word_embeddings:
        del found["lm_head.weight"]
    return found
