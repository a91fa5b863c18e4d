"""The boto3 client of a location. boto3 is imported here, at the first call, and nowhere else."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stitch_core.ports import Unavailable
from stitch_core.stores import BadUrl

from .errors import Refused
from .url import Location

CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0
"""Between two pieces of an answer. SeaweedFS makes contended writers wait for seconds."""

TOKEN_ENV = "MODAL_IDENTITY_TOKEN"
"""Where Modal puts the token that names a container; its ``_FILE`` is rewritten as the token is renewed."""


def check_installed() -> None:
    """Raises BadUrl where boto3 is missing."""
    if importlib.util.find_spec("boto3") is None:
        raise BadUrl("s3 needs boto3: pip install 'stitch-rl[s3]'")


def connect(
    location: Location,
    connections: int,
    environ: Mapping[str, str] = os.environ,
    *,
    credentials: tuple[str, str] | None = None,
) -> Any:
    """A client that makes each request once. Raises what boto3 does, and Refused.

    ``credentials`` (access key, secret key) are used instead of those of the environment or a profile.
    """
    import boto3
    import botocore.session
    from botocore.config import Config

    endpoint = location.endpoint or environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    core = botocore.session.Session(profile=location.profile)
    region = location.region or environ.get("AWS_REGION") or core.get_config_variable("region") or "us-east-1"
    core.set_config_variable("region", region)
    token = None if credentials else web_identity(location, environ)
    if credentials:
        core.set_credentials(*credentials)
    elif token is not None:
        core._credentials = _assume(core, *token)
    addressing = location.addressing or ("path" if endpoint else "auto")
    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        max_pool_connections=connections,
        # A second try of a conditional write that landed would be told that it failed: retries are ours.
        retries={"total_max_attempts": 1, "mode": "standard"},
        # Every write has its SHA-256 in a header that is signed, so the body need not be hashed again for
        # the signature; and the default, a CRC32 in a trailer, is what older servers refuse or store as data.
        s3={"addressing_style": addressing, "payload_signing_enabled": False},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        tcp_keepalive=True,
        user_agent_extra="stitch",
    )
    if location.ca is not None and not os.path.isfile(location.ca):
        raise Refused(f"{location}: there is no file {location.ca}, which ?ca= names")
    bundle = core.get_config_variable("ca_bundle")
    if location.ca is None and bundle and not os.path.exists(bundle) and not _is_plain(endpoint):
        raise Refused(f"{location}: there is no file {bundle}, which AWS_CA_BUNDLE or the profile names")
    session = boto3.Session(botocore_session=core)
    return session.client("s3", endpoint_url=endpoint, config=config, verify=location.ca)


def _is_plain(endpoint: str | None) -> bool:
    return endpoint is not None and endpoint.lower().startswith("http://")


def web_identity(
    location: Location, environ: Mapping[str, str] = os.environ
) -> tuple[str, Callable[[], str]] | None:
    """The role and what reads its token, where the token is in a variable; botocore knows the rest itself.

    Raises Refused if the URL asks for it and it is not there.
    """
    role = location.role or environ.get("AWS_ROLE_ARN")
    if location.token_env is None:
        others = ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ACCESS_KEY_ID", "AWS_PROFILE")
        if not role or location.profile or any(environ.get(name) for name in others):
            return None
        if not (environ.get(TOKEN_ENV) or environ.get(TOKEN_ENV + "_FILE")):
            return None
    name = location.token_env or TOKEN_ENV
    if not role:
        raise Refused(f"the web identity token in {name} needs a role: set AWS_ROLE_ARN or give ?role=")

    def read() -> str:
        path = environ.get(name + "_FILE")
        try:
            text = Path(path).read_text("ascii") if path else environ.get(name, "")
        except (OSError, ValueError) as error:
            raise Unavailable(f"the web identity token in {path} cannot be read: {error}") from error
        if not text.strip():
            raise Refused(f"there is no web identity token in {name}: is this process where it is given?")
        return text.strip()

    return role, read


def _assume(core: Any, role: str, read: Callable[[], str]) -> Any:
    from botocore.credentials import (
        AssumeRoleWithWebIdentityCredentialFetcher,
        DeferredRefreshableCredentials,
    )

    fetcher = AssumeRoleWithWebIdentityCredentialFetcher(
        client_creator=core.create_client,
        web_identity_token_loader=read,  # called at every renewal: a token that is kept goes stale
        role_arn=role,
        extra_args={"RoleSessionName": "stitch"},
    )
    return DeferredRefreshableCredentials(fetcher.fetch_credentials, "assume-role-with-web-identity")
