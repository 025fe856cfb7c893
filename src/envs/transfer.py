"""Files between the host and a sandbox; what comes out was made by an agent and is not trusted."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import IO

from src.errors import SandboxError


def files_below(source: Path, target: str) -> list[tuple[Path, str]]:
    """Everything in a host directory, each with its place below `target` inside."""
    return [(path, str(PurePosixPath(target, path.relative_to(source).as_posix()))) for path in sorted(source.rglob("*"))]


def lay_down(received: IO[bytes], target: Path) -> None:
    """Write downloaded bytes to a file of their own, never through a link that is already there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    received.seek(0)
    with target.open("xb") as file:
        shutil.copyfileobj(received, file)


def extract_plain_files(archive: IO[bytes], target: Path) -> None:
    """Unpack an archive made by an agent: regular files and directories only, never a link, nothing outside `target`."""
    target.mkdir(parents=True, exist_ok=True)
    archive.seek(0)

    def keep(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        if not (member.isreg() or member.isdir()):
            return None
        try:
            return tarfile.data_filter(member, path)
        except tarfile.FilterError:
            return None

    try:
        with tarfile.open(fileobj=archive, mode="r:") as tar:
            tar.extractall(target, filter=keep)
    except tarfile.TarError as error:
        raise SandboxError(f"cannot unpack a download into {target}: {error}") from error
