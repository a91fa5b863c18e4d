"""config.json of the checkpoints, with what it says of the quantization."""

import json

import pytest

from stitch_recipes.layout.config import config_json, hf_quant_config, quantization_config
from stitch_recipes.layout.scaled import scaled, scaled_checkpoint
from tests.recipes.layout.models import checkpoints, model


@pytest.mark.parametrize(("name", "key"), checkpoints())
def test_it_is_json_with_the_numbers_of_the_model(name: str, key: str) -> None:
    described, all_of_it = model(name)
    small = scaled(described.geometry)
    document = json.loads(
        json.dumps(config_json(small, scaled_checkpoint(all_of_it[key], described.geometry)))
    )
    text = document.get("text_config", document)
    assert document["architectures"] == [small.architecture]
    assert text["hidden_size"] == small.hidden_size
    assert text["num_hidden_layers"] == small.num_hidden_layers
    quantized = all_of_it[key].quantization != "bf16"
    assert ("quantization_config" in document or "quantization_config" in text) == quantized


def test_kimi_k3_says_its_layers_from_one_and_calls_experts_as_its_class_does() -> None:
    described, all_of_it = model("kimi-k3")
    text = config_json(described.geometry, all_of_it["mxfp4"])["text_config"]
    linear = text["linear_attn_config"]
    assert (linear["full_attn_layers"][:2], linear["full_attn_layers"][-2:]) == ([4, 8], [92, 93])
    assert (len(linear["kda_layers"]), linear["gate_lower_bound"]) == (69, -5.0)
    assert (text["num_experts"], text["num_shared_experts"], text["num_experts_per_token"]) == (896, 2, 16)
    assert text["quantization_config"]["format"] == "mxfp4-pack-quantized"


def test_nvfp4_names_what_the_converter_left_alone() -> None:
    described, all_of_it = model("glm-5.2")
    how = scaled_checkpoint(all_of_it["nvfp4"], described.geometry)
    document = hf_quant_config(scaled(described.geometry), how)
    assert document is not None
    ignored = document["quantization"]["exclude_modules"]
    assert ignored == (quantization_config(scaled(described.geometry), how) or {})["ignore"]
    assert {"lm_head", "model.layers.5.", "model.layers.5.mlp.experts", "model.layers.3.mlp.gate"} <= set(
        ignored
    )
    assert "model.layers.3.mlp.shared_experts.up_proj" in ignored
    assert not any(name.startswith("model.layers.3.mlp.experts") for name in ignored)
    described, all_of_it = model("qwen3-30b-a3b")
    ignored = (quantization_config(described.geometry, all_of_it["nvfp4"]) or {})["ignore"]
    assert {"model.layers.0.self_attn.qkv_proj", "model.layers.41.", "model.layers.47.mlp.experts"} <= set(
        ignored
    )
    assert "model.layers.40." not in ignored


def test_block_fp8_names_the_index_by_its_fused_name() -> None:
    described, all_of_it = model("glm-5.2")
    document = quantization_config(
        scaled(described.geometry), scaled_checkpoint(all_of_it["fp8"], described.geometry)
    )
    assert document is not None
    assert document["weight_block_size"] == [128, 128]
    kept = set(document["modules_to_not_convert"])
    assert {"lm_head", "model.embed_tokens", "model.layers.0.self_attn.indexers_proj"} <= kept
    assert {"model.layers.3.mlp.gate", "model.layers.6.eh_proj"} <= kept


def test_int4_says_its_group() -> None:
    for name, group in (("moonlight-16b-a3b", 128), ("kimi-k2.6", 32)):
        described, all_of_it = model(name)
        document = quantization_config(described.geometry, all_of_it["int4"])
        assert document is not None
        assert document["config_groups"]["group_0"]["weights"]["group_size"] == group
