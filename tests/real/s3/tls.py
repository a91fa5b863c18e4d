"""TLS in front of a server, with certificates of an authority that only the test knows. Needs `openssl`."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Authority:
    """Its own certificate ``ca``, and the one that it gave the server for ``name``."""

    ca: Path
    certificate: Path
    key: Path


def make_authority(directory: Path, name: str = "IP:127.0.0.1") -> Authority:
    """``name`` as a subjectAltName of https://docs.openssl.org/3.0/man5/x509v3_config/ ."""
    directory.mkdir()
    made = Authority(*(directory / part for part in ("ca.pem", "server.pem", "server.key")))
    request, extensions = directory / "server.csr", directory / "extensions"
    extensions.write_text(f"subjectAltName={name}\n")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _openssl("req", "-x509", *curve, "-subj", f"/CN={directory.name} authority", "-days", "2",
             "-keyout", directory / "ca.key", "-out", made.ca)  # fmt: skip
    _openssl("req", *curve, "-subj", "/CN=server", "-keyout", made.key, "-out", request)
    _openssl("x509", "-req", "-in", request, "-CA", made.ca, "-CAkey", directory / "ca.key",
             "-CAcreateserial", "-days", "2", "-extfile", extensions, "-out", made.certificate)  # fmt: skip
    return made


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


class TlsFront:
    """Ends TLS and passes the bytes on, unread. ``endpoint`` is its own."""

    def __init__(self, upstream: str, authority: Authority) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname, parts.port)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(authority.certificate, authority.key)
        self._tasks: set[asyncio.Task[None]] = set()
        self.endpoint = ""

    async def __aenter__(self) -> TlsFront:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._context)
        self.endpoint = f"https://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, ahead = await asyncio.open_connection(*self._upstream)
        try:
            await asyncio.gather(_copy(reader, ahead), _copy(behind, writer))
        finally:
            for one in (ahead, writer):
                one.close()
                with contextlib.suppress(OSError, ssl.SSLError):
                    await one.wait_closed()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    writer.close()
