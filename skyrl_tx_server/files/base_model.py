"""Reads the tensors of a base model as numpy arrays, and computes the fingerprint that checkpoints store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orjson
from safetensors import SafetensorError, safe_open

from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.files.fp8 import FP8, SCALE_SUFFIX, Fp8File, block_size, dequantize
from skyrl_tx_server.files.json_file import read_json_object

SAMPLES, SAMPLE_BYTES = 64, 4096  # number and size of the parts of a file that `fingerprint` reads


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseTensors:
    """The tensors of a base model, which are read on request."""

    directory: Path
    files: dict[str, Path]  # name of a tensor -> its file
    block: tuple[int, int] | None  # rows and columns of a block of FP8 weights (see `fp8`); None: not FP8

    def shape(self, name: str) -> tuple[int, ...]:
        with safe_open(self.files[name], framework="np") as opened:
            return tuple(opened.get_slice(name).get_shape())

    def read_file(self, file: Path) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the name and the value of each tensor of a file. FP8 weights are multiplied by their scales
        and yielded as bfloat16. The scales are not yielded."""
        fp8_file = Fp8File(file)
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118  not a dict
                if self.block is None:
                    yield name, opened.get_tensor(name)
                elif opened.get_slice(name).get_dtype() == FP8:
                    values = dequantize(fp8_file.read(name), self._scales(name), self.block)
                    yield name, values.astype(ml_dtypes.bfloat16)
                elif not self.is_scale(name):
                    yield name, opened.get_tensor(name)

    def is_scale(self, name: str) -> bool:
        return name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in self.files

    def _scales(self, name: str) -> np.ndarray:
        with safe_open(self.files[name + SCALE_SUFFIX], framework="np") as opened:
            return opened.get_tensor(name + SCALE_SUFFIX).astype(np.float32)


def open_base_model(directory: Path) -> BaseTensors:
    """Open the model in `directory`. Raise ConfigError if it is not a readable safetensors model."""
    with _config_errors(directory):
        files = {}
        for file in _weight_files(directory):
            with safe_open(file, framework="np") as opened:
                files |= dict.fromkeys(opened.keys(), file)
        config_file = directory / "config.json"
        block = block_size(read_json_object(config_file), config_file)
        return BaseTensors(directory=directory, files=files, block=block)


def fingerprint(directory: Path) -> str:
    """Return one SHA-256 over config.json and over a selection of the bytes of each weight file: the
    safetensors header and 64 evenly spaced parts of 4096 bytes. This takes seconds for any model. Raise
    ConfigError if a file cannot be read."""
    digest = hashlib.sha256()
    with _config_errors(directory):
        config = read_json_object(directory / "config.json")
        digest.update(json.dumps(config, sort_keys=True).encode())
        for file in _weight_files(directory):
            with file.open("rb") as stream:
                table = stream.read(8)
                digest.update(table + stream.read(int.from_bytes(table, "little")))
                size = file.stat().st_size
                for sample in range(SAMPLES):
                    stream.seek(max(0, (size - SAMPLE_BYTES) * sample // (SAMPLES - 1)))
                    digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def check_tokenizer(model_dir: Path, vocab_size: int) -> None:
    """Raise ConfigError if the tokenizer.json of the directory is not valid or has more tokens than the
    model. The padding token does not count, because prompts do not contain it. Accept a directory without
    tokenizer.json: its model can be trained and sampled with token ids, but not with text."""
    path, settings = model_dir / "tokenizer.json", model_dir / "tokenizer_config.json"
    if not path.is_file():
        return
    try:
        ids = _token_ids(path)
        config: dict[str, Any] = read_json_object(settings) if settings.is_file() else {}
        # transformers adds these tokens if tokenizer.json does not have them
        ids |= {
            entry["content"]: int(index) for index, entry in config.get("added_tokens_decoder", {}).items()
        }
        padding = config.get("pad_token")
    except Exception as error:  # the JSON values may have any structure
        reason = f"no field {error}" if isinstance(error, KeyError) else error
        raise ConfigError(f"{model_dir}: the tokenizer is not valid: {reason}; download it again") from None
    ids.pop(str(padding.get("content") if isinstance(padding, dict) else padding), None)
    token = max(ids, key=ids.__getitem__, default="")
    if ids and ids[token] >= vocab_size:
        raise ConfigError(
            f"{path}: token {token[:80]!r} has id {ids[token]}, but the model has only {vocab_size} tokens; "
            f"use the tokenizer of this model, or resize the embeddings to {ids[token] + 1} tokens"
        )


def _token_ids(path: Path) -> dict[str, int]:
    """Return the ids of all tokens in a tokenizer.json. To build the tokenizer takes four times as long."""
    tokenizer: Any = orjson.loads(path.read_bytes())
    vocabulary, added = tokenizer["model"]["vocab"], tokenizer.get("added_tokens") or []
    if isinstance(vocabulary, list):  # a Unigram model: pairs of a token and its score
        vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
    ids = vocabulary | {token["content"]: token["id"] for token in added}
    return {token: int(index) for token, index in ids.items()}


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return [directory / "model.safetensors"]
    weight_map: Any = read_json_object(index)["weight_map"]
    return [directory / name for name in sorted(set(weight_map.values()))]


@contextmanager
def _config_errors(directory: Path) -> Generator[None]:
    """Raise ConfigError in place of an error that occurs while the model is read."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ConfigError(f"{directory}: not a readable safetensors model: {error}") from None
