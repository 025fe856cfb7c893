"""Tests that the search paths of a task include the targets of symbolic links."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from src.envs.harbor.search_paths import with_link_targets, with_linked_tools


async def run(script: str) -> bytes:
    process = await asyncio.create_subprocess_exec("sh", "-c", script, stdout=asyncio.subprocess.PIPE)
    return (await process.communicate())[0]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path.resolve()


async def test_all_links_on_the_way_to_a_path_are_followed(root: Path) -> None:
    (root / "it's 1.0" / "bin").mkdir(parents=True)
    (root / "link").symlink_to("it's 1.0")
    (root / "tool").symlink_to(root / "link")
    (root / "bin").symlink_to("tool/../link/bin")
    variables = {"PATH": f"{root}/tool/bin:{root}/bin:.:/no", "HOME": "/no"}
    paths = await with_link_targets(variables, run)
    assert paths["PATH"].split(":") == [
        *(f"{root}/{name}/bin" for name in ("tool", "link", "it's 1.0")),
        *(f"{root}/{name}" for name in ("bin", "link/bin", "it's 1.0/bin")),
        *(".", "/no"),
    ]
    assert paths["HOME"] == "/no"


async def test_only_preloaded_libraries_are_separated_by_spaces(root: Path) -> None:
    (root / "a b").touch()
    (root / "link").symlink_to("a b")
    paths = await with_link_targets({"LD_PRELOAD": f"/x {root}/link", "BASH_ENV": f"{root}/a b"}, run)
    assert paths == {"LD_PRELOAD": f"/x:{root}/link:{root}/a b", "BASH_ENV": f"{root}/a b"}


async def test_a_loop_of_links_ends(root: Path) -> None:
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")
    paths = await with_link_targets({"PATH": f"{root}/a/bin"}, run)
    assert paths == {"PATH": f"{root}/a/bin:{root}/b/bin"}


async def test_the_tools_of_links_in_path_are_added_to_path() -> None:
    listings = {
        "/usr/local/bin": "total 1\n"
        "lrwxrwxrwx 1 root root 20 Jan  1 00:00 yarn -> ../../../opt/yarn/bin/yarn\n"
        "lrwxrwxrwx 1 root root 20 Jan  1 00:00 app -> /opt/app/run\n"
        "-rwxr-xr-x 1 root root 20 Jan  1 00:00 other -> /opt/other/bin/x\n",
        "/etc/alternatives": "lrwxrwxrwx 1 root root 20 Jan  1 00:00 java -> /opt/java/jdk/bin/java\n",
    }

    async def list_directories(script: str) -> bytes:
        assert "/usr/local/bin /etc/alternatives" in script
        return "".join(f"{path}\0{listing}\0" for path, listing in listings.items()).encode()

    variables = {"PATH": "/usr/local/bin:.", "PWD": "/opt/app/source"}
    found = await with_linked_tools(variables, list_directories)
    assert found == {"PATH": "/usr/local/bin:/opt/java/bin:/opt/yarn/bin", "PWD": "/opt/app/source"}
    assert await with_linked_tools({"PATH": "/no"}, run) == {"PATH": "/no"}
