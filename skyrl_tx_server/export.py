"""Checkpoints out to PEFT and Hugging Face, and PEFT adapters back in.

    python -m skyrl_tx_server.export adapter checkpoint=tinker://... output=DIR python -m
skyrl_tx_server.export merge checkpoint=tinker://... base_model=DIR output=DIR python -m
skyrl_tx_server.export import adapter=DIR base_model=DIR checkpoint=tinker://NEW_RUN/weights/NAME

No server need run, and a running one is not disturbed. Further options (checkpoints_dir=, dtype=, ...):
`adapter --help` and so on.
"""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import chz
import numpy as np

from skyrl_tx_server.config.command_line import help_text, parse, print_help
from skyrl_tx_server.config.engine_options import model_alias
from skyrl_tx_server.errors import ConfigError, NotFoundError, ServerError
from skyrl_tx_server.files.base_model import fingerprint, open_base_model
from skyrl_tx_server.files.checkpoint_record import CheckpointInfo, CheckpointKind, parse_path
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.files.disk import check_room
from skyrl_tx_server.files.merge import merged_bytes, write_merged
from skyrl_tx_server.files.model_source import converted_directory, is_gguf
from skyrl_tx_server.files.peft_files import (
    adapter_tensors,
    deltas,
    optimizer_at_rest,
    read_adapter,
    write_adapter,
)


@chz.chz
class AdapterOptions:
    """Write a checkpoint's adapter in PEFT's layout."""

    checkpoint: str = chz.field(doc="tinker:// path of a training or sampler checkpoint")
    output: str = chz.field(doc="Directory to make; it must not exist or be empty")
    checkpoints_dir: str = chz.field(default="./checkpoints", doc="The server's checkpoints_dir")
    dtype: Literal["float32", "bfloat16", "float16"] = chz.field(default="float32", doc="Of every tensor")


@chz.chz
class MergeOptions:
    """Write a full Hugging Face model: the base model with a checkpoint's adapter merged into its weights."""

    checkpoint: str = chz.field(doc="tinker:// path of a training or sampler checkpoint")
    base_model: str = chz.field(
        doc="Directory or GGUF file of the base model that the checkpoint was trained on"
    )
    output: str = chz.field(doc="Directory to make; it must not exist or be empty")
    checkpoints_dir: str = chz.field(default="./checkpoints", doc="The server's checkpoints_dir")
    dtype: Literal["float32", "bfloat16", "float16"] | None = chz.field(
        default=None, doc="Of every tensor; none: as in the base model"
    )


@chz.chz
class ImportOptions:
    """Make a checkpoint from a PEFT adapter: trained on from there, or sampled from."""

    adapter: str = chz.field(doc="Directory with adapter_config.json and adapter_model.safetensors")
    base_model: str = chz.field(doc="Directory or GGUF file of the base model that the server runs")
    checkpoint: str = chz.field(
        doc="tinker://RUN/weights/NAME, or tinker://RUN/sampler_weights/NAME to sample from; it must be free"
    )
    checkpoints_dir: str = chz.field(default="./checkpoints", doc="The server's checkpoints_dir")
    model_alias: str | None = chz.field(
        default=None, doc="The server's model_alias; default: local/<directory name>, as there"
    )


def main(argv: Sequence[str]) -> int:
    """The exit status: 0, or 2 with one line on stderr."""
    verb = argv[0] if argv else "--help"
    if verb in ("--help", "-h", "help"):
        print_help(str(__doc__).strip())
        return 0
    try:
        if verb not in _VERBS:
            raise ConfigError(f"unknown command {verb!r}; one of {', '.join(_VERBS)}")
        if any(argument in ("--help", "-h", "help") for argument in argv[1:]):
            options, _ = _VERBS[verb]
            print_help(help_text(options, f"python -m skyrl_tx_server.export {verb} key=value ..."))
            return 0
        print(_run(verb, argv[1:]))
        return 0
    except ServerError as error:
        print(f"export: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"export: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


def export_adapter(options: AdapterOptions) -> str:
    info, arrays = _read(options.checkpoints_dir, options.checkpoint, base_hash=None)
    with _new_directory(
        options.output, sum(array.nbytes for array in adapter_tensors(arrays).values())
    ) as directory:
        write_adapter(directory, arrays, info.lora, info.base_model, options.dtype)
    return f"{options.checkpoint} -> {options.output} (PEFT, rank {info.lora.rank}, {options.dtype})"


def merge(options: MergeOptions) -> str:
    base = open_base_model(_base_directory(options.base_model))
    info, arrays = _read(options.checkpoints_dir, options.checkpoint, base_hash=fingerprint(base.directory))
    with _new_directory(options.output, merged_bytes(base)) as directory:
        write_merged(base, deltas(arrays, info.lora), directory, options.dtype)
    return f"{options.base_model} + {options.checkpoint} -> {options.output}"


def import_adapter(options: ImportOptions) -> str:
    _, kind, _ = parse_path(options.checkpoint)
    base = open_base_model(_base_directory(options.base_model))
    lora, arrays = read_adapter(Path(options.adapter).expanduser(), base)
    alias = model_alias(options.base_model, options.model_alias)
    store = CheckpointStore(Path(options.checkpoints_dir).expanduser(), alias, fingerprint(base.directory))
    optimizer = optimizer_at_rest(arrays) if kind is CheckpointKind.TRAINING else {}
    came_from = {"imported_from": Path(options.adapter).name}
    store.write(options.checkpoint, arrays | optimizer, lora=lora, step=0, user_metadata=came_from)
    return f"{options.adapter} -> {options.checkpoint} (base model {alias}, rank {lora.rank}, alpha {lora.alpha:g})"


def _base_directory(base_model: str) -> Path:
    return converted_directory(base_model) if is_gguf(base_model) else Path(base_model).expanduser()


_VERBS: dict[str, tuple[type, Callable[..., str]]] = {
    "adapter": (AdapterOptions, export_adapter),
    "merge": (MergeOptions, merge),
    "import": (ImportOptions, import_adapter),
}


def _run(verb: str, argv: Sequence[str]) -> str:
    options, run = _VERBS[verb]
    return run(parse(argv, options))


def _read(
    checkpoints_dir: str, path: str, *, base_hash: str | None
) -> tuple[CheckpointInfo, dict[str, np.ndarray]]:
    """A checkpoint of whatever base model, whose weights must be those of `base_hash` where that is given."""
    root = Path(checkpoints_dir).expanduser()
    try:
        info = CheckpointStore(root, "").info(path)
    except NotFoundError as error:
        where = f"checkpoints_dir={checkpoints_dir}; give the server's own, which a quick start has in RUN.server/checkpoints"
        raise NotFoundError(f"{error} in {where}") from None
    return CheckpointStore(root, info.base_model, base_hash).read(path)


@contextmanager
def _new_directory(output: str, num_bytes: int) -> Iterator[Path]:
    """Write aside, then rename: `output` is complete or absent."""
    target = Path(output).expanduser().resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"output={output}: exists and is not an empty directory; choose another")
    target.parent.mkdir(parents=True, exist_ok=True)
    check_room(target.parent, num_bytes)
    aside = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    aside.mkdir()
    try:
        yield aside
        os.replace(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
