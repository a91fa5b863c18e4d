"""What a host's checkpoint directory is made of: weights, an index, and the files beside them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from .checkpoint import Checkpoint, Progress, untold
from .dialects import INDEX_NAME
from .ports import Files, write_atomic

COPY_BYTES = 16 << 20
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


def make_durable_dirs(files: Files, path: Path) -> None:
    """Make a directory and those above it that are missing, so that they survive the machine's death."""
    missing = [above for above in (path, *path.parents) if not files.exists(above)]
    files.make_dirs(path)
    for made in missing:
        files.sync(made.parent)


def copy_files(
    files: Files, source: Path, target: Path, names: Iterable[str], progress: Progress = untold
) -> None:
    """Copy files into a new directory, each durable; the caller syncs the directory."""
    sizes = {name: files.size(source / name) for name in names}
    done, total = 0, sum(sizes.values())
    for name, size in sizes.items():
        files.write_new(target / name, files.read(source / name, 0, COPY_BYTES))
        for at in range(COPY_BYTES, size, COPY_BYTES):
            progress("copied", done + at, total)
            files.write_at(target / name, at, files.read(source / name, at, COPY_BYTES))
        files.sync(target / name)
        done += size
        progress("copied", done, total)


def side_files(files: Files, directory: Path) -> dict[str, int]:
    """Config, tokenizer and the like, with their sizes: every plain file that is no weights and no index.

    Weights that the checkpoint does not name (another format of the same model) would go stale beside
    those that move on, so they never get into a host's copy.
    """
    result = {}
    for name in files.list(directory):
        if name.startswith(".") or name.endswith((*WEIGHT_SUFFIXES, ".index.json")):
            continue
        try:
            result[name] = files.size(directory / name)
        except (IsADirectoryError, FileNotFoundError):
            continue  # a subdirectory, or a link to nothing
    return result


def files_of(checkpoint: Checkpoint) -> list[str]:
    """The files of a checkpoint: its weights, its index if it has one, and config, tokenizer and the like.

    Weights beside it that it does not name are another attempt's, or the model in another format.
    """
    index = () if checkpoint.index is None else (INDEX_NAME,)
    return sorted({*checkpoint.weight_files, *index, *side_files(checkpoint.files, checkpoint.directory)})


def open_with_index(files: Files, directory: Path) -> Checkpoint:
    """Open a checkpoint; one without an index gets one, which is what engines read. CheckpointError."""
    checkpoint = Checkpoint.open(directory, files)
    if checkpoint.index is not None:
        return checkpoint
    weight_map = {name: ref.file.name for name, ref in sorted(checkpoint.tensors.items())}
    total = sum(ref.nbytes for ref in checkpoint.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_atomic(files, directory / INDEX_NAME, json.dumps(index, indent=2).encode())
    return Checkpoint.open(directory, files)
