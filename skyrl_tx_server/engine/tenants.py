"""Tenants: the key file, and the owners of objects.

The id of a session contains its owner: `tenant-<name>.session-<hex>`. The ids of models, samplers and
training runs begin with the id of their session, and checkpoint paths contain the id of their run. No other
record of ownership is needed, even after a restart. An id without the prefix `tenant-<name>.` belongs to
`DEFAULT_TENANT`, the operator: the holder of `api_key`, or every client if the server has no key.

A key file contains one line for each key, `name:<SHA-256 of the key in hex>`. Keys have 256 random bits
(`python -m skyrl_tx_server.keys add`), so they cannot be guessed and need no slow password hash.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
from pathlib import Path

from skyrl_tx_server.engine.operations import DEFAULT_TENANT
from skyrl_tx_server.errors import ConfigError

logger = logging.getLogger(__name__)

NAME = re.compile(r"[a-z0-9_-]{1,40}")
_OWNED = re.compile(r"(?:tinker://)?tenant-([a-z0-9_-]{1,40})\..*", re.DOTALL)
_DIGEST = re.compile(r"[0-9a-f]{64}")


def id_prefix(tenant: str) -> str:
    """Return the prefix of the ids of a tenant's sessions and of the objects in them."""
    return "" if tenant == DEFAULT_TENANT else f"tenant-{tenant}."


def owner_of(identifier: str) -> str:
    """Return the tenant that owns an id or a tinker:// path.

    >>> owner_of("tinker://tenant-alice.session-1:train:0/weights/last"), owner_of("session-1:train:0")
    ('alice', 'default')
    """
    owned = _OWNED.fullmatch(identifier)
    return DEFAULT_TENANT if owned is None else owned[1]


def check_name(name: str) -> None:
    """Raise ConfigError if `name` is not a valid name of a tenant."""
    if not NAME.fullmatch(name) or name == DEFAULT_TENANT:
        raise ConfigError(
            f"tenant name {name!r} is not allowed; use 1 to 40 lower-case letters, digits, '_' and '-', but "
            f"not {DEFAULT_TENANT!r}"
        )


def digest(key: str) -> str:
    """Return the SHA-256 of a key in hexadecimal, as stored in a key file."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(file: Path) -> dict[str, str]:
    """Return a map of key digest -> tenant. Raise ConfigError if the file is invalid or cannot be read."""
    try:
        status, text = file.stat(), file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_keys_file={file}: cannot be read: {error}") from None
    if status.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"api_keys_file={file}: every user of this machine can write to it; run chmod 600 {file}"
        )
    keys: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, key_digest = line.strip().partition(":")
        if not _DIGEST.fullmatch(key_digest):
            raise ConfigError(
                f"api_keys_file={file}: line {number} is not name:<SHA-256 of the key in 64 hex digits>"
            )
        try:
            check_name(name)
        except ConfigError as error:
            raise ConfigError(f"api_keys_file={file}: line {number}: {error}") from None
        if keys.setdefault(key_digest, name) != name:
            raise ConfigError(
                f"api_keys_file={file}: line {number} gives the key of tenant {keys[key_digest]} to {name} "
                f"too"
            )
    return keys


class TenantKeys:
    """The key file of a running server, which is read again when it changes."""

    def __init__(self, file: Path) -> None:
        """Raise ConfigError if the file cannot be used."""
        self._file = file
        self._version = _version(file)
        self._keys = read_keys(file)

    def __len__(self) -> int:
        """Return the number of tenants, each of which may have several keys."""
        return len(set(self._keys.values()))

    def tenant_of(self, key: str) -> str | None:
        """Return the tenant of a key, or None if the key is unknown. The call takes the same time for every
        key, so that its duration reveals nothing about the keys."""
        digest_of_key, owner = digest(key), None
        for key_digest, tenant in self._keys.items():
            if hmac.compare_digest(digest_of_key, key_digest):
                owner = tenant
        return owner

    def reload_if_changed(self) -> None:
        """Read the file again if it has changed. If it cannot be used, the keys stay as they are."""
        version = _version(self._file)
        if version == self._version:
            return
        self._version = version
        try:
            self._keys = read_keys(self._file)
        except ConfigError as error:
            logger.error("the API keys were not reloaded: %s", error)
        else:
            logger.info("read %d keys of %d tenants from %s", len(self._keys), len(self), self._file)


def _version(file: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
