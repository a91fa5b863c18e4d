"""The numbers of a model's config.json from which the names and shapes of its tensors follow.

Fields have the names of config.json where the field is one of its keys.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Positive = Annotated[int, Field(ge=1)]

Quantization = Literal[
    "bf16", "fp8-channel", "fp8-block128", "nvfp4-modelopt", "mxfp4-packed", "int4-packed"
]  # fmt: skip


class Numbers(BaseModel):
    """Refuses fields that it does not know and values of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Grouped(Numbers):
    """Grouped-query attention."""

    kind: Literal["gqa"]
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    attention_bias: bool = False
    qk_norm: bool = False


class Indexer(Numbers):
    """The sparse index of DSA: layer i holds it where max(i - offset + 1, 0) % freq == 0."""

    index_n_heads: Positive
    index_head_dim: Positive
    index_topk_freq: Positive
    index_skip_topk_offset: int

    def in_layer(self, layer: int) -> bool:
        """Whether the layer computes its own index; the others use the one of a layer below."""
        return max(layer - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq == 0


class Latent(Numbers):
    """Multi-head latent attention, with an index where it is sparse."""

    kind: Literal["mla"]
    num_attention_heads: Positive
    q_lora_rank: Positive | None = None
    kv_lora_rank: Positive
    qk_nope_head_dim: Positive
    qk_rope_head_dim: Positive
    v_head_dim: Positive
    mla_use_output_gate: bool = False
    indexer: Indexer | None = None


class Hybrid(Numbers):
    """Kimi's linear attention (KDA) with latent attention in ``full_layers``."""

    kind: Literal["kda"]
    latent: Latent
    full_layers: list[int] = Field(description="from 0")
    num_heads: Positive
    head_dim: Positive
    short_conv_kernel_size: Positive


class Experts(Numbers):
    """A mixture of experts in every layer from ``first_k_dense_replace`` on."""

    n_routed_experts: Positive
    n_shared_experts: Annotated[int, Field(ge=0)]
    num_experts_per_tok: Positive
    moe_intermediate_size: Positive
    routed_expert_hidden_size: Positive | None = None
    correction_bias: bool = True
    names: Literal["mlp", "block_sparse_moe"] = Field(
        "mlp", description="of the module; in block_sparse_moe an expert's gate, up, down are w1, w3, w2"
    )


class Prediction(Numbers):
    """Layers for multi-token prediction, stored after the others."""

    num_nextn_predict_layers: Positive
    own_embeddings: bool = Field(description="they store embed_tokens and shared_head.head again")


class Vision(Numbers):
    """A MoonViT tower and its projector; training of text leaves them as they are."""

    vt_hidden_size: Positive
    vt_num_hidden_layers: Positive
    vt_num_attention_heads: Positive
    vt_qkv_size: Positive = Field(description="of each of q, k and v")
    vt_intermediate_size: Positive
    patch_size: Positive = 14
    init_pos_emb: Positive = Field(64, description="height and width of the table of positions")
    merge: Positive = Field(4, description="patches that the projector takes together")
    bias: bool
    projector_norm: Literal["pre_norm", "post_norm"]


class Geometry(Numbers):
    """One model."""

    architecture: str = Field(description="the class that loads it")
    model_type: str
    text_architecture: str | None = Field(None, description="of text_config, where config.json has one")
    text_model_type: str | None = None
    prefix: str = "model."
    head: str = "lm_head."
    hidden_size: Positive
    num_hidden_layers: Positive
    first_k_dense_replace: Annotated[int, Field(ge=0)] = 0
    intermediate_size: Positive
    vocab_size: Positive
    tie_word_embeddings: bool = False
    tied_head_stored: bool = Field(False, description="its files have the head all the same")
    attention: Annotated[Grouped | Latent | Hybrid, Field(discriminator="kind")]
    attn_res_block_size: Positive | None = Field(None, description="residual streams between blocks")
    experts: Experts | None = None
    prediction: Prediction | None = None
    vision: Vision | None = None
    config: dict[str, Any] = Field({}, description="what else config.json says; of text_config if it has one")

    @field_validator("text_architecture", "text_model_type", "vision", mode="before")
    @classmethod
    def _left_out(cls, value: Any) -> Any:
        """``false`` leaves it out: a recipe may be of a model's part, and a file cannot say None."""
        return None if value is False else value
