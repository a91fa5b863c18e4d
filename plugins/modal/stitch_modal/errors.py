"""What a failure of the Modal SDK, or of the mount, means for a caller of a store."""

from __future__ import annotations

import re

from stitch_core.ports import NoStore, StoreError, Unavailable, WriteRefused
from stitch_core.stores.local import REFUSED


class Refused(StoreError):
    """Modal refuses, and will again. The message says what to do."""


HINTS = {
    "AuthError": "this process has no valid Modal token: run `modal token new`, or set MODAL_TOKEN_ID and "
                 "MODAL_TOKEN_SECRET; a container of Modal has its own",
    "PermissionDeniedError": "this token or container may not use the Volume or the Dict: check the "
                             "workspace, ?environment= and the environment's roles",
    "VersionError": "this release of the Modal SDK is no longer served: install modal>=1.6.2,<1.7",
    "RequestSizeError": "the object is too large for a Modal Dict",
}  # fmt: skip

# What Modal's tokens look like (ak-..., as-...), and anything that long and random.
_SECRET = re.compile(r"\b(?:ak|as|wk|ws)-[A-Za-z0-9]{6,}|[A-Za-z0-9+/=_-]{40,}")


def translate(error: Exception, what: str) -> StoreError | None:
    """The store's error for one of the SDK's, of the connection below it or of the mount; None for others."""
    import modal.exception as modal

    name, said = type(error).__name__, _SECRET.sub("***", str(error))[:300]
    text = f"{what}: {name}: {said}"
    if isinstance(error, modal.NotFoundError):
        return NoStore(
            f"{what}: there is no such Volume or environment ({said}): `modal volume create NAME --version 2`"
            " makes one, ?environment= names another environment"
        )
    if name in HINTS and isinstance(error, modal.Error):
        return Refused(f"{text}: {HINTS[name]}")
    if isinstance(error, modal.ConflictError):
        return Unavailable(text)
    if isinstance(error, modal.InvalidError | modal.UnimplementedError | modal.SerializationError):
        return Refused(text)
    if isinstance(error, OSError) and error.errno in REFUSED:
        return WriteRefused(f"{what}: {error.filename or ''} cannot be written: {error.strerror}")
    # The rest is the way to the server and its bad days; RuntimeError is how the SDK says "conflict".
    if isinstance(error, modal.Error | OSError | RuntimeError | TimeoutError):
        return Unavailable(text)
    return None
