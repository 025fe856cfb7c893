"""Writes tokenizer.json and tokenizer_config.json from the metadata of a GGUF file, without torch.

A GGUF file contains the tokens and the merges, but only the name of the rule that splits text before merging.
This module contains these rules. They equal those of the models' Hugging Face tokenizers.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.files.gguf_file import GgufFile
from skyrl_tx_server.files.json_file import write_json

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2, _LLAMA3 = "qwen2", "llama-bpe"
_REGEXES = {_QWEN2: rf"{_WORDS}|\p{{N}}|{_REST}", _LLAMA3: rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"}
_SMOLLM, _GPT2 = "smollm", "gpt-2"
SPLITS = (_SMOLLM, _GPT2, *_REGEXES)
"""The supported values of tokenizer.ggml.pre."""


def write_tokenizer(file: GgufFile, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `directory`. A tokenizer.json in the directory of
    the GGUF file takes precedence over the tokenizer in the GGUF file.

    Raises ConfigError if the GGUF file has no valid list of tokens, or an invalid id of a special token. If
    the tokenizer in the GGUF file is used, also raises ConfigError if it is not byte-level BPE with one of
    `SPLITS`, or if its merges or token types are invalid.
    """
    tokens = _tokens(file)
    tokenizer_file = file.path.with_name("tokenizer.json")
    if tokenizer_file.is_file():
        shutil.copyfile(tokenizer_file, directory / "tokenizer.json")
    else:
        _tokenizer(file, tokens).save(str(directory / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, field in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        number = file.metadata.get(f"tokenizer.ggml.{field}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            config[f"{name}_token"] = tokens[number]
    if isinstance(template := file.metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    write_json(directory / "tokenizer_config.json", config)


def _tokenizer(file: GgufFile, tokens: list[str]) -> Tokenizer:
    model, split = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if model != "gpt2" or split not in SPLITS:
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.model {model!r} with pre {split!r} is not supported, only 'gpt2' "
            f"with {', '.join(SPLITS)}; put the model's tokenizer.json into the directory of the file"
        )
    parts = [merge.split(" ") for merge in _list(file, "merges", str)]
    if any(len(pair) != 2 for pair in parts):
        raise ConfigError(
            f"{file.path}: an entry of tokenizer.ggml.merges is not a pair of tokens separated by one space"
        )
    merges = [(left, right) for left, right in parts]
    vocabulary = {token: number for number, token in reversed(list(enumerate(tokens)))}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split == _LLAMA3))
    except Exception as error:  # the library raises Exception itself, e.g. for a merge of unknown tokens
        raise ConfigError(f"{file.path}: tokenizer.ggml.merges: {error}") from None
    if split == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split not in _REGEXES)
    if split in _REGEXES:
        splitters = [pre_tokenizers.Split(Regex(_REGEXES[split]), "isolated")]
    else:
        splitters = [pre_tokenizers.Digits(individual_digits=True)] if split == _SMOLLM else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splitters, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    types = _list(file, "token_type", int) if "tokenizer.ggml.token_type" in file.metadata else []
    add_methods = {CONTROL: tokenizer.add_special_tokens, USER_DEFINED: tokenizer.add_tokens}
    for kind, add in add_methods.items():
        added_tokens = [token for token, type_ in zip(tokens, types, strict=False) if type_ == kind]
        add([AddedToken(token, special=kind == CONTROL, normalized=False) for token in added_tokens])
    bos_id = file.metadata.get("tokenizer.ggml.bos_token_id")
    # the default is that of llama.cpp (`llama_vocab::impl::load`)
    if file.metadata.get("tokenizer.ggml.add_bos_token", split == _LLAMA3) and isinstance(bos_id, int):
        token = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, bos_id)]
        )
    return tokenizer


def _tokens(file: GgufFile) -> list[str]:
    """Return the tokens by id. Raise ConfigError if the id of a special token is not an index of this
    list."""
    tokens = _list(file, "tokens", str)
    for name, value in file.metadata.items():
        is_token = name.startswith("tokenizer.ggml.") and name.endswith("_token_id")
        if is_token and not (isinstance(value, int) and 0 <= value < len(tokens)):
            raise ConfigError(f"{file.path}: {name} is {str(value)[:80]}, but must be 0 to {len(tokens) - 1}")
    return tokens


def _list[Item](file: GgufFile, name: str, kind: type[Item]) -> list[Item]:
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise ConfigError(f"{file.path}: tokenizer.ggml.{name} is missing or has the wrong type")
    return [item for item in value if isinstance(item, kind)]
