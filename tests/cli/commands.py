"""Runs ``stitch`` in this process and keeps what it said."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stitch_core.cli.main import main
from stitch_core.delta.encoder import DeltaEncoder
from stitch_core.testing.checkpoints import random_tensors, step, write_checkpoint
from tests.small_run import FILES, LAYOUT, Tensors


@dataclass(frozen=True)
class Said:
    """One run of the command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code in (0, 1), self.err
        assert self.out.count("\n") == 1, "JSON is one line"
        return json.loads(self.out)

    @property
    def complaint(self) -> str:
        """The one line of an error."""
        assert self.code != 0
        assert self.out == ""
        lines = [line for line in self.err.splitlines() if line.startswith("stitch ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[0]


class Shell:
    """A store in a directory, checkpoints beside it, and the command."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self.store = f"file:{root / 'store'}"
        self.base = root / "base"
        self._capsys = capsys
        self._rng = np.random.default_rng(0)
        self.tensors: Tensors = random_tensors(self._rng, LAYOUT)
        write_checkpoint(self.base, FILES, self.tensors, 2)

    def __call__(self, *arguments: object) -> Said:
        self._capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = self._capsys.readouterr()
        return Said(code, captured.out, captured.err)

    def claim(self, *more: object, run: str = "r", base: Path | None = None) -> Said:
        return self("claim", "--store", self.store, "--run", run, "--base", base or self.base, *more)

    def publish(self, directory: Path, *more: object) -> Said:
        (self.root / "store").mkdir(exist_ok=True)  # only a claim makes one
        return self("publish", directory, "--store", self.store, "--run", "r", "--base", self.base, *more)

    def learn(self, name: str) -> Path:
        """The next weights, as a full checkpoint."""
        self.tensors = step(self._rng, self.tensors, 0.3)
        write_checkpoint(self.root / name, FILES, self.tensors)
        return self.root / name

    def delta(self, name: str) -> Path:
        """The next weights, as a delta directory."""
        before = self.tensors
        self.tensors = step(self._rng, self.tensors, 0.3)
        DeltaEncoder(before).encode(self.tensors, self.root / name, FILES, number=1, base_number=0)
        return self.root / name

    def head(self) -> tuple[int, int]:
        """(number, epoch)"""
        run = self("status", "--store", self.store, "--run", "r", "--json").json["runs"][0]
        return run["head"], run["epoch"]


_BUILT: dict[str, tuple[Path, Any]] = {}


def built_once(shell: Shell, kept: pytest.TempPathFactory, build: Callable[[Shell], object]) -> Shell:
    """``shell`` as ``build`` (a module's own function) makes it; after the first time a copy of that."""
    name = f"{build.__module__}.{build.__name__}"
    if name not in _BUILT:
        build(shell)
        directory = kept.mktemp("built") / "copy"
        shutil.copytree(shell.root, directory)
        _BUILT[name] = directory, copy.deepcopy((shell.tensors, shell._rng))
    else:
        directory, rest = _BUILT[name]
        shutil.copytree(directory, shell.root, dirs_exist_ok=True)
        shell.tensors, shell._rng = copy.deepcopy(rest)
    return shell
