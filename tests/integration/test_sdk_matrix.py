"""Runs five versions of the unmodified SDK, each in its own virtual environment, against the real server."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scripts import sdk_matrix

VERSIONS = ("0.6.0", "0.16.1", "0.25.0", "0.32.0", "0.38.0")
"""The oldest and the newest version, and versions before and after the changes in saving, protobuf and
futures."""


def test_old_and_new_sdks_work_with_the_server(tmp_path: Path) -> None:
    unreachable = sdk_matrix.package_index_problem()
    if unreachable is not None:
        pytest.skip(
            f"package index unreachable, so no environments for the SDK versions {', '.join(VERSIONS)}: "
            f"{unreachable}"
        )
    with sdk_matrix.serving(tmp_path) as url, ThreadPoolExecutor(2) as pool:
        passed = dict(
            zip(
                VERSIONS,
                pool.map(lambda version: sdk_matrix.run(version, tmp_path / version, url), VERSIONS),
                strict=True,
            )
        )
    assert all(passed.values()), passed


def test_arguments_that_are_no_versions_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert sdk_matrix.main(["--url", "http://h"]) == 2
    assert "--url, http://h: neither a version nor one of the options" in capsys.readouterr().err
    assert sdk_matrix.main(["--help"]) == 0
    assert "python -m scripts.sdk_matrix" in capsys.readouterr().out


def test_the_documents_state_the_tested_versions() -> None:
    contract, limitations = (
        (sdk_matrix.ROOT / "docs" / name).read_text() for name in ("server-contract.md", "limitations.md")
    )
    listed = contract.split("These\nreleases are tested: ", 1)[1].split("\n\n", 1)[0]
    assert tuple(re.findall(r"\d+\.\d+\.\d+", listed)) == sdk_matrix.VERSIONS
    assert f"with {len(sdk_matrix.VERSIONS)} versions of the\n  official SDK" in limitations
