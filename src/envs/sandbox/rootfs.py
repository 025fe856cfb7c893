"""The files of a new sandbox, besides the host's /usr: the sandbox's /etc and a replacement for apt."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

ETC_FILES = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": (
        "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nservices: files\nprotocols: files\n"
    ),
    "shells": "/bin/sh\n/bin/bash\n",
    "profile": (
        'export PATH="${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}"\n'
        "if [ -n \"${BASH_VERSION-}\" ]; then PS1='\\u@\\h:\\w\\$ '; fi\numask 022\n"
    ),
    "bash.bashrc": "[ -z \"${PS1-}\" ] || PS1='\\u@\\h:\\w\\$ '\n",
    # A tmux pane keeps the history limit that is set when the pane is created, by default 2,000 lines.
    # Terminus-2 raises the limit only after it has created the pane.
    "tmux.conf": "set -g history-limit 100000\n",
}
# Files that are copied from the host if they exist. Programs in /usr read them. They hold no personal data.
HOST_ETC_FILES = (
    "ld.so.cache",
    "mime.types",
    "magic",
    "protocols",
    "services",
    "debian_version",
    "localtime",
    "inputrc",
)

PACKAGES_FILE = "usr/local/share/sandbox/packages"

# This script replaces apt and apt-get. `apt-get install` succeeds for packages and programs that the host's
# /usr already provides.
APT = """#!/bin/bash
# The sandbox uses the host's programs and cannot install others. Packages of the host count as installed.
verb=
packages=()
previous=
for argument; do
    option=$previous
    previous=$argument
    case $option in
    -o | --option | -t | --target-release | --default-release | -c | --config-file) continue ;;
    esac
    case $argument in
    -*) ;;
    *=*) packages+=("${argument%%=*}") ;;
    *) if [ -z "$verb" ]; then verb=$argument; else packages+=("$argument"); fi ;;
    esac
done
case $verb in
install)
    for package in "${packages[@]}"; do
        package=${package%%:*}
        if ! grep -qxF -- "$package" /usr/local/share/sandbox/packages 2>/dev/null &&
            ! command -v -- "$package" >/dev/null; then
            echo "E: Unable to locate package $package (this sandbox only has the programs of the host)" >&2
            exit 100
        fi
        echo "$package is already installed."
    done
    ;;
update | upgrade | full-upgrade | dist-upgrade | clean | autoclean | autoremove) ;;
*)
    echo "E: apt-get $verb: not possible in this sandbox" >&2
    exit 100
    ;;
esac
"""


def build_rootfs(directory: Path) -> Path:
    """Write the files to `directory`/skeleton, unless this directory exists, and return its path."""
    skeleton = directory / "skeleton"
    if skeleton.exists():
        return skeleton
    building = directory / "skeleton.new"
    shutil.rmtree(building, ignore_errors=True)
    etc = building / "etc"
    etc.mkdir(parents=True)
    for name in HOST_ETC_FILES:
        source = Path("/etc", name)
        if source.is_file():
            shutil.copyfile(source, etc / name)
    for name, text in ETC_FILES.items():
        (etc / name).write_text(text)
    if Path("/usr/lib/os-release").is_file():
        (etc / "os-release").symlink_to("../usr/lib/os-release")
    binaries = building / "usr/local/bin"
    binaries.mkdir(parents=True)
    for name in ("apt-get", "apt"):
        (binaries / name).write_text(APT)
        (binaries / name).chmod(0o755)
    packages = building / PACKAGES_FILE
    packages.parent.mkdir(parents=True)
    packages.write_text("".join(f"{package}\n" for package in sorted(installed_packages())))
    for path in (building, *building.rglob("*")):
        if not path.is_symlink():  # the user of a sandbox must be able to read it, whatever the umask is
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    building.rename(skeleton)
    return skeleton


@cache
def installed_packages() -> frozenset[str]:
    """Return the names of the installed Debian packages, or an empty set if the host does not use dpkg."""
    try:
        status = Path("/var/lib/dpkg/status").read_text(errors="replace")
    except OSError:
        return frozenset()
    names = set()
    for paragraph in status.split("\n\n"):
        fields = dict(
            line.split(": ", 1)
            for line in paragraph.splitlines()
            if ": " in line and not line.startswith(" ")
        )
        if fields.get("Status", "").endswith(" installed"):
            names.add(fields["Package"])
    return frozenset(names)
