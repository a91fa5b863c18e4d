"""What a failure of boto3 means for a caller of a store.

Statuses and codes as https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html lists them.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from stitch_core.ports import Conflict, NotFound, StoreError, Unavailable
from stitch_core.stores.keys import BadKey


class Refused(StoreError):
    """The server or the account refuses, and will again. The message says what to do."""


class Damaged(Unavailable):
    """What arrived is not what was sent, says the server; it kept nothing."""


BUSY = {
    "ConditionalRequestConflict", "InternalError", "OperationAborted", "RequestTimeout", "ServiceUnavailable",
    "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded",
    "OperationTimedOut", "NoSuchUpload",
}  # fmt: skip
DAMAGED = {"BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "InvalidDigest",
           "IncompleteBody"}  # fmt: skip

KEYS_HINT = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, name a profile with ?profile=, or give a role and a "
    "web identity token"
)
HINTS = {
    "AccessDenied": "these credentials may not do this: allow s3:GetObject, s3:PutObject, s3:DeleteObject, "
                    "s3:ListBucket and s3:AbortMultipartUpload on the bucket and its objects",
    "ExpiredToken": "the credentials have expired: renew them and start again, or use a role and a web "
                    "identity token, which are renewed by themselves",
    "InvalidAccessKeyId": "the server does not know this access key: " + KEYS_HINT,
    "SignatureDoesNotMatch": "the secret key does not fit: see AWS_SECRET_ACCESS_KEY or the profile",
    "RequestTimeTooSkewed": "this machine's clock is off by more than 15 minutes: set it right",
    "NoSuchBucket": "there is no such bucket there: create it, or check its name and ?endpoint=",
    "PermanentRedirect": "the bucket is in another region: say which with ?region=",
    "AuthorizationHeaderMalformed": "the bucket is in another region: say which with ?region=",
    "IllegalLocationConstraintException": "the bucket is in another region: say which with ?region=",
    "NotImplemented": "the server has no conditional writes or no checksums: a store needs both",
    "EntityTooLarge": "the object is larger than the server takes",
    "InvalidIdentityToken": "the web identity token is not accepted: see the trust policy of the role",
    "407": "the proxy in between wants a login: give it in HTTPS_PROXY, or name the host in NO_PROXY",
}  # fmt: skip
MISSING = {"NoSuchKey", "NoSuchVersion"}
NO_ANSWER = "that is no answer of an S3 server: check ?endpoint= and what is in between"
ALIASES = {
    "ExpiredTokenException": "ExpiredToken", "TokenRefreshRequired": "ExpiredToken",
    "AccountProblem": "AccessDenied", "AllAccessDisabled": "AccessDenied", "Forbidden": "AccessDenied",
    "403": "AccessDenied", "401": "InvalidAccessKeyId", "InvalidToken": "InvalidAccessKeyId",
    "UnrecognizedClientException": "InvalidAccessKeyId", "301": "PermanentRedirect", "501": "NotImplemented",
}  # fmt: skip

# What a server quotes of the request: a key id, or anything that long and random.
_SECRET = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b|[A-Za-z0-9+/=_-]{32,}")


def status_of(error: Exception) -> int:
    """The HTTP status of an error that is the server's answer, else 0."""
    return int(_response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: Exception) -> str:
    """Its code, such as NoSuchKey, else nothing."""
    return str(_response(error).get("Error", {}).get("Code", ""))


def _response(error: Exception) -> dict[str, Any]:
    # Errors of the connection have the attribute too, as None or an HTTP response.
    response = getattr(error, "response", None)
    return response if isinstance(response, dict) else {}


def translated(error: Exception, what: str, *, condition: bool = False) -> Exception:
    """The store's error for ``error``, or ``error`` itself. ``condition``: the request had one."""
    if isinstance(error, StoreError):
        return error
    # 404: what AWS answers to If-Match where there is nothing.
    if status_of(error) == 412 or (condition and status_of(error) == 404 and code_of(error) in MISSING):
        return Conflict(f"{what}: it is not as it was read")
    return translate(error, what) or error


def without_reason(error: Exception) -> bool:
    """Whether the answer had no body, as all to a HEAD, so that it says that it refuses and not why."""
    return code_of(error).isdecimal() and status_of(error) in (301, 307, 400, 401, 403, 404)


def translate(error: Exception, what: str) -> StoreError | None:
    """The store's error for one of boto3, botocore or the connection below them; None for anything else.

    A failed precondition is the caller's to catch before. Never quotes what could be a secret.
    """
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    if isinstance(error, boto.ClientError):
        return _answered(error, what)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return Refused(f"{what}: there are no credentials: {KEYS_HINT}")
    if isinstance(error, boto.ProfileNotFound | boto.ConfigNotFound | boto.ConfigParseError):
        return Refused(f"{what}: {type(error).__name__}: check ?profile= and the files in ~/.aws")
    if isinstance(error, boto.SSLError) and (told := _untrusted(error)) is not None:
        return Refused(f"{what}: {told}")
    if isinstance(error, boto.ParamValidationError | boto.UnknownServiceError):
        return Refused(f"{what}: {type(error).__name__}: {_clean(str(error))}")
    if isinstance(error, boto.TokenRetrievalError | boto.UnauthorizedSSOTokenError | boto.SSOTokenLoadError):
        return Refused(f"{what}: the single sign-on has ended: run `aws sso login`")
    if isinstance(error, RecursionError):  # how botocore follows a redirect to where it came from
        return Unavailable(f"{what}: it is redirected in a circle: {NO_ANSWER}")
    if not isinstance(error, boto.BotoCoreError | ResponseParserError | HTTPError | OSError):
        return None
    # The rest is the way to the server: timeouts, resets, answers cut short, XML that ends too early.
    return Unavailable(f"{what}: {type(error).__name__}: {_clean(str(error))}")


def _untrusted(error: Any) -> str | None:
    """What is wrong with the server's certificate; None where a second try may help."""
    parts, said = urlsplit(str(error.kwargs.get("endpoint_url", ""))), str(error.kwargs.get("error", ""))
    endpoint = f"{parts.scheme}://{parts.netloc}"
    if "WRONG_VERSION_NUMBER" in said or "HTTP_REQUEST" in said:
        return f"{endpoint} does not speak TLS: is it http://?"
    if "[X509" in said:
        return "the file that AWS_CA_BUNDLE or ?ca= names holds no certificate"
    if "match" in said:
        return f"the certificate of {endpoint} is for another name: {said}"
    reason = said.partition("certificate verify failed: ")[2].partition(" (_ssl")[0]
    if not reason and "CERTIFICATE_VERIFY_FAILED" not in said:
        return None
    return (
        f"the certificate of {endpoint} is not trusted ({reason or 'certificate verify failed'}): name the "
        "file with the certificate of who signed it in AWS_CA_BUNDLE or with ?ca="
    )


def _answered(error: Any, what: str) -> StoreError:
    status, code = status_of(error), code_of(error)
    code = ALIASES.get(code, code)
    said = _clean(str(error.response.get("Error", {}).get("Message", "")))
    text = f"{what}: {status} {code}" + (f" ({said})" if said and said != code else "")
    if code in DAMAGED:
        return Damaged(f"{text}: the bytes were damaged on the way")
    if code in BUSY or status in (408, 409, 429) or (status >= 500 and code != "NotImplemented"):
        return Unavailable(text)
    if code == "NoSuchBucket":
        return Refused(f"{text}: {HINTS[code]}")
    if status == 404:
        # A page of a load balancer says nothing about the object.
        return NotFound(f"{what}: no such object") if code in MISSING else Unavailable(f"{text}: {NO_ANSWER}")
    if code == "KeyTooLongError":
        return BadKey(text)
    hint = HINTS.get(code) or {403: HINTS["AccessDenied"], 401: HINTS["InvalidAccessKeyId"]}.get(status)
    return Refused(f"{text}: {hint}" if hint else text)


def _clean(text: str) -> str:
    return _SECRET.sub("***", text)[:300]
