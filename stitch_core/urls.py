"""URLs of servers, as people write them."""

from __future__ import annotations

from urllib.parse import urlsplit


def is_http(url: str) -> bool:
    """Whether a server can be meant by a URL: http or https, a host, and no port that cannot be."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port, such as 99999, or half of an IPv6 address
        return False
