"""Options of the HTTP side: addresses, access, TLS, and limits of connections and requests."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

import chz

from skyrl_tx_server.config.bounds import YEAR_S, between, positive
from skyrl_tx_server.config.tenant_options import TenantOptions
from skyrl_tx_server.errors import ConfigError


@chz.chz
class HttpOptions(TenantOptions):
    """The address at which the server listens, and the rules for the requests that it accepts."""

    host: str = chz.field(default="127.0.0.1", doc="Address to listen on")
    port: int = chz.field(
        default=8000, metadata=between(0, 65535), doc="Port to listen on; 0 picks a free one"
    )
    allow_anyone: bool = chz.field(
        default=False,
        doc="Allow listening on an address that other machines can reach, without api_key and api_keys_file",
    )
    api_key: str | None = chz.field(
        default=None,
        repr=False,
        doc="Key of the operator, beginning with tml-. Every request must have this key or the key of a "
        "tenant, except health checks and downloads from a URL that the server issued. If neither api_key "
        "nor api_keys_file is set, every client that reaches the port is accepted. Pass the key in the "
        "environment variable SKYRL_TX_API_KEY or by api_key_file",
    )
    api_key_file: str | None = chz.field(
        default=None,
        doc="File that contains the api_key. A key on the command line is visible to every user of this "
        "machine while the server starts",
    )
    allowed_hosts: str | None = chz.field(
        default=None,
        doc="Host names, separated by commas, that the server accepts in the Host header of requests. It "
        "always accepts the value of host, localhost and loopback addresses. If host is not a loopback "
        "address, it also accepts the name of the machine and all IP addresses. A server with api_key or "
        "api_keys_file accepts all host names",
    )
    allowed_origins: str | None = chz.field(
        default=None,
        doc="Origins of web pages, such as https://example.org, separated by commas; requests from these "
        "pages are accepted; default: none",
    )
    max_connections: int = chz.field(
        default=4096,
        metadata=between(8, 1_000_000),
        doc="Connections that may be open at once; reduced if the limit on open files allows fewer",
    )
    ssl_certfile: str | None = chz.field(default=None, doc="Serve https with this certificate (PEM)")
    ssl_keyfile: str | None = chz.field(default=None, doc="Private key of ssl_certfile (PEM)")
    session_timeout_s: float = chz.field(
        default=300.0,
        metadata=positive(YEAR_S),
        doc="End a session whose client has sent no heartbeat, and no request for its models, samplers or "
        "futures, for this long",
    )
    max_request_mb: int = chz.field(
        default=64,
        metadata=positive(1024),
        doc="Largest body of a request in MiB, after decompression; only training requests in protobuf may "
        "be larger than 32 MiB",
    )

    @property
    def has_api_key(self) -> bool:
        """Whether requests must have the operator's key or a tenant's key. Routes with `needs_key=False`,
        such as the health check, are open nevertheless."""
        return self.api_key is not None or self.api_keys_file is not None

    @chz.validate
    def _check_api_key(self) -> None:
        if self.api_key is not None and not self.api_key.startswith("tml-"):
            raise ConfigError("api_key: must begin with tml-, because the Tinker SDK refuses other keys")
        if self.api_key is not None and not (
            self.api_key.isascii() and self.api_key.isprintable() and " " not in self.api_key
        ):
            raise ConfigError("api_key: must be ASCII text without spaces, because it is sent in a header")
        if not self.has_api_key and not self.allow_anyone and not is_loopback(self.host):
            raise ConfigError(
                f"host={self.host}: every client that reaches this machine could use and delete all models; "
                "pass api_key=tml-... or allow_anyone=true"
            )

    @chz.validate
    def _check_tls(self) -> None:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile and ssl_keyfile: only one of them is set; set both for https")
        for name, path in (("ssl_certfile", self.ssl_certfile), ("ssl_keyfile", self.ssl_keyfile)):
            if path is not None and not Path(os.path.expanduser(path)).is_file():
                raise ConfigError(f"{name}={path}: no such file")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`. The result is False for names other than localhost,
    because they may resolve to any address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
