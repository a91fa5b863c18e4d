"""A small S3 server in this process, to have the bad manners of real ones. Signatures are not checked."""

from __future__ import annotations

import base64
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from stitch_s3.client import connect
from stitch_s3.store import S3Store
from stitch_s3.url import Location


@dataclass
class Manners:
    """Bad ones are to be switched on. ``answer`` may give (status, code) instead of serving a request."""

    conditions: bool = True
    conditions_on_complete: bool = True
    bare_tags: bool = False
    """If-Match is compared with the ETag's text without quotes, as Ceph 16 does."""
    checksums: bool = True
    """Without: they are taken and neither checked nor kept, and completing an upload tells no ETag."""
    ranges: bool = True
    missing_is_404: bool = True
    """If-Match where there is nothing is 404, as AWS says; else 412."""
    answer: Callable[[str, str, dict[str, list[str]]], tuple[int, str] | None] = lambda method, key, query: (
        None
    )
    ahead: float = 0.0
    """Seconds by which its clock is ahead."""
    garbage: bool = False
    page: tuple[int, dict[str, str]] | None = None
    """Status and headers of a page that is all it answers, as of what stands in between and is no server."""


@dataclass
class Object:
    data: bytes
    checksum: str = ""
    etag: str = ""
    written: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.etag = self.etag or hashlib.md5(self.data, usedforsecurity=False).hexdigest()


@dataclass
class FakeS3:
    manners: Manners = field(default_factory=Manners)
    objects: dict[str, Object] = field(default_factory=dict)
    uploads: dict[str, dict[int, Object]] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    signed: list[str] = field(default_factory=list)
    """The Authorization header of each write."""
    tokens: list[str] = field(default_factory=list)
    """Web identity tokens that keys were lent for."""
    endpoint: str = ""
    client: Any = None
    """One for all stores: making one takes a tenth of a second."""

    def reset(self) -> None:
        self.manners = Manners()
        for kept in (self.objects, self.uploads, self.requests, self.signed, self.tokens):
            kept.clear()

    def store(self, prefix: str = "", *, readback: str = "digest", **options: Any) -> S3Store:
        location = Location("bucket", prefix, endpoint=self.endpoint, readback=readback)
        return S3Store(location, client=self._shared, **options)

    def _shared(self) -> Any:
        if self.client is None:
            self.client = connect(
                Location("bucket", endpoint=self.endpoint), 16, credentials=("key", "secret")
            )
            self.client.close = lambda: None
        return self.client

    @contextmanager
    def serving(self) -> Iterator[FakeS3]:
        handler = type("Handler", (_Handler,), {"fake": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    fake: FakeS3
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        pass

    def date_time_string(self, timestamp: float | None = None) -> str:
        now = time.time() if timestamp is None else timestamp
        return super().date_time_string(now + self.fake.manners.ahead)

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        _, _, key = unquote(parts.path).lstrip("/").partition("/")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.fake.requests[self.command] += 1
        if (page := self.fake.manners.page) is not None:
            self._send(page[0], {"Content-Type": "text/html", **page[1]}, b"<html><body>hello<br></html>")
            return
        planned = self.fake.manners.answer(self.command, key, query)
        if planned is not None:
            self._refuse(*planned)
            return
        with self.fake.lock:
            status, headers, data = self._do(key, query, body)
        self._send(status, headers, data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _send(self, status: int, headers: dict[str, str], data: bytes = b"") -> None:
        self.send_response(status)
        length = headers.pop("Content-Length", str(len(data)))
        for name, value in {**headers, "Content-Length": length}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        error = _error(code)
        if self.path == "/":  # of STS
            error = b"<ErrorResponse>" + error + b"</ErrorResponse>"
        self._send(status, {"Content-Type": "application/xml"}, error)

    def _do(self, key: str, query: dict[str, list[str]], body: bytes) -> tuple[int, dict[str, str], bytes]:
        fake, method = self.fake, self.command
        if method == "GET" and "list-type" in query:
            return 200, {}, b"<html>hello</html>" if fake.manners.garbage else _listing(fake, query)
        if method == "POST" and not key:
            return 200, {"Content-Type": "text/xml"}, _lend(fake, parse_qs(body.decode()))
        if method == "POST" and "uploads" in query:
            name = f"u{len(fake.uploads)}"
            fake.uploads[name] = {}
            return 200, {}, f"<R><UploadId>{name}</UploadId></R>".encode()
        if "uploadId" in query:
            return self._multipart(key, query, body)
        if method == "PUT":
            return self._put(key, body)
        if method == "DELETE":
            fake.objects.pop(key, None)
            return 204, {}, b""
        return self._get(key)

    def _get(self, key: str) -> tuple[int, dict[str, str], bytes]:
        found = self.fake.objects.get(key)
        if found is None:
            return 404, {}, _error("NoSuchKey")
        headers = {"ETag": f'"{found.etag}"', "Last-Modified": self.date_time_string(found.written)}
        if found.checksum:
            headers["x-amz-checksum-sha256"] = found.checksum
        if self.command == "HEAD":
            return 200, {**headers, "Content-Length": str(len(found.data))}, b""
        wanted = self.headers.get("Range")
        if wanted is None or not self.fake.manners.ranges:
            return 200, headers, found.data
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or 10**12), len(found.data) - 1)
        if start >= len(found.data):
            return 416, {}, _error("InvalidRange")
        headers["Content-Range"] = f"bytes {start}-{end}/{len(found.data)}"
        return 206, headers, found.data[start : end + 1]

    def _put(self, key: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        self.fake.signed.append(self.headers.get("Authorization", ""))
        if (refused := self._condition(key)) is not None:
            return refused
        made = Object(body)
        if (wrong := self._checksum(made)) is not None:
            return wrong
        self.fake.objects[key] = made
        return 200, {"ETag": f'"{made.etag}"'}, b""

    def _checksum(self, made: Object) -> tuple[int, dict[str, str], bytes] | None:
        given = self.headers.get("x-amz-checksum-sha256")
        if not self.fake.manners.checksums or given is None:
            return None
        made.checksum = given
        if given != base64.b64encode(hashlib.sha256(made.data).digest()).decode():
            return 400, {}, _error("BadDigest")
        return None

    def _condition(self, key: str) -> tuple[int, dict[str, str], bytes] | None:
        manners, found = self.fake.manners, self.fake.objects.get(key)
        failed = 412, {}, _error("PreconditionFailed")
        if not manners.conditions:
            return None
        if self.headers.get("If-None-Match") == "*" and found is not None:
            return failed
        expected = self.headers.get("If-Match")
        if expected is None:
            return None
        if found is None:
            return (404, {}, _error("NoSuchKey")) if manners.missing_is_404 else failed
        return None if expected == (found.etag if manners.bare_tags else f'"{found.etag}"') else failed

    def _multipart(
        self, key: str, query: dict[str, list[str]], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        name = query["uploadId"][0]
        parts = self.fake.uploads.get(name)
        if parts is None:
            return 404, {}, _error("NoSuchUpload")
        if self.command == "DELETE":
            del self.fake.uploads[name]
            return 204, {}, b""
        if self.command == "PUT":
            made = Object(body)
            if (wrong := self._checksum(made)) is not None:
                return wrong
            parts[int(query["partNumber"][0])] = made
            return 200, {"ETag": f'"{made.etag}"'}, b""
        if self.fake.manners.conditions_on_complete and (refused := self._condition(key)) is not None:
            return refused
        made = Object(b"".join(parts[number].data for number in sorted(parts)))
        made.etag = f"{made.etag}-{len(parts)}"
        tag = ""
        if self.fake.manners.checksums:
            digests = b"".join(base64.b64decode(parts[number].checksum) for number in sorted(parts))
            made.checksum = base64.b64encode(hashlib.sha256(digests).digest()).decode() + f"-{len(parts)}"
            tag = f"<ETag>&quot;{made.etag}&quot;</ETag>"
        self.fake.objects[key] = made
        del self.fake.uploads[name]
        return 200, {}, f"<R>{tag}</R>".encode()


def _listing(fake: FakeS3, query: dict[str, list[str]]) -> bytes:
    prefix, most = query.get("prefix", [""])[0], int(query.get("max-keys", ["1000"])[0])
    after, delimiter = (query.get(name, [""])[0] for name in ("continuation-token", "delimiter"))
    names = set()
    for key in (key for key in fake.objects if key.startswith(prefix)):
        folder, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
        names.add(prefix + folder + found if found else key)
    rest = sorted(name for name in names if name > after)
    rows = "".join(
        f"<Contents><Key>{escape(name)}</Key><Size>{len(fake.objects[name].data)}</Size></Contents>"
        if name in fake.objects
        else f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
        for name in rest[:most]
    )
    more = len(rest) > most
    token = f"<NextContinuationToken>{escape(rest[most - 1])}</NextContinuationToken>" if more else ""
    return f"<R><IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}</R>".encode()


def _lend(fake: FakeS3, form: dict[str, list[str]]) -> bytes:
    """AssumeRoleWithWebIdentity, as STS answers it."""
    token = form["WebIdentityToken"][0]
    fake.tokens.append(token)
    until = (datetime.now(UTC) + timedelta(minutes=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    keys = f"<AccessKeyId>LENT-{token}</AccessKeyId><SecretAccessKey>s</SecretAccessKey>"
    keys += f"<SessionToken>t</SessionToken><Expiration>{until}</Expiration>"
    name, inner = "AssumeRoleWithWebIdentity", f"<Credentials>{keys}</Credentials>"
    return f"<{name}Response><{name}Result>{inner}</{name}Result></{name}Response>".encode()


def _error(code: str) -> bytes:
    quoted = "key wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"
    return f"<Error><Code>{code}</Code><Message>{quoted}</Message></Error>".encode()
