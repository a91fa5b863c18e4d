"""The language model of a checkpoint that has more: a vision tower and a projector.

    python3 -m stitch_recipes.layout.language_model SOURCE TARGET --model-type deepseek_v3

Its tensors lose the prefix ``language_model.``, the others are left out, and ``text_config`` becomes
config.json. Trainers that know the language model by itself, and not what is around it, train from that.
Memory is that of one chunk. Needs no more than stitch_core does, so that it runs on any of the images.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from stitch_core.checkpoint import Checkpoint
from stitch_core.dialects import INDEX_NAME
from stitch_core.files import PosixFiles
from stitch_core.safetensors import CheckpointError, TensorRef, encode_header

PREFIX = "language_model."
CONFIG = "config.json"


def extract(source: Path, target: Path, model_type: str) -> int:
    """Make ``target``, which is new; the number of tensors. Raises CheckpointError, OSError."""
    checkpoint = Checkpoint.open(source, PosixFiles())
    config = _config(source / CONFIG, model_type)
    kept = {name: ref for name, ref in checkpoint.tensors.items() if name.startswith(PREFIX)}
    if not kept:
        raise CheckpointError(f"{source}: no tensor's name begins with {PREFIX}")
    target.mkdir(parents=True)
    shards: dict[str, dict[str, TensorRef]] = {}
    for name, ref in kept.items():
        shards.setdefault(ref.file.name, {})[name] = ref
    for shard, refs in sorted(shards.items()):
        print(f"{shard}: {len(refs)} tensors", file=sys.stderr, flush=True)
        _write(target / shard, refs, checkpoint)
    weight_map = {name.removeprefix(PREFIX): ref.file.name for name, ref in kept.items()}
    total = sum(ref.nbytes for ref in kept.values())
    _json(target / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _json(target / CONFIG, config)
    for file in sorted(source.iterdir()):
        if file.is_file() and not _replaced(file.name):
            shutil.copyfile(file, target / file.name)
    return len(kept)


def _config(path: Path, model_type: str) -> dict[str, Any]:
    """``text_config`` as a model's own, with what the whole says of the quantization.

    Its auto_map stays: of a config of transformers' own class mbridge asks in vain for rope_theta.
    """
    try:
        whole = json.loads(path.read_text("utf-8"))
        text = whole["text_config"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: there is no text_config in it ({error!r})") from None
    if not isinstance(text, dict) or not text.get("architectures"):
        raise CheckpointError(f"{path}: text_config does not say its architectures")
    outer = {key: whole[key] for key in ("dtype", "torch_dtype", "quantization_config") if key in whole}
    return {**outer, **text, "model_type": model_type}


def _write(path: Path, refs: dict[str, TensorRef], checkpoint: Checkpoint) -> None:
    """One shard, in the order of its header."""
    table = {name.removeprefix(PREFIX): (ref.dtype, ref.shape) for name, ref in refs.items()}
    header, offsets = encode_header(table, {"format": "pt"})
    with path.open("xb") as file:
        file.write(header)
        for name in offsets:
            for chunk in checkpoint.chunks(PREFIX + name):
                file.write(chunk)


def _replaced(name: str) -> bool:
    """Weights, what is written anew, and what prepares images."""
    own = name in (CONFIG, INDEX_NAME) or name.endswith(".safetensors")
    return own or (name.endswith(".json") and "processor" in name)


def _json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="SOURCE")
    parser.add_argument("target", type=Path, metavar="TARGET", help="a directory that is not there yet")
    parser.add_argument(
        "--model-type", required=True, metavar="TYPE", help="of config.json, as the trainer knows it"
    )
    options = parser.parse_args()
    try:
        extract(options.source, options.target, options.model_type)
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
