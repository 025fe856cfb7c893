"""Tests that the search paths of a task include the targets of symbolic links."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from src.core.errors import SandboxError
from src.envs.harbor.search_paths import END_OF_OUTPUT, complete_output, linked_tools, with_link_targets


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


async def test_tools_to_which_links_in_path_lead_are_found(root: Path) -> None:
    """The links of this test lead to directories of the machine's /opt, which need not exist."""
    (root / "programs").mkdir()
    (root / "bin").symlink_to("programs")
    (root / "tool").symlink_to("/opt/tool-1")
    for name, target in {
        "a": "/opt/one/bin/a",
        "b": "../tool/bin/b",
        "c": "a",
        "d e": "/opt/script.sh",
        "f": "/usr/lib/f",
    }.items():
        (root / "programs" / name).symlink_to(target)
    (root / "programs" / "g -> h").touch()
    variables = await with_link_targets({"PATH": f"{root}/bin:.:/no"}, run)
    found = await linked_tools(variables["PATH"], run)
    assert {"/opt/one", "/opt/tool-1", "/opt/script.sh"} <= set(found)
    assert not {path for path in found if not path.startswith("/opt/")}


@pytest.mark.parametrize("variable", ["TIME_STYLE=long-iso", "QUOTING_STYLE=shell-always"])
async def test_variables_of_ls_do_not_hide_a_tool(root: Path, variable: str) -> None:
    (root / "a").symlink_to("/opt/one/bin/a")
    found = await linked_tools(str(root), lambda script: run(f"export {variable}\n{script}"))
    assert "/opt/one" in found


async def test_search_paths_that_are_cut_off_are_an_error(root: Path) -> None:
    (root / "link").symlink_to("target")

    async def without_readlink(script: str) -> bytes:
        return await run(f"readlink() {{ return 1; }}\n{script}")

    async def cut(script: str) -> bytes:
        return (await run(script))[:-20]

    for broken in (without_readlink, cut):
        with pytest.raises(SandboxError, match="could not be read completely"):
            await with_link_targets({"PATH": f"{root}/link"}, broken)


async def test_an_incomplete_script_is_run_again(root: Path) -> None:
    outputs = iter([b"", b"OCI runtime exec failed", b"a" + END_OF_OUTPUT])

    async def unreliable(script: str) -> bytes:
        return next(outputs)

    assert await complete_output("cat a", unreliable) == b"a"


async def test_thousands_of_paths_are_read_in_batches(root: Path) -> None:
    scripts: list[int] = []

    async def counted(script: str) -> bytes:
        scripts.append(len(script))
        return await run(script)

    (root / "link").symlink_to("target")
    paths = [f"{root}/link", *(f"{root}/{'x' * 60}{number}" for number in range(2000))]
    found = await with_link_targets({"PATH": ":".join(paths)}, counted)
    assert f"{root}/target" in found["PATH"].split(":") and max(scripts) < 2**17
