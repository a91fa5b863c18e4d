"""Tensors of a MoonViT tower and its projector (SGLang 0.5.23: models/kimi_k25.py, kimi_k3_vl.py)."""

from __future__ import annotations

from .geometry import Vision
from .spec import Tensor, Tensors, weight

TOWER = "vision_tower"
PROJECTOR = "mm_projector"


def vision(kind: Vision, hidden: int) -> Tensors:
    """``hidden`` is the language model's width, where the projector leads."""
    for tensor in _weights(kind, hidden):
        yield tensor
        if kind.bias and "pos_emb" not in tensor.name:
            yield Tensor(tensor.name.removesuffix("weight") + "bias", "BF16", tensor.shape[:1])


def _weights(kind: Vision, hidden: int) -> Tensors:
    dim, inner, attention = kind.vt_hidden_size, kind.vt_intermediate_size, kind.vt_qkv_size
    yield weight(f"{TOWER}.patch_embed.proj", dim, 3, kind.patch_size, kind.patch_size)
    yield weight(f"{TOWER}.patch_embed.pos_emb", kind.init_pos_emb, kind.init_pos_emb, dim)
    for block in range(kind.vt_num_hidden_layers):
        at = f"{TOWER}.encoder.blocks.{block}"
        yield weight(f"{at}.norm0", dim)
        yield weight(f"{at}.norm1", dim)
        yield weight(f"{at}.wqkv", 3 * attention, dim)
        yield weight(f"{at}.wo", dim, attention)
        yield weight(f"{at}.mlp.fc0", inner, dim)
        yield weight(f"{at}.mlp.fc1", dim, inner)
    yield weight(f"{TOWER}.encoder.final_layernorm", dim)
    wide = kind.merge * dim
    if kind.projector_norm == "pre_norm":
        yield weight(f"{PROJECTOR}.pre_norm", dim)
    yield weight(f"{PROJECTOR}.proj.0", wide, wide)
    yield weight(f"{PROJECTOR}.proj.2", hidden, wide)
    if kind.projector_norm == "post_norm":
        yield weight(f"{PROJECTOR}.post_norm", hidden)
