"""The checkpoint that a profile starts from: the recipe's own, from its layout, at a size that fits here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from stitch_core.checkpoint import Checkpoint as Stored
from stitch_core.files import PosixFiles
from stitch_core.ports import write_atomic

from ..layout.formats import quantized
from ..layout.geometry import Geometry
from ..layout.scaled import scaled, scaled_checkpoint
from ..layout.synthesis import stored, write_checkpoint
from ..layout.tensors import tensors
from ..schema import Checkpoint, Recipe

Size = Literal["small", "medium", "full"]
SIZES: tuple[Size, ...] = get_args(Size)
SHARD_BYTES = 512 << 20
MEDIUM = 1024
"""About the width of the medium model."""

FIRST, LAST = 32, 127
"""Token ids that are characters of their own; stitch profile's prompts are of these."""


@dataclass(frozen=True)
class Base:
    """A checkpoint on disk. ``size``: "full", or how it was scaled down; ``made``: its weights are random."""

    directory: Path
    geometry: Geometry
    checkpoint: Checkpoint
    size: str
    made: bool
    warning: str | None = None


def made(recipe: Recipe, size: Size, directory: Path, seed: int = 0) -> Base:
    """The served checkpoint, of random weights and with a tokenizer, in ``directory``, which is new.

    Raises LayoutError, OSError.
    """
    geometry, checkpoint = recipe.model.geometry, recipe.served
    if size != "full":
        checkpoint = scaled_checkpoint(checkpoint, geometry)
        geometry = scaled(geometry) if size == "small" else scaled(geometry, MEDIUM)
    files = PosixFiles()
    content = ((one.tensor, one.at(0)) for one in stored(geometry, checkpoint, seed=seed))
    write_checkpoint(directory, files, geometry, checkpoint, content, SHARD_BYTES)
    write_tokenizer(directory, geometry.vocab_size)
    return Base(directory, geometry, checkpoint, size, made=True)


def given(recipe: Recipe, directory: Path) -> Base:
    """A checkpoint of full size that is there. A layout that is not the recipe's is a warning."""
    geometry, checkpoint = recipe.model.geometry, recipe.served
    there = {
        (name, ref.dtype, tuple(ref.shape))
        for name, ref in Stored.open(directory, PosixFiles()).tensors.items()
    }
    expected = {tuple(tensor) for tensor in quantized(tensors(geometry), checkpoint)}
    warning = None
    if there != expected:
        first = min(there ^ expected)
        warning = (
            f"{directory} does not have the layout that recipe {recipe.name} says, beginning with {first[0]} "
            f"({first[1]} {list(first[2])}, {'not expected' if first in there else 'missing'}): which of its "
            "tensors are quantized is told by their names"
        )
    return Base(directory, geometry, checkpoint, "full", made=False, warning=warning)


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    """A tokenizer of one token a character, for servers that do not start without one."""
    words = {chr(i) if FIRST <= i < LAST else f"<{i}>": i for i in range(vocabulary)}
    files = PosixFiles()
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {
            "type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<0>"},
    }  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<0>",
        "bos_token": "<1>",
        "eos_token": "<2>",
    }
    write_atomic(files, directory / "tokenizer.json", json.dumps(tokenizer).encode())
    write_atomic(files, directory / "tokenizer_config.json", json.dumps(settings).encode())
