"""Tests which files of an agent `FilteredArchive` carries over to the environment in which the verifier runs.

Even a forged archive adds only files that the agent could have created in its own environment.
"""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Iterable

import pytest

from src.envs.harbor.carried_files import (
    CarryRules,
    FileChanges,
    FileEntry,
    FilteredArchive,
)
from src.envs.harbor.search_paths import search_variables

RULES = CarryRules({"PATH": "/opt/tools:/usr/bin:/bin"})


def member(name: str, *, kind: bytes = tarfile.REGTYPE, mode: int = 0o644, link: str = "") -> tarfile.TarInfo:
    """Return a member with a pax header, which can contain any name."""
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.linkname = kind, mode, link
    info.pax_headers = {"path": name, **({"linkpath": link} if link else {})}
    return info


def filtered(members: Iterable[tarfile.TarInfo], content: bytes = b"") -> tarfile.TarFile:
    """Return the archive of the members that are carried over. Each file has the first bytes of `content`."""
    source, target = io.BytesIO(), io.BytesIO()
    with tarfile.TarFile(fileobj=source, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info in members:
            archive.addfile(info, io.BytesIO(content))
    source.seek(0)
    result = FilteredArchive(target, RULES, FileChanges())
    result.add(source)
    result.close()
    target.seek(0)
    return tarfile.open(fileobj=target)


def carried(members: Iterable[tarfile.TarInfo]) -> dict[str, int]:
    """Return the names and modes of the members that are carried over."""
    with filtered(members) as archive:
        return {info.name: info.mode for info in archive}


def test_a_name_with_a_zero_byte_is_not_carried_over() -> None:
    forged = [member("conftest.py\0x"), member("etc/profile\0x")]
    forged.append(member("app/link", kind=tarfile.SYMTYPE, link="/tests\0x"))
    assert carried([*forged, member("app/honest")]) == {"app/honest": 0o644}


def test_a_hard_link_has_the_mode_of_its_file() -> None:
    program = member("app/run", mode=0o755)
    links = [member(name, kind=tarfile.LNKTYPE, link="app/run") for name in ("opt/tools/cat", "app/copy")]
    assert carried([program, *links]) == {"app/run": 0o755, "app/copy": 0o755}


def test_hard_links_to_a_file_that_is_left_out_are_files() -> None:
    excluded = member("root/.cache/a", mode=0o640)
    excluded.size = 600
    names = ("opt/tools/cat", "app/first", "app/second")
    links = [member(name, kind=tarfile.LNKTYPE, link="root/.cache/a") for name in names]
    with filtered([excluded, *links], b"x" * 600) as archive:
        tools, first, second = archive.getmembers()
        assert [tools.name, first.name, second.name] == list(names)
        assert tools.isreg() and tools.mode == 0o640
        assert first.linkname == second.linkname == "opt/tools/cat"
        content = archive.extractfile(second)
        assert content is not None and content.read() == b"x" * 600


def test_a_directory_in_place_of_a_link_is_carried_over() -> None:
    link = member("app/a", kind=tarfile.SYMTYPE, link="b")
    directory = member("app/a", kind=tarfile.DIRTYPE, mode=0o755)
    assert carried([link, member("app/a/x")]).keys() == {"app/a"}
    assert carried([link, member("app/a/x"), directory, member("app/a/y")]).keys() == {"app/a", "app/a/y"}


def test_an_existing_account_is_carried_over_unchanged() -> None:
    before = b"root:x:0:0::/root:/bin/sh\na:x:9:9::/a:/bin/sh\n"
    after = b"b:x:0:0::/app:/app/sh\nroot:x:0:0::/app:/app/sh\n"
    source, target = io.BytesIO(), io.BytesIO()
    with tarfile.TarFile(fileobj=source, mode="w") as archive:
        info = tarfile.TarInfo("etc/passwd")
        info.size = len(after)
        archive.addfile(info, io.BytesIO(after))
        archive.addfile(member("app/last"))
    source.seek(0)
    filtered = FilteredArchive(target, RULES, FileChanges(), accounts=before)
    filtered.add(source)
    filtered.close()
    target.seek(0)
    with tarfile.open(fileobj=target) as archive:
        assert archive.getnames() == ["etc/passwd", "app/last"]
        content = archive.extractfile("etc/passwd")
        assert content is not None and content.read() == before + b"b:x:0:0::/app:/app/sh\n"


def test_no_link_replaces_the_accounts() -> None:
    links = (member("etc/passwd", kind=kind, link="app/a") for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE))
    assert carried([member("app/a"), *links]) == {"app/a": 0o644}
    assert not RULES.removes("/etc/passwd")


def test_the_standard_library_of_python_is_not_carried_over() -> None:
    rules = CarryRules({"PATH": "/srv/venv/bin:/usr/bin"})
    file = FileEntry(kind="f", mode=0o644, size=1)
    excluded = (
        "/srv/venv/pyvenv.cfg",
        "/srv/venv/bin/pyvenv.cfg",
        "/srv/venv/lib/python3.12/json/decoder.py",
    )
    assert not any(rules.carries(path, file) or rules.removes(path) for path in excluded)
    assert rules.carries("/srv/venv/lib/data.txt", file) and rules.carries("/app/pyvenv.cfg", file)


def test_a_tool_in_opt_is_not_carried_over_unless_it_is_the_work() -> None:
    file = FileEntry(kind="f", mode=0o644, size=1)
    path = "/opt/node/lib/node_modules/npm/index.js"
    for workdir, is_carried in (("/", False), ("/opt", False), ("/opt/node", True), ("/opt/node/lib", True)):
        rules = CarryRules({"PATH": "/opt/node/bin:/usr/bin", "PWD": workdir})
        assert rules.carries(path, file) is is_carried and rules.removes(path) is is_carried
    assert CarryRules({"PATH": "/opt/bin", "PWD": "/app"}).carries("/opt/data", file)


@pytest.mark.parametrize(
    "name",
    [
        *("GIT_CONFIG_GLOBAL", "PIP_CONFIG_FILE", "LD_AUDIT", "XDG_CONFIG_HOME", "PYTHONUSERBASE"),
        *("CURL_HOME", "HGRCPATH", "CCACHE_CONFIGPATH", "npm_config_userconfig"),
    ],
)
def test_files_that_variables_name_are_not_carried_over(name: str) -> None:
    rules = CarryRules(search_variables({"PATH": "/usr/bin", name: "/opt/settings"}))
    file = FileEntry(kind="f", mode=0o644, size=1)
    assert not rules.carries("/opt/settings", file) and not rules.removes("/opt/settings")
    assert rules.carries("/opt/data", file)


@pytest.mark.parametrize("name", ["LD_LIBRARY_PATH", "XDG_CONFIG_HOME"])
def test_the_work_is_carried_over_if_a_variable_names_its_directory(name: str) -> None:
    file = FileEntry(kind="f", mode=0o644, size=1)
    for path in ("/opt/app", "/opt/app/source", "/opt/app/source/"):
        assert CarryRules({"PATH": "/bin", "PWD": "/opt/app/source", name: path}).carries(
            "/opt/app/source/answer", file
        )
    rules = CarryRules({"PATH": "/bin", "PWD": "/opt/app/source"}, tools=["/opt/app", "/opt/a:b"])
    assert rules.carries("/opt/app/source/answer", file) and not rules.carries("/opt/a:b/run", file)
    rules = CarryRules({"PATH": "/bin", "PWD": "/app", "LD_LIBRARY_PATH": "/app"})
    assert rules.carries("/app/answer", file) and not rules.carries("/app/libc.so.6", file)
    rules = CarryRules({"PATH": "/bin", "PWD": "/opt/app/source", name: "/opt/app/source/lib"})
    assert not rules.carries("/opt/app/source/lib/x", file)


def test_files_that_variables_of_a_task_name_are_carried_over() -> None:
    names = ("OUTPUT_PATH", "DATA_HOME", "APP_CONFIG", "SRC", "PIPELINE", "XDG_RUNTIME_DIR", "PYTHON_DIR")
    names += ("GIT_CONFIG_VALUE_0", "CCACHE_BASEDIR")
    rules = CarryRules(search_variables({name: f"/data/{name}" for name in names}))
    assert all(rules.carries(f"/data/{name}", FileEntry(kind="f", mode=0o644, size=1)) for name in names)


def test_module_paths_are_not_carried_over_unless_they_are_the_work() -> None:
    file = FileEntry(kind="f", mode=0o644, size=1)
    for workdir, is_carried in (("/app", False), ("/opt/lib", True), ("/opt", True), ("/opt/lib/a", True)):
        rules = CarryRules({"NODE_PATH": "/opt/lib/", "PWD": workdir})
        assert rules.carries("/opt/lib/json.js", file) is is_carried


def test_package_managers_read_no_files_of_the_agent() -> None:
    file = FileEntry(kind="f", mode=0o644, size=1)
    excluded = (
        "/etc/apt/apt.conf.d/99hook",
        "/etc/apt/sources.list",
        "/etc/dpkg/dpkg.cfg",
        "/var/lib/dpkg/status",
    )
    assert not any(RULES.carries(path, file) or RULES.removes(path) for path in excluded)


def test_settings_that_programs_look_for_are_not_carried_over() -> None:
    file = FileEntry(kind="f", mode=0o644, size=1)
    excluded = (
        *(
            "/Directory.Build.props",
            "/justfile",
            "/.cargo/config.toml",
            "/.git/config",
            "/package.json",
            "/go.work",
            *("/etc/mavenrc", "/etc/inputrc", "/etc/mercurial/hgrc", "/etc/ccache.conf"),
        ),
        *("/etc/xdg/pip/pip.conf", "/usr/local/share/lua/5.4/a.lua", "/var/lib/gems/3.1.0/a.rb"),
    )
    assert not any(RULES.carries(path, file) or RULES.removes(path) for path in excluded)
    carried_paths = ("/answer.txt", "/app/.cargo/config.toml", "/app/package.json", "/usr/local/share/a")
    assert all(RULES.carries(path, file) for path in carried_paths)


def test_the_variables_of_the_verifier_count() -> None:
    rules = CarryRules(search_variables({"PATH": "/a", "HOME": "/root"}, {"PATH": "/b", "HOME": "/app/home"}))
    program = FileEntry(kind="f", mode=0o755, size=1)
    excluded = ("/a/cat", "/b/cat", "/root/.bashrc", "/app/home/.bashrc", "/app/home/bin/cat")
    assert not any(rules.carries(path, program) for path in excluded)
    assert rules.carries("/app/cat", program)


def test_deep_directories_do_not_take_minutes() -> None:
    deep = "app" + "/d" * 1500
    started = time.process_time()
    assert len(carried(member(f"{deep}/{number}") for number in range(2000))) == 2000
    assert time.process_time() - started < 10
