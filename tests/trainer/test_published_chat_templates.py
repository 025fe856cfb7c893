"""Compares our chat templates and their checks with the published templates, which PyPI packages contain.

The packages are downloaded to .cache once (63 MB) and read without installation. Without access to PyPI, the
tests are skipped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest

from tests.fakes import chat_templates
from tests.fakes.chat_templates import (
    FAMILIES,
    OPENING,
    QUESTION,
    TOOLS,
    Family,
    conversations,
    family_tokenizer,
)

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "trl": "trl==1.16.0 --hash=sha256:c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
    "xinference": "xinference==1.10.1 --hash=sha256:"
    "05c6f67dd4b9aa4ffe4e8fe62fde0f3fb1526845142eefce91fa3b9200c8a441",
}
TRL_FILES = {
    "qwen2_5": "qwen2_5",
    "qwen3": "qwen3",
    "qwen3_2507": "qwen3_instruct_2507",
    "llama3_1": "llama3_1",
}
XINFERENCE_MODELS = {"deepseek_v3_1": "Deepseek-V3.1"}
families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def published_template(family: Family) -> str:
    """Return the published template. Skips the test if its package cannot be downloaded."""
    if family.name in TRL_FILES:
        path = f"trl/chat_templates/{TRL_FILES[family.name]}.jinja"
        return _wheel("trl").read(path).decode()
    models = json.loads(_wheel("xinference").read("xinference/model/llm/llm_family.json"))
    name = XINFERENCE_MODELS[family.name]
    return next(model["chat_template"] for model in models if model["model_name"] == name)


@cache
def _download(package: str) -> Path | str:
    """Return the path of the wheel, or the reason why it is missing."""
    directory = ROOT / ".cache" / "chat_templates"
    requirement = PACKAGES[package]
    wheels = f"{package}-{requirement.split()[0].partition('==')[2]}-*.whl"
    directory.mkdir(parents=True, exist_ok=True)
    if not list(directory.glob(wheels)):
        (directory / f"{package}.txt").write_text(requirement)
        pip = [f"{sys.base_prefix}/bin/python3", "-m", "pip"]
        if uv := shutil.which("uv"):
            pip = [uv, "tool", "run", "pip"]
        command = [
            *pip,
            "download",
            "-q",
            "--no-deps",
            "--only-binary=:all:",
            "--require-hashes",
            "--retries=0",
        ]
        command += ["--timeout=10", "-d", str(directory), "-r", str(directory / f"{package}.txt")]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{package} cannot be downloaded: {error}"
        if result.returncode:
            last_line = (result.stderr.strip().splitlines() or ["pip failed"])[-1]
            return f"{package} cannot be downloaded: {last_line}"
    return next(directory.glob(wheels))


def _wheel(package: str) -> zipfile.ZipFile:
    wheel = _download(package)
    if isinstance(wheel, str):
        pytest.skip(wheel)
    return zipfile.ZipFile(wheel)


@families
@pytest.mark.seed_behaviour(62)
def test_the_published_template_passes_the_checks(family: Family):
    tokenizer = family_tokenizer(family, published_template(family))
    chat_templates.check_tools_are_visible(family, tokenizer)
    chat_templates.check_thinking_is_off(family, tokenizer)
    chat_templates.check_extend_equals_render(family, tokenizer)
    chat_templates.check_calls_are_read_back(family, tokenizer)


@families
@pytest.mark.seed_behaviour(66)
def test_our_template_equals_the_published_one(family: Family):
    """The texts are equal from the first question on, and both templates render the same JSON for tools."""
    ours, published = family_tokenizer(family), family_tokenizer(family, published_template(family))
    for name, messages in conversations().items():
        for tools in (None, TOOLS):
            for thinking in (False, True):
                for add_generation_prompt in (False, True):
                    texts = [
                        tokenizer.apply_chat_template(
                            list(messages),
                            tools=tools,
                            tokenize=False,
                            add_generation_prompt=add_generation_prompt,
                            enable_thinking=thinking,
                            thinking=thinking,
                        )
                        for tokenizer in (ours, published)
                    ]
                    ends = [text[text.index(str(QUESTION["content"])) :] for text in texts]
                    assert ends[0] == ends[1], (name, tools is not None, thinking, add_generation_prompt)
    for tool in TOOLS if family.shows_tools else ():
        written = json.dumps(tool, ensure_ascii=False, indent=4 if family.name == "llama3_1" else None)
        for tokenizer in (ours, published):
            assert written in tokenizer.apply_chat_template(list(OPENING), tools=TOOLS, tokenize=False)
