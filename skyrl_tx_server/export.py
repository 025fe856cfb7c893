"""Export checkpoints to PEFT and Hugging Face format, and import PEFT adapters.

    python -m skyrl_tx_server.export adapter checkpoint=tinker://... output=DIR
    python -m skyrl_tx_server.export merge checkpoint=tinker://... base_model=DIR output=DIR
    python -m skyrl_tx_server.export import adapter=DIR base_model=DIR checkpoint=tinker://RUN/weights/NAME

The commands do not need a running server, and can be used while a server runs. `adapter --help` lists all
options of the command `adapter`.
"""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import chz
import numpy as np
from safetensors import SafetensorError

from skyrl_tx_server.config.command_line import HELP, help_text, help_words, parse, print_help
from skyrl_tx_server.config.engine_options import model_alias
from skyrl_tx_server.errors import ConfigError, NotFoundError, ServerError, UserError
from skyrl_tx_server.files.base_model import fingerprint, open_base_model
from skyrl_tx_server.files.checkpoint_record import CheckpointInfo, CheckpointKind, parse_path
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.files.disk import check_room
from skyrl_tx_server.files.merge import merged_bytes, write_merged
from skyrl_tx_server.files.model_source import HUB_NAMES, converted_directory, is_gguf
from skyrl_tx_server.files.peft_files import (
    adapter_tensors,
    deltas,
    initial_optimizer_state,
    read_adapter,
    write_adapter,
)
from skyrl_tx_server.model.config_json import extend_context


@chz.chz
class AdapterOptions:
    """Write the adapter of a checkpoint in PEFT format."""

    checkpoint: str = chz.field(doc="tinker:// path of a checkpoint")
    output: str = chz.field(doc="Output directory; it must be empty or not exist")
    checkpoints_dir: str = chz.field(default="./checkpoints", doc="The server's checkpoints_dir")
    dtype: Literal["float32", "bfloat16", "float16"] = chz.field(
        default="float32", doc="Data type of all tensors"
    )
    base_model_name: str | None = chz.field(
        default=None,
        doc="Hugging Face name or path of the base model, for adapter_config.json; default: the name of the "
        "model on the server that saved the checkpoint (for local/smollm2-135m, its Hugging Face name)",
    )


@chz.chz
class MergeOptions:
    """Write a full Hugging Face model: the base model with a checkpoint's adapter merged into its weights."""

    checkpoint: str = chz.field(doc="tinker:// path of a checkpoint")
    base_model: str = chz.field(
        doc="Directory or GGUF file of the base model that the checkpoint was trained on, or smollm2-135m"
    )
    output: str = chz.field(doc="Output directory; it must be empty or not exist")
    checkpoints_dir: str = chz.field(default="./checkpoints", doc="The server's checkpoints_dir")
    dtype: Literal["float32", "bfloat16", "float16"] | None = chz.field(
        default=None, doc="Data type of the weights; default: as in the base model, bfloat16 for FP8 weights"
    )
    max_context_length: int | None = chz.field(
        default=None,
        doc="If the server ran with yarn=true: its max_context_length. config.json then gets the same YaRN "
        "scaling; default: the scaling of the base model",
    )


@chz.chz
class ImportOptions:
    """Create a training or sampler checkpoint from a PEFT adapter."""

    adapter: str = chz.field(doc="Directory with adapter_config.json and adapter_model.safetensors")
    base_model: str = chz.field(
        doc="Directory or GGUF file of the base model that the server runs, or smollm2-135m"
    )
    checkpoint: str = chz.field(
        doc="tinker://RUN/weights/NAME, or tinker://RUN/sampler_weights/NAME for a sampler checkpoint; "
        "it must not exist"
    )
    checkpoints_dir: str = chz.field(default="./checkpoints", doc="The server's checkpoints_dir")
    model_alias: str | None = chz.field(
        default=None,
        doc="The server's model_alias; default: local/<name of base_model, without .gguf>. If the server was "
        "started with a hub id, pass this id",
    )


def main(argv: Sequence[str]) -> int:
    """Run a command. Return the exit status: 0, or 2 after printing an error in one line to stderr."""
    command = argv[0] if argv else "--help"
    if command in HELP:
        print_help(str(__doc__).strip())
        return 0
    try:
        if command not in _COMMANDS:
            raise ConfigError(f"unknown command {command!r}; use one of {', '.join(_COMMANDS)}")
        options, run = _COMMANDS[command]
        if (words := help_words(argv[1:])) is not None:
            usage = f"python -m skyrl_tx_server.export {command} key=value ..."
            print_help(help_text(options, usage, words))
        else:
            print(run(parse(argv[1:], options)))
        return 0
    except ServerError as error:
        print(f"export: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"export: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


def export_adapter(options: AdapterOptions) -> str:
    """Run `adapter`. Return a line that says what was written. Raise ServerError or OSError."""
    info, arrays = _read(options.checkpoints_dir, options.checkpoint, base_hash=None)
    with _new_directory(
        options.output, sum(array.nbytes for array in adapter_tensors(arrays).values())
    ) as directory:
        name = options.base_model_name or HUB_NAMES.get(info.base_model, info.base_model)
        write_adapter(directory, arrays, info.lora, name, options.dtype)
    return f"{options.checkpoint} -> {options.output} (PEFT, rank {info.lora.rank}, {options.dtype})"


def merge(options: MergeOptions) -> str:
    """Run `merge`. Return a line that says what was written. Raise ServerError or OSError."""
    base = open_base_model(_base_directory(options.base_model))
    info, arrays = _read(options.checkpoints_dir, options.checkpoint, base_hash=fingerprint(base.directory))
    with _new_directory(options.output, merged_bytes(base)) as directory:
        write_merged(base, deltas(arrays, info.lora), directory, options.dtype)
        if options.max_context_length is not None:
            extend_context(directory, options.max_context_length)
    return f"{options.base_model} + {options.checkpoint} -> {options.output}"


def import_adapter(options: ImportOptions) -> str:
    """Run `import`. Return a line that says what was written. Raise ServerError or OSError."""
    _, kind, _ = parse_path(options.checkpoint)
    if kind is CheckpointKind.EXTERNAL:
        raise UserError(
            f"checkpoint={options.checkpoint}: external_weights are for download only; use "
            "tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME"
        )
    base = open_base_model(_base_directory(options.base_model))
    lora, arrays = read_adapter(Path(options.adapter).expanduser(), base)
    alias = model_alias(options.base_model, options.model_alias)
    store = CheckpointStore(Path(options.checkpoints_dir).expanduser(), alias, fingerprint(base.directory))
    optimizer = initial_optimizer_state(arrays) if kind is CheckpointKind.TRAINING else {}
    user_metadata = {"imported_from": Path(options.adapter).name}
    store.write(options.checkpoint, arrays | optimizer, lora=lora, step=0, user_metadata=user_metadata)
    return (
        f"{options.adapter} -> {options.checkpoint} "
        f"(base model {alias}, rank {lora.rank}, alpha {lora.alpha:g})"
    )


def _base_directory(base_model: str) -> Path:
    return converted_directory(base_model) if is_gguf(base_model) else Path(base_model).expanduser()


_COMMANDS: dict[str, tuple[type, Callable[..., str]]] = {
    "adapter": (AdapterOptions, export_adapter),
    "merge": (MergeOptions, merge),
    "import": (ImportOptions, import_adapter),
}


def _read(
    checkpoints_dir: str, path: str, *, base_hash: str | None
) -> tuple[CheckpointInfo, dict[str, np.ndarray]]:
    """Return the record and the arrays of the checkpoint `path`, whatever the name of its base model. Raise
    UserError if `base_hash` is given and differs from the fingerprint of the base weights in the record."""
    root = Path(checkpoints_dir).expanduser()
    try:
        info = CheckpointStore(root, "").info(path)
    except NotFoundError as error:
        raise NotFoundError(
            f"{error} in checkpoints_dir={checkpoints_dir}; pass the server's checkpoints_dir "
            "(a quick start of run_skyrl_tx.sh uses <run directory>.server/checkpoints)"
        ) from None
    return CheckpointStore(root, info.base_model, base_hash).read(path)


@contextmanager
def _new_directory(output: str, num_bytes: int) -> Generator[Path]:
    """Yield a temporary directory and rename it to `output` at the end, so that `output` is complete or
    unchanged. If a file cannot be written, raise the OSError if it has a file name, otherwise ServerError."""
    target = Path(output).expanduser().resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"output={output}: exists and is not an empty directory; choose another")
    target.parent.mkdir(parents=True, exist_ok=True)
    check_room(target.parent, num_bytes)
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        yield temporary
        # safetensors creates files with mode 0600. Give each file the read and write permissions of the
        # directory, which are those that the umask allows.
        mode = temporary.stat().st_mode & 0o666
        for file in temporary.iterdir():
            file.chmod(mode)
        os.replace(temporary, target)
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise  # `main` prints the name of the file
        reason = error.strerror if isinstance(error, OSError) else error
        raise ServerError(
            f"output={output}: cannot be written: {reason}; use a directory on a disk with enough free space"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
