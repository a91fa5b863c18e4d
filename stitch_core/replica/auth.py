"""Who may do what over HTTP: bearer tokens with roles, and what a request's head may hold.

``docs/threat-model.md`` says what this is for. Tokens are compared as digests, all of them, in constant time,
and no message has one in it. The path that is judged is the clean one, which is also the one that is routed.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ..versions import Refusal
from .asgi import App, Receive, Scope, Send, clean_path, send_json, without
from .routes import Kind, classify

GENERATE, READ, ADMIN = "generate", "read", "admin"
ROLES = frozenset((GENERATE, READ, ADMIN))
LEAST_LENGTH = 16
MOST_HEADER_BYTES = 64 << 10
MOST_HEADERS = 256
SECONDS_BETWEEN_LOOKS = 1.0

TEXT_VARIABLE, FILE_VARIABLE = "STITCH_TOKENS", "STITCH_TOKEN_FILE"
REPLICA_VARIABLE, REPLICA_FILE_VARIABLE = "STITCH_REPLICA_TOKEN", "STITCH_REPLICA_TOKEN_FILE"

logger = logging.getLogger("stitch")
T = TypeVar("T")
Grants = Sequence[tuple[bytes, frozenset[str]]]

_EITHER = frozenset((GENERATE, READ))
_NEEDED: Mapping[str, frozenset[str]] = {
    "/abort_request": frozenset((GENERATE,)),
    "/wake": frozenset((GENERATE,)),  # no more than each refused request does
    "/status": frozenset((READ,)),
    "/metrics": frozenset((READ,)),
    "/v1/loads": frozenset((READ,)),
    "/get_load": frozenset((READ,)),
}
_KINDS = {Kind.GENERATE: frozenset((GENERATE,)), Kind.OPENAI: frozenset((GENERATE,)), Kind.READY: _EITHER,
          Kind.INFO: _EITHER, Kind.PASS: _EITHER}  # fmt: skip


class BadTokens(ValueError):
    """Tokens that cannot be used. The message names a place, and never a token."""


def parse_tokens(text: str, where: str) -> Grants:
    """Lines ``ROLE[,ROLE...] TOKEN``, with ``#`` before comments; in a variable ``;`` ends a line too.

    Raises BadTokens.
    """
    grants: list[tuple[bytes, frozenset[str]]] = []
    for number, line in enumerate(text.replace(";", "\n").splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        roles = frozenset(words[0].split(","))
        if len(words) != 2 or not roles <= ROLES:
            raise BadTokens(
                f"{where}, line {number}: expected ROLE[,ROLE] TOKEN, roles {', '.join(sorted(ROLES))}"
            )
        grants.append((_digest(check_token(words[1], f"{where}, line {number}")), roles))
    if not grants:
        raise BadTokens(f"{where} has no token")
    return grants


def check_token(token: str, where: str) -> str:
    """``token`` if it can be one. Raises BadTokens, which does not repeat it."""
    if len(token) < LEAST_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise BadTokens(f"{where}: a token is at least {LEAST_LENGTH} printable ASCII characters")
    return token


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


class Reloaded:
    """What a file says, read again when the file changes; while it cannot be, what it said last."""

    def __init__(
        self, path: Path, parse: Callable[[str, str], T], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises BadTokens and OSError."""
        self._path, self._parse, self._clock = path, parse, clock
        self._mark = self._stat()
        self._value = parse(path.read_text(), str(path))
        self._looked = clock()

    def value(self) -> object:
        if self._clock() - self._looked >= SECONDS_BETWEEN_LOOKS:
            self._looked = self._clock()
            try:
                mark = self._stat()
                if mark != self._mark:
                    self._value, self._mark = self._parse(self._path.read_text(), str(self._path)), mark
                    logger.info("tokens were read again from %s", self._path)
            except (OSError, ValueError) as error:
                logger.warning("tokens stay as they were: %s", error)
        return self._value

    def _stat(self) -> tuple[int, int, int]:
        found = os.stat(self._path)
        return found.st_ino, found.st_mtime_ns, found.st_size


class Tokens:
    """The tokens of one server."""

    def __init__(self, read: Callable[[], Grants]) -> None:
        self._read = read

    @classmethod
    def given(cls, file: Path | None, environ: Mapping[str, str] = os.environ) -> Tokens | None:
        """From ``file``, else as the environment says; None where neither names any.

        Raises BadTokens and OSError.
        """
        named = environ.get(FILE_VARIABLE)
        file = file or (Path(named) if named else None)
        if file is not None:
            reloaded = Reloaded(file, parse_tokens)
            return cls(reloaded.value)  # type: ignore[arg-type]
        text = environ.get(TEXT_VARIABLE)
        if not text:
            return None
        grants = parse_tokens(text, TEXT_VARIABLE)
        return cls(lambda: grants)

    def roles(self, authorization: str | None) -> frozenset[str] | None:
        """What the bearer may do; None for nobody that is known."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest, found = _digest(token.strip()), None
        for known, roles in self._read():  # all of them, however early one fits
            if hmac.compare_digest(known, digest):
                found = roles
        return found

    def judge(self, path: str, authorization: str | None) -> Refusal | None:
        """Why a request for a clean path is not let in; None if it is."""
        wanted = needed(path)
        if wanted is None:
            return None
        roles = self.roles(authorization)
        if roles is None:
            message = "this server wants a token: Authorization: Bearer TOKEN"
            return Refusal(401, "Unauthenticated", message, "never")
        if ADMIN in roles or roles & wanted:
            return None
        names = " or ".join(sorted(wanted | {ADMIN}))
        return Refusal(403, "Forbidden", f"{path} is for tokens of the role {names}", "never")


def needed(path: str) -> frozenset[str] | None:
    """Roles one of which a clean path needs, besides admin; None: open to all. What is not known: admin."""
    if path == "/health":
        return None
    return _NEEDED.get(path) or _KINDS.get(classify(path)[1], frozenset((ADMIN,)))


def too_large(headers: Sequence[tuple[bytes, bytes]]) -> Refusal | None:
    """Why a request's headers are too much; None if they are not."""
    if len(headers) > MOST_HEADERS or sum(len(n) + len(v) for n, v in headers) > MOST_HEADER_BYTES:
        message = f"the headers exceed {MOST_HEADER_BYTES} bytes, or {MOST_HEADERS} in number"
        return Refusal(431, "HeadersTooLarge", message, "never")
    return None


class Guard:
    """In front of a replica's app. The engine never sees a token."""

    def __init__(self, app: App, tokens: Tokens | None) -> None:
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        refusal = too_large(headers)
        if refusal is None and self._tokens is not None:
            given = [value for name, value in headers if name.lower() == b"authorization"]
            text = given[0].decode("latin-1") if len(given) == 1 else None
            refusal = self._tokens.judge(clean_path(scope["path"]), text)
            scope = {**scope, "headers": without(headers, ("authorization",))}
        if refusal is None:
            await self._app(scope, receive, send)
            return
        await send_json(send, refusal.status, refusal.body(), {**refusal.headers(), **challenge(refusal)})


def challenge(refusal: Refusal) -> dict[str, str]:
    """What a 401 has to say besides (RFC 9110, 11.6.1)."""
    return {"www-authenticate": 'Bearer realm="stitch"'} if refusal.status == 401 else {}


def exposed(host: str, tokens: Tokens | None) -> str | None:
    """A warning for a server that anyone who reaches it may use."""
    if tokens is not None or host in ("127.0.0.1", "::1", "localhost"):
        return None
    return (
        f"whoever reaches {host or 'this machine'} may use this server: give it tokens (--token-file), or "
        "keep others away from it; docs/threat-model.md"
    )


def outgoing(
    file: Path | None,
    environ: Mapping[str, str] = os.environ,
    variables: tuple[str, str] = (REPLICA_VARIABLE, REPLICA_FILE_VARIABLE),
) -> Callable[[], str | None]:
    """The token that is shown to others (by default a gateway's to replicas), asked for anew each time.

    ``variables`` name the token and a file of it. Raises BadTokens and OSError.
    """
    named = environ.get(variables[1])
    file = file or (Path(named) if named else None)
    if file is not None:
        reloaded = Reloaded(file, lambda text, where: check_token(text.strip(), where))
        return lambda: str(reloaded.value())
    text = environ.get(variables[0])
    if not text:
        return lambda: None
    token = check_token(text, variables[0])
    return lambda: token
