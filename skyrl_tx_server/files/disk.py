"""Checks of free disk space and quotas before a write."""

from __future__ import annotations

import shutil
from pathlib import Path

from skyrl_tx_server.errors import StorageError, UserError

SLACK_BYTES = 1 << 20  # for records, tensor tables and directories


def check_room(directory: Path, num_bytes: int) -> None:
    """Raise StorageError if the file system of `directory` has less free space than `num_bytes` plus
    SLACK_BYTES. The directory must exist."""
    free = shutil.disk_usage(directory).free
    if num_bytes + SLACK_BYTES > free:
        raise StorageError(
            f"{directory}: not enough disk space: {_mib(num_bytes)} to write, {_mib(free)} free; nothing was "
            "written. Free some space or delete checkpoints"
        )


def check_quota(used_bytes: int, num_bytes: int, quota_bytes: int, *, option: str) -> None:
    """Raise UserError if `num_bytes` more would exceed the quota, which `option` sets."""
    if used_bytes + num_bytes > quota_bytes:
        raise UserError(
            f"over the checkpoint quota: {_mib(num_bytes)} to write, {_mib(used_bytes)} of "
            f"{_mib(quota_bytes)} in use; nothing was written. Delete checkpoints, save with a ttl, or ask "
            f"the operator for a larger {option}"
        )


def check_count(count: int, limit: int) -> None:
    """Raise UserError if there are `limit` checkpoints already."""
    if count >= limit:
        raise UserError(
            f"over the checkpoint quota: you have {count} checkpoints; nothing was written. Delete "
            "checkpoints, save with a ttl, or ask the operator for a larger tenant_max_checkpoints"
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
