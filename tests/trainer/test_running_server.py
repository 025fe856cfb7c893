"""Tests that the launcher finds the folder of the model of a running server."""

from __future__ import annotations

from pathlib import Path

from scripts.running_server import tokenizer_folder
from skyrl_tx_server.http.app_state import HttpSettings
from skyrl_tx_server.http.http_handler import StartupState
from tests.fakes.server import fake_context, serving


def test_the_folder_of_a_served_model_is_found(tmp_path: Path) -> None:
    context = fake_context(tmp_path / "checkpoints", settings=HttpSettings(model_dir=tmp_path))
    with serving(StartupState(state=context)) as url:
        assert tokenizer_folder(url, model_name="local/fake", key="") == str(tmp_path)
        assert context.registry.sessions() == []  # the session has ended
        assert tokenizer_folder(url, model_name="local/other", key="") is None


def test_a_folder_that_is_not_here_is_not_returned(tmp_path: Path) -> None:
    settings = HttpSettings(model_dir=tmp_path / "of a container")
    context = fake_context(tmp_path / "checkpoints", settings=settings)
    with serving(StartupState(state=context)) as url:
        assert tokenizer_folder(url, model_name="local/fake", key="") is None
    assert tokenizer_folder("http://other-machine:8000", model_name="local/fake", key="") is None
