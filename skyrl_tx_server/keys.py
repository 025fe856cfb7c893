"""Manage the tenants' API keys in the file of the option `api_keys_file`.

    python -m skyrl_tx_server.keys add NAME file=KEYS      create a key of tenant NAME and print it
    python -m skyrl_tx_server.keys remove NAME file=KEYS   remove all keys of tenant NAME
    python -m skyrl_tx_server.keys list file=KEYS          print the names of the tenants

The file stores the SHA-256 of each key. The key itself is printed once and cannot be recovered. A tenant may
have several keys. A running server reads a changed file within seconds; if the file is invalid, the server
logs an error and keeps the previous keys.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

from skyrl_tx_server.config.command_line import print_help
from skyrl_tx_server.engine.tenants import check_name, digest, read_keys
from skyrl_tx_server.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Run the command in `argv`. Return the exit status: 0, or 2 after a one-line error on stderr."""
    if not argv or argv[0] == "help" or "--help" in argv or "-h" in argv:
        print_help(str(__doc__).strip())
        return 0
    try:
        return _run(argv[0], argv[1:])
    except ConfigError as error:
        print(f"keys: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"keys: {error.filename or 'file'}: {error.strerror}", file=sys.stderr)
        return 2


def _run(command: str, arguments: Sequence[str]) -> int:
    files = [argument.removeprefix("file=") for argument in arguments if argument.startswith("file=")]
    names = [argument for argument in arguments if "=" not in argument]
    if (
        command not in ("add", "remove", "list")
        or len(files) != 1
        or len(names) != (command != "list")
        or len(arguments) != 1 + len(names)
    ):
        raise ConfigError("expected add NAME file=KEYS, remove NAME file=KEYS or list file=KEYS; see --help")
    file = Path(files[0]).expanduser()
    match command:
        case "list":
            for name in sorted(set(read_keys(file).values())):
                print(name)
        case "add":
            print(add(file, names[0]))
        case _:
            remove(file, names[0])
    return 0


def add(file: Path, name: str) -> str:
    """Create a key of tenant `name`, add its SHA-256 to the file, and return the key. The file is created if
    necessary. Raise ConfigError if the name is invalid, if the file is invalid or cannot be read, or if the
    file belongs to another user or group and the caller may not create a file with this owner. Raise OSError
    if the file cannot be written."""
    check_name(name)
    key = f"tml-{secrets.token_urlsafe(32)}"
    with _locked(file):
        text = ""
        if file.exists():
            read_keys(file)
            text = file.read_text(encoding="utf-8")
        separator = "" if text.endswith("\n") or not text else "\n"
        _replace(file, f"{text}{separator}{name}:{digest(key)}\n")
    return key


def remove(file: Path, name: str) -> None:
    """Remove all keys of tenant `name`. Raise ConfigError if the tenant has no key, if the file is invalid or
    cannot be read, or if the file belongs to another user or group and the caller may not create a file with
    this owner. Raise OSError if the file cannot be written."""
    with _locked(file):
        if name not in read_keys(file).values():
            raise ConfigError(f"{file} has no key of tenant {name}; list file={file} prints the tenants")
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        _replace(file, "".join(line for line in lines if line.strip().partition(":")[0] != name))


@contextlib.contextmanager
def _locked(file: Path) -> Generator[None]:
    """Hold a lock, so that only one process changes the file. The lock is on the directory, because every
    change replaces the file and a lock on the old file would not exclude a process that opens the new one."""
    descriptor = os.open(file.resolve().parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(file: Path, text: str) -> None:
    """Replace the file atomically by a file with the content `text` and the same mode and owner. A file that
    does not exist yet gets mode 600."""
    target = file.resolve()
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if target.exists():  # a server that runs as another user must still be able to read the file
            status = target.stat()
            os.fchmod(descriptor, status.st_mode & 0o777)
            try:
                os.fchown(descriptor, status.st_uid, status.st_gid)
            except PermissionError:
                raise ConfigError(
                    f"{target} belongs to another user or group, and you cannot create a file with that "
                    "owner; run this command as the owner of the file or as root"
                ) from None
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
