"""Upload the dumps of a run to the storage behind an fsspec URL, such as s3://bucket/evals.

<url>/<run>/global_step_<N>/<data source>.jsonl         the trials of the evaluation after step N
<url>/<run>/global_step_<N>/aggregated_results.jsonl    the metrics of this evaluation
<url>/<run>/training_examples/step_<N>_examples.jsonl   the training examples of step N
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import fsspec
from fsspec.core import url_to_fs

from src.core.errors import ConfigError, StorageError, boundary
from src.core.process import deadline, in_thread

UPLOAD_S = 300.0  # the longest time that a step waits for an upload


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


async def upload(files: Sequence[Path], url: str) -> None:
    """Copy files into the directory `url`. Raises StorageError if that fails or takes longer than `UPLOAD_S`.

    The local files stay.
    """

    def put() -> None:
        storage, directory = url_to_fs(url)
        storage.makedirs(directory, exist_ok=True)
        for file in files:
            storage.put_file(str(file), f"{directory}/{file.name}")

    too_late = f"the upload to {url} did not finish within {UPLOAD_S:g} s"
    async with deadline(UPLOAD_S, StorageError, too_late):
        with boundary(StorageError, f"the upload to {url} failed"):
            await in_thread(put)
