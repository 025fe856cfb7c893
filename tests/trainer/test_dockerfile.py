"""Tests the Dockerfile parser: refused files, error messages, COPY of archives and non-UTF-8 comments."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest

from src.core.errors import ConfigError
from src.envs.sandbox.dockerfile import BuildPlan, Copy, MakeDirectory, Run, parse_dockerfile
from src.envs.sandbox.launch import BASE_ENVIRONMENT


@pytest.mark.parametrize(
    ("dockerfile", "message"),
    [
        (
            "FROM a\nFROM b\n",
            "Dockerfile:2: the sandbox cannot build more than one stage; use environment_type=docker",
        ),
        (
            "FROM a\nRUN apt-get update && apt-get install -y tmux no-such-package-x\n",
            "cannot install no-such-package-x",
        ),
        ("FROM a\nRUN pip install numpy\n", "cannot reach the network for `pip install`"),
        ("FROM a\nRUN cd / && curl -LsSf https://example.org | sh\n", "cannot reach the network for `curl`"),
        ("FROM a\nUSER alice\n", "cannot run as the user alice"),
        ("FROM a\nCOPY --from=b /x /y\n", "cannot COPY with --from=b"),
        ("FROM a\nADD --chown=bob x /y\n", "cannot ADD with --chown=bob"),
        ("FROM a\nCOPY --parents x /y\n", "cannot COPY with --parents;"),
        ("FROM a\nCOPY ../up /y\n", "../up does not exist in the build context"),
        ("FROM a\nADD https://example.org/x /y\n", "cannot fetch https://example.org/x"),
        ("FROM a\nADD x\n", "ADD needs a source and a destination"),
        ("FROM a\nADD x.tar.gz /y\n", "cannot unpack x.tar.gz with ADD"),
        ('FROM a\nSHELL ["/bin/bash", "-lc"]\n', "cannot use SHELL"),
        ("FROM a\nRUN --mount=target=/x,source=y cp /x/a /b\n", "cannot RUN with --mount=target=/x,source=y"),
        ("FROM a\nRUN <<E\n#!/usr/bin/env awk\nE\n", "cannot run a here-document with /usr/bin/env awk"),
        ("FROM a\nENV A=${B#c}\n", "cannot expand ${B#c}"),
        ("FROM a\nENV A\n", "Dockerfile:2: ENV: A has no value"),
        (
            "# syntax=x/y:1\n# Escape = `\nFROM a\n",
            "Dockerfile:2: the sandbox cannot use the escape character `",
        ),
        ("FROM a\nONBUILD RUN true\n", "cannot execute ONBUILD"),
        ("RUN true\n", "no FROM line"),
    ],
)
def test_unsupported_dockerfiles_are_refused_with_the_reason(
    tmp_path: Path, dockerfile: str, message: str
) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(dockerfile)
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_dockerfile(path)


def test_add_refuses_an_archive_with_any_name(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "data.bin", "w:bz2") as archive:
        archive.addfile(tarfile.TarInfo("a"))
    (tmp_path / "zeros.bin").write_bytes(bytes(10240))
    for name, text in (("add", "ADD data.bin /y/"), ("all", "ADD *.bin /y/")):
        (tmp_path / name).write_text(f"FROM a\n{text}\n")
        with pytest.raises(ConfigError, match=r"cannot unpack .* with ADD"):
            parse_dockerfile(tmp_path / name)
    plan = build_plan(tmp_path, "FROM a\nADD zeros.bin /y/\nCOPY data.bin /y/\n")
    assert len(plan.steps) == 2


@pytest.mark.parametrize(
    ("patterns", "copied"),
    [
        ("# comment\n/answers/\n!answers/keep\n**/*.pyc\nc[0-9].md\n", {"answers/keep", "src/b.py", "cx.md"}),
        ("*\n!src\n**/b.p?c\n", {"src/b.py"}),
        ("", {"answers/a", "answers/keep", "src/deep/b.pyc", "src/b.py", "c1.md", "cx.md"}),
    ],
)
def test_files_that_dockerignore_excludes_are_not_copied(
    tmp_path: Path, patterns: str, copied: set[str]
) -> None:
    for name in ("answers/a", "answers/keep", "src/deep/b.pyc", "src/b.py", "c1.md", "cx.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".dockerignore").write_text(f"{patterns}\nDockerfile\n")
    (copy,) = build_plan(tmp_path, "FROM a\nCOPY . /x/\n").steps
    assert isinstance(copy, Copy)
    assert {target.removeprefix("/x/") for source, target in copy.files if source.is_file()} == {
        *copied,
        ".dockerignore",
    }
    (tmp_path / "Dockerfile.dockerignore").write_text("[z-a]\n")
    with pytest.raises(ConfigError, match=r"Dockerfile.dockerignore has an invalid pattern"):
        build_plan(tmp_path, "FROM a\nCOPY . /x\n")
    (tmp_path / "Dockerfile.dockerignore").unlink()
    if "answers/a" not in copied:
        with pytest.raises(ConfigError, match="answers/a does not exist in the build context"):
            build_plan(tmp_path, "FROM a\nCOPY answers/a /x\n")


def test_a_linked_file_is_copied_under_the_name_of_the_link(tmp_path: Path) -> None:
    (tmp_path / "real").touch()
    (tmp_path / "link").symlink_to("real")
    (copy,) = build_plan(tmp_path, "FROM a\nCOPY link /y/\n").steps
    assert isinstance(copy, Copy) and copy.files == ((tmp_path / "real", "/y/link"),)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${NEW:-$OLD/x}", "old/x"),
        ("${NEW:-${NEWER:-z}}", "z"),
        ("a${OLD:+:$OLD}", "a:old"),
        ("${EMPTY-d}${EMPTY:-e}${NEW-f}", "ef"),
        ("${EMPTY+g}${EMPTY:+h}${NEW+i}${OLD}$", "gold$"),
    ],
)
def test_variables_are_expanded_as_in_docker(tmp_path: Path, text: str, value: str) -> None:
    plan = build_plan(tmp_path, f"FROM a\nENV OLD=old EMPTY=\nENV VALUE={text}\n")
    assert plan.environment["VALUE"] == value


@pytest.mark.parametrize(
    ("setting", "value"),  # as in Docker 20.10
    [
        ("A='$OLD'", "$OLD"),
        (r'A="\$OLD"', "$OLD"),
        (r"A=\$OLD", "$OLD"),
        (r'A="\\$OLD"', r"\old"),
        (""" A="it's $OLD" """, "it's old"),
        ("A x  $OLD", "x  old"),
        ("A\t'x $OLD' z", "x $OLD z"),
        ('"A"="$OLD"', "old"),
        ("A='$' B='y'", "$"),
    ],
)
def test_quotes_prevent_expansion_as_in_docker(tmp_path: Path, setting: str, value: str) -> None:
    plan = build_plan(tmp_path, f"# escape=\\\nFROM a\nENV OLD=old\nENV {setting}\nWORKDIR '/$OLD'\n")
    assert plan.environment["A"] == value and plan.workdir == "/$OLD"


def test_copy_does_not_unpack_an_archive(tmp_path: Path) -> None:
    (tmp_path / "x.tar").touch()
    (tmp_path / "Dockerfile").write_text("FROM a\nCOPY x.tar /y\n")
    (copy,) = parse_dockerfile(tmp_path / "Dockerfile").steps
    assert copy == Copy(files=((tmp_path / "x.tar", "/y"),), mode=None, line=2, is_one_file=True)


def test_a_comment_may_contain_bytes_that_are_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_bytes(b"# caf\xe9\nFROM a\nWORKDIR /app\n")
    (step,) = parse_dockerfile(tmp_path / "Dockerfile").steps
    assert step == MakeDirectory(path="/app")


def build_plan(directory: Path, dockerfile: str) -> BuildPlan:
    (directory / "Dockerfile").write_text(dockerfile)
    return parse_dockerfile(directory / "Dockerfile")


def scripts(plan: BuildPlan) -> list[str]:
    return [step.script for step in plan.steps if isinstance(step, Run)]


def test_path_has_a_value_before_the_first_env(tmp_path: Path) -> None:
    plan = build_plan(tmp_path, "FROM a\nENV PATH=/opt/tool:$PATH\n")
    assert plan.environment == {"PATH": f"/opt/tool:{BASE_ENVIRONMENT['PATH']}"}


@pytest.mark.parametrize(
    "command", ("echo $((1<<3)) > /a", 'python3 -c "print(1 << EOF)"', "cat <<< word > /a")
)
def test_only_a_word_begins_a_here_document(tmp_path: Path, command: str) -> None:
    plan = build_plan(tmp_path, f"FROM a\nRUN {command}\nRUN second\n")
    assert scripts(plan) == [command, "second"]


def test_a_here_document_ends_at_its_marker(tmp_path: Path) -> None:
    plan = build_plan(tmp_path, "FROM a\nRUN cat <<'END' > /a\n  one\nEND\nRUN <<E\ntwo\nE\nRUN three\n")
    assert scripts(plan) == ["cat <<'END' > /a\n  one\nEND", "two", "three"]


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("<<E cat > /a", "<<E cat > /a\ntwo\nE"),
        ("--mount=type=cache,target=/c <<E", "two"),
        ("--mount=type=cache,target=/c cat <<E", "cat <<E\ntwo\nE"),
    ],
)
def test_a_here_document_keeps_the_command_of_its_line(tmp_path: Path, command: str, script: str) -> None:
    assert scripts(build_plan(tmp_path, f"FROM a\nRUN {command}\ntwo\nE\n")) == [script]


def test_a_glob_skips_files_that_dockerignore_excludes(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()
    (tmp_path / ".dockerignore").write_text("b.txt\n")
    (copy,) = build_plan(tmp_path, "FROM a\nCOPY *.txt /app/\n").steps
    assert copy == Copy(files=((tmp_path / "a.txt", "/app/a.txt"),), mode=None, line=2)
    with pytest.raises(ConfigError, match=r"Dockerfile:2: b\*.txt matches no file of the build context"):
        build_plan(tmp_path, "FROM a\nCOPY b*.txt /app/\n")


def test_continued_lines_are_joined_without_a_space(tmp_path: Path) -> None:
    text = "FROM a\nENV LIST=/a:\\\n# comment\n\n/b\nRUN echo 'x\\  \n   y'\nRUN echo z\\\\\nRUN last\n"
    plan = build_plan(tmp_path, text)
    assert plan.environment == {"LIST": "/a:/b"}
    assert scripts(plan) == ["echo 'x   y'", "echo z\\\\", "last"]


def test_run_uses_the_shell_of_docker(tmp_path: Path) -> None:
    text = 'FROM a\nRUN one\nSHELL ["/bin/bash", "-o", "pipefail", "-ec"]\nRUN two\n'
    text += 'SHELL ["sh", "-c"]\nRUN three\n'
    plan = build_plan(
        tmp_path, f"{text}RUN <<E\n#!/bin/bash\nfour\nE\nRUN --mount=type=cache,target=/c five\n"
    )
    assert [(step.shell, step.script) for step in plan.steps if isinstance(step, Run)] == [
        ("sh", "one"),
        ("bash", "set -o pipefail -e\ntwo"),
        ("sh", "three"),
        ("bash", "#!/bin/bash\nfour"),
        ("sh", "five"),
    ]


@pytest.mark.parametrize(
    "line",
    ("COPY a 'b", 'COPY ["a", 1]', "ENV A='b", "ARG A='b", "WORKDIR 'b", "ADD [1", f"COPY {'x' * 5000} y"),
)
def test_a_malformed_instruction_gives_a_one_line_error(tmp_path: Path, line: str) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(f"FROM debian\n{line}\n")
    with pytest.raises(ConfigError, match=r"Dockerfile:2: \w+") as refused:
        parse_dockerfile(path)
    assert "\n" not in str(refused.value)
