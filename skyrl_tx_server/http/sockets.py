"""The listening socket and the TLS files, which are opened and checked before the model is loaded."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from skyrl_tx_server.config.http_options import HttpOptions
from skyrl_tx_server.errors import ConfigError

BACKLOG = 2048


def open_socket(options: HttpOptions) -> socket.socket:
    """Return a socket that is bound and listens. Raise ConfigError if the address is not available."""
    address_text = f"host={options.host} port={options.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM
        )[0]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise ConfigError(
            f"{address_text}: {reason}; pass an address or name of this machine as host="
        ) from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{address_text}: {error.strerror}; stop the program that listens there, or pass another host= "
            "or port="
        ) from None
    return listener


def tls_files(options: HttpOptions) -> tuple[Path, Path] | None:
    """Return the paths of the certificate and the key, or None for plain HTTP. Raise ConfigError if they
    cannot be used."""
    if options.ssl_certfile is None or options.ssl_keyfile is None:
        return None
    files = Path(options.ssl_certfile).expanduser(), Path(options.ssl_keyfile).expanduser()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*files)
    except OSError as error:
        raise ConfigError(
            f"ssl_certfile={files[0]} ssl_keyfile={files[1]}: not a certificate and its key: {error}"
        ) from None
    return files
