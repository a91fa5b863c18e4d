"""Text in and out, for checkpoints that come with a Hugging Face tokenizer. Token ids always work without."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as HFTokenizer


class TemplateError(ValueError):
    """The chat template is missing, or refused these messages."""


class Tokenizer:
    """`tokenizer.json` and, for chats, the template in `chat_template.jinja` or `tokenizer_config.json`."""

    def __init__(self, directory: str | Path) -> None:
        """Raises FileNotFoundError where there is no `tokenizer.json`, ValueError where it is unreadable."""
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(path)
        try:
            self._tokenizer = HFTokenizer.from_file(str(path))
        except Exception as error:  # the binding raises bare Exception
            raise ValueError(f"{path}: {error}") from error
        config = directory / "tokenizer_config.json"
        self._config: dict[str, Any] = json.loads(config.read_text("utf-8")) if config.is_file() else {}
        self._template = self._compile(directory)

    @staticmethod
    def of(directory: str | Path) -> Tokenizer | None:
        """The checkpoint's tokenizer, if it has one."""
        try:
            return Tokenizer(directory)
        except FileNotFoundError:
            return None

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with the special tokens that the tokenizer adds by itself."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def chat(self, messages: Sequence[dict[str, Any]], **extra: Any) -> list[int]:
        """Ids of a conversation up to where the assistant speaks. Raises TemplateError."""
        if self._template is None:
            raise TemplateError("the checkpoint has no chat template")
        try:
            text = self._template.render(
                messages=messages, add_generation_prompt=True, **self._specials(), **extra
            )
        except jinja2.TemplateError as error:
            raise TemplateError(f"chat template: {error}") from error
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def stop_finder(self, stops: Sequence[str]) -> Callable[[list[int]], str | None]:
        """A function that says which of `stops` the text of an output contains, given that it did not
        before.
        """
        longest = max(len(s) for s in stops)

        def find(tokens: list[int]) -> str | None:
            # The newest token completes it: a token is at least a byte, a character at most four.
            tail = self.decode(tokens[-(4 * longest + 8) :])
            return next((s for s in stops if s in tail), None)

        return find

    def _specials(self) -> dict[str, str]:
        out = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = self._config.get(name)
            out[name] = value.get("content", "") if isinstance(value, dict) else (value or "")
        return out

    def _compile(self, directory: Path) -> jinja2.Template | None:
        file = directory / "chat_template.jinja"
        source = file.read_text("utf-8") if file.is_file() else self._config.get("chat_template")
        if not isinstance(source, str):
            return None
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment.globals["raise_exception"] = raise_exception
        return environment.from_string(source)


def visible(text: str, stops: Sequence[str]) -> str:
    """The part of a growing text that later tokens cannot take back.

    Held back: a character whose bytes are not all there, and an end that may become a stop string.
    """
    text = text.rstrip("\ufffd")
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:size]):
                text = text[:-size]
                break
    return text
