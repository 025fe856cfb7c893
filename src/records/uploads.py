"""Upload the dumps of a run to the storage behind an fsspec URL, such as s3://bucket/evals.

    <url>/<run>/global_step_<N>/<data source>.jsonl         the trials of the evaluation after step N
    <url>/<run>/global_step_<N>/aggregated_results.jsonl    the metrics of this evaluation
    <url>/<run>/training_examples/step_<N>_examples.jsonl   the training examples of step N

A failed upload logs a warning. The local files stay.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import fsspec
from fsspec.core import url_to_fs

from src.core.errors import ConfigError

logger = logging.getLogger(__name__)

UPLOAD_S = 300.0  # the longest time that a step waits for an upload


class Upload(Protocol):
    """Uploads one kind of dump of a step."""

    def __call__(self, dump_directory: Path, step: int, *, url: str, run: str) -> None: ...


def check_upload_url(url: str) -> None:
    """Raise ConfigError if the protocol of `url` is unknown or its package is missing. Nothing is sent."""
    protocol = url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise ConfigError(
            f"upload_url={url}: {error}; install it with scripts/setup.sh PACKAGE, e.g. s3fs for s3://"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"upload_url={url}: fsspec does not know the protocol {protocol}; use another URL, e.g. "
            "s3://bucket/directory"
        ) from error


def upload_evaluation(dump_directory: Path, step: int, *, url: str, run: str) -> None:
    """Upload the dump of the evaluation after a step."""
    files = sorted((dump_directory / "dumped_evals" / f"global_step_{step}_evals").glob("*.jsonl"))
    upload(files, f"{url.rstrip('/')}/{run}/global_step_{step}")


def upload_examples(dump_directory: Path, step: int, *, url: str, run: str) -> None:
    """Upload the training examples of a step, if it has any."""
    files = sorted((dump_directory / "training_examples").glob(f"step_{step}_examples.jsonl"))
    upload(files, f"{url.rstrip('/')}/{run}/training_examples")


def upload(files: Sequence[Path], url: str) -> None:
    """Copy files into the directory `url`. Waits for at most `UPLOAD_S`."""
    if not files:
        return
    uploading = threading.Thread(target=_put, args=(files, url), daemon=True)
    uploading.start()
    uploading.join(UPLOAD_S)
    if uploading.is_alive():
        logger.warning("the upload to %s did not finish within %g s", url, UPLOAD_S)


def _put(files: Sequence[Path], url: str) -> None:
    try:
        storage, directory = url_to_fs(url)
        storage.makedirs(directory, exist_ok=True)
        for file in files:
            storage.put_file(str(file), f"{directory}/{file.name}")
    except Exception as error:  # the exceptions depend on the kind of storage
        logger.warning("the upload to %s failed: %s: %s", url, type(error).__name__, error)
