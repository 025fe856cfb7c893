"""Refuse requests to unknown host names, and requests that a web page sends without permission.

A web page that a user of this machine visits can send requests to loopback addresses. The browser marks these
requests with an `Origin` or a `Sec-Fetch-Site` header. If the host name of the page itself resolves to this
machine (DNS rebinding), the browser treats such a request as a request to the page's own site, so these
headers do not reveal it. The `Host` header does, because it contains the page's host name. The Tinker SDK,
OpenAI's clients and curl send neither `Origin` nor `Sec-Fetch-Site`.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from starlette.requests import Request

from skyrl_tx_server.config.http_options import is_loopback
from skyrl_tx_server.errors import ForbiddenError

_CHECKED_HEADERS = frozenset({b"host", b"origin", b"sec-fetch-site"})


@dataclass(frozen=True, kw_only=True, slots=True)
class AccessPolicy:
    """The accepted `Host` and `Origin` headers. The names of loopback addresses are always accepted."""

    allowed_hosts: frozenset[str] | None = None  # lower case, without port; None: every host
    allows_addresses: bool = False  # also every IP address; DNS rebinding works only with names
    allowed_origins: frozenset[str] = frozenset()  # lower case, as in https://example.org


def access_policy(
    *, host: str, has_key: bool, allowed_hosts: str | None, allowed_origins: str | None
) -> AccessPolicy:
    """Return the policy of a server that listens on `host`. With a key every host name is accepted: web pages
    do not have the key, and the `Host` header may contain the name of a reverse proxy."""
    host = host.lower().removesuffix(".")
    machine_names = [] if is_loopback(host) else [socket.gethostname().lower()]
    hosts = frozenset({host, *machine_names, *map(host_name, _split(allowed_hosts))})
    return AccessPolicy(
        allowed_hosts=None if has_key else hosts,
        allows_addresses=not is_loopback(host),
        allowed_origins=frozenset(origin.lower().removesuffix("/") for origin in _split(allowed_origins)),
    )


def _split(names: str | None) -> list[str]:
    return [] if names is None else [name.strip() for name in names.split(",") if name.strip()]


def check_access(policy: AccessPolicy, request: Request) -> None:
    """Raise ForbiddenError if a web page that is not allowed sent the request, or if the server does not
    serve the host name of the request."""
    headers = [(name, value) for name, value in request.scope["headers"] if name in _CHECKED_HEADERS]
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) < len(headers):
        _check_page(policy, dict(headers))
    if policy.allowed_hosts is not None and (len(hosts) != 1 or not _is_served(policy, hosts[0])):
        raise ForbiddenError(
            f"this server does not serve the host name {_quoted(b', '.join(hosts))}; start it with "
            f"allowed_hosts=NAME, or with an API key"
        )


def _check_page(policy: AccessPolicy, headers: Mapping[bytes, bytes]) -> None:
    origin, fetch_site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
    if origin is not None:
        if origin.decode("latin-1").lower() not in policy.allowed_origins:
            raise ForbiddenError(
                f"requests from web pages are refused (Origin {_quoted(origin)}); start the server with "
                f"allowed_origins=ORIGIN to accept them"
            )
    elif fetch_site not in (None, b"none", b"same-origin"):
        raise ForbiddenError(
            f"requests from other web pages are refused (Sec-Fetch-Site {_quoted(fetch_site or b'')}); open "
            "the address directly, or send the request from a program"
        )


def host_name(host: str) -> str:
    """Return the name or address in a Host header, in lower case, without port, brackets and trailing dot.
    The brackets of an IPv6 address can be left out if no port follows.

    >>> host_name("LocalHost.:8000"), host_name("[::1]:8000"), host_name("127.0.0.1"), host_name("FE80::1")
    ('localhost', '::1', '127.0.0.1', 'fe80::1')
    """
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host if host.count(":") > 1 else host.partition(":")[0].removesuffix(".")


@lru_cache(maxsize=256)
def _is_served(policy: AccessPolicy, host: bytes) -> bool:
    name = host_name(host.decode("latin-1"))
    if name in (policy.allowed_hosts or ()) or is_loopback(name):
        return True
    return policy.allows_addresses and _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _quoted(value: bytes) -> str:
    return repr(value[:80].decode("latin-1"))
