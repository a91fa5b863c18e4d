"""The answers of a probe by state, in memory and in a small file that outlives the replica's process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..ports import Files, RunBlocking, write_atomic
from ..safetensors import CheckpointError, load_json_object

FORMAT = "stitch.probe/1"
FILE_NAME = "probe.json"
KEPT_STATES = 256
_DECIMALS = 6

Answer = tuple[float, ...]


class KeptAnswers:
    """Those of one signature, of the newest 256 states and the boot checkpoint's.

    With ``path`` they are there again after a restart. A file that is damaged, or of another signature,
    counts as none; one that cannot be written is told to ``say``, and the answers are in memory only.
    """

    def __init__(
        self, files: Files, path: Path | None, run_blocking: RunBlocking, say: Callable[[str], None] = print
    ) -> None:
        self.path = path
        self.boot: str | None = None
        self.signature: str | None = None
        self._files, self._run_blocking, self._say = files, run_blocking, say
        self._answers: dict[str, Answer] = {}
        self._unsaved = False

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, state: str) -> Answer | None:
        return self._answers.get(state)

    async def use(self, signature: str) -> None:
        """From now on answers are of this signature; others are forgotten."""
        if signature == self.signature:
            return
        answers: dict[str, Answer] = {}
        if self.path is not None:
            answers = await self._run_blocking(self._read, self.path, signature)
        self.signature, self._answers, self._unsaved = signature, answers, False

    def keep(self, state: str, answer: Answer) -> None:
        """The answer that ``state`` gives, until ``save`` in memory only.

        The oldest states are forgotten, the boot checkpoint's never.
        """
        self._answers[state] = tuple(round(value, _DECIMALS) for value in answer)
        while len(self._answers) > KEPT_STATES:
            del self._answers[next(one for one in self._answers if one != self.boot)]
        self._unsaved = True

    async def save(self) -> None:
        """Write what was kept since the last time."""
        if not self._unsaved or self.path is None or self.signature is None:
            return
        self._unsaved = False
        try:
            await self._run_blocking(self._write, self.path, encode(self.signature, self._answers))
        except OSError as error:
            self._say(f"{self.path} cannot be written, a restart forgets the probe's answers: {error}")

    def _read(self, path: Path, signature: str) -> dict[str, Answer]:
        try:
            if not self._files.exists(path):
                return {}
            found, answers = decode(self._files.read(path), str(path))
        except (OSError, CheckpointError, ValueError) as error:
            self._say(f"{path} cannot be used, the probe begins anew: {error}")
            return {}
        return answers if found == signature else {}

    def _write(self, path: Path, data: bytes) -> None:
        self._files.make_dirs(path.parent)
        write_atomic(self._files, path, data)


def encode(signature: str, answers: Mapping[str, Sequence[float]]) -> bytes:
    """The file's bytes, oldest state first."""
    value = {"format": FORMAT, "signature": signature, "answers": {s: list(a) for s, a in answers.items()}}
    return json.dumps(value, separators=(",", ":")).encode()


def decode(data: bytes, where: str) -> tuple[str, dict[str, Answer]]:
    """Signature and answers; CheckpointError or ValueError if ``data`` is no such file, whole."""
    value: dict[str, Any] = load_json_object(data, where)
    if value.get("format") != FORMAT:
        raise ValueError(f"its format is {value.get('format')!r}, not {FORMAT}")
    signature, answers = value.get("signature"), value.get("answers")
    if not isinstance(signature, str) or not isinstance(answers, dict) or len(answers) > KEPT_STATES:
        raise ValueError("it has no signature, or no answers by state")
    for state, answer in answers.items():
        if not isinstance(answer, list) or not answer or not all(map(_is_number, answer)):
            raise ValueError(f"the answer of {state} is no list of numbers")
    return signature, {state: tuple(map(float, answer)) for state, answer in answers.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
