"""A GGUF file gives the same model as the Hugging Face files from which it was written. A file that cannot
be used gives an error of one line."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from gguf import quantize
from gguf.constants import GGMLQuantizationType, GGUFValueType
from tokenizers import Tokenizer

from skyrl_tx_server.config.engine_options import model_alias
from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.files import gguf_model
from skyrl_tx_server.files.base_model import open_base_model
from skyrl_tx_server.files.gguf_config import LLAMA3_SCALING, llama3_divisors
from skyrl_tx_server.files.gguf_file import read_gguf
from skyrl_tx_server.files.gguf_model import convert_gguf
from skyrl_tx_server.files.model_source import PACKAGED, converted_directory, is_gguf
from skyrl_tx_server.http.wire.chat_format import load_tokenizer
from skyrl_tx_server.model.config_json import load_model_config
from skyrl_tx_server.model.families.table import family_of
from skyrl_tx_server.model.model_config import Llama3Scaling, YarnScaling
from skyrl_tx_server.model.weights import load_params, resolve_model
from tests.fakes.gguf_files import TOKENS, read_fixture, write_gguf
from tests.server.test_families import logits_of

FIXTURES = Path(__file__).parent.parent / "fixtures"
MODELS = ["families/llama", "families/qwen2", "families/qwen3_moe", "qwen3/tied", "qwen3/untied"]
F32, Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0
TINY = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1e4},
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the conversion write to a directory of the test, and return that directory."""
    monkeypatch.setattr(gguf_model, "CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tiny_weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (32, 32),
        "model.norm.weight": (32,),
        f"{layer}input_layernorm.weight": (32,),
        f"{layer}post_attention_layernorm.weight": (32,),
        f"{layer}self_attn.q_proj.weight": (32, 32),
        f"{layer}self_attn.k_proj.weight": (16, 32),
        f"{layer}self_attn.v_proj.weight": (16, 32),
        f"{layer}self_attn.o_proj.weight": (32, 32),
        f"{layer}mlp.gate_proj.weight": (64, 32),
        f"{layer}mlp.up_proj.weight": (64, 32),
        f"{layer}mlp.down_proj.weight": (32, 64),
    }
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_tiny_gguf(tmp_path: Path, config: Mapping[str, object] = MappingProxyType({}), **changes) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, {**TINY, **config}, tiny_weights(), **changes)
    return path


def weights_in(directory: Path) -> dict[str, np.ndarray]:
    tensors = open_base_model(directory)
    return {name: value for file in set(tensors.files.values()) for name, value in tensors.read_file(file)}


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_equals_its_hugging_face_files(tmp_path: Path, name: str) -> None:
    config, weights = read_fixture(FIXTURES / name)
    config.setdefault("rope_parameters", {"rope_theta": config.get("rope_theta")})
    config["vocab_size"] = len(weights["model.embed_tokens.weight"])
    write_gguf(tmp_path / "model.gguf", config, weights)
    directory = convert_gguf(tmp_path / "model.gguf")
    converted = weights_in(directory)
    assert converted.keys() == weights.keys()
    assert all(np.array_equal(converted[name], weights[name]) for name in weights)
    converted_config, original_config = load_model_config(directory), load_model_config(FIXTURES / name)
    for field in ("model_type", "hidden_size", "intermediate_size", "num_kv_heads", "head_dim", "rope_theta"):
        assert getattr(converted_config, field) == getattr(original_config, field), field
    assert (
        converted_config.rms_norm_eps == original_config.rms_norm_eps
        and converted_config.experts == original_config.experts
    )
    config_file = json.loads((directory / "config.json").read_text())
    assert config_file["architectures"] == [family_of(converted_config).architecture]
    assert config_file["dtype"] == str(weights["model.embed_tokens.weight"].dtype)
    expected = np.load(FIXTURES / name / "expected.npz")
    logits = logits_of(
        converted_config, load_params(directory, converted_config, "float32"), expected["tokens"]
    )
    assert np.abs(logits[:, :: int(expected["stride"])] - expected["logits"]).max() < 1e-4


@pytest.mark.parametrize("kind", [Q8_0, GGMLQuantizationType.Q4_0, GGMLQuantizationType.F16])
def test_stored_values_are_kept_exactly(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    from gguf import dequantize

    converted = weights_in(convert_gguf(write_tiny_gguf(tmp_path, kind=kind)))
    for name, value in tiny_weights().items():
        expected = value if value.ndim == 1 else dequantize(quantize(value, kind), kind)
        assert np.array_equal(converted[name].astype(np.float32), expected.reshape(value.shape)), name
    is_half = kind is GGMLQuantizationType.F16
    matrix = converted["model.layers.0.self_attn.q_proj.weight"]
    assert matrix.dtype == (np.float16 if is_half else np.float32)


def test_the_tokenizer_and_the_chat_template_come_from_the_file(tmp_path: Path) -> None:
    directory = convert_gguf(write_tiny_gguf(tmp_path))
    tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode("<|im_start|>abc ab<|im_end|>", add_special_tokens=False)
    assert [TOKENS[number] for number in ids] == ["<|im_start|>", "abc", "Ġ", "ab", "<|im_end|>"]
    assert tokenizer.eos_token_id == 2
    assert load_model_config(directory).eos_token_ids == (2,)
    messages = [{"role": "user", "content": "abc"}]
    text = tokenizer.apply_chat_template(messages, tools=None, tokenize=False, add_generation_prompt=False)
    assert text == "<|im_start|>abc<|im_end|>"


@pytest.mark.parametrize("pre_tokenizer", ["smollm", "gpt-2", "qwen2", "llama-bpe"])
def test_every_pre_tokenizer_decodes_to_the_encoded_text(tmp_path: Path, pre_tokenizer: str) -> None:
    from gguf import GGUFWriter

    alphabet = sorted(byte_alphabet())
    path = tmp_path / "tokenizer.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(alphabet)
    writer.add_token_merges(["1 2"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    from skyrl_tx_server.files.gguf_tokenizer import write_tokenizer

    write_tokenizer(read_gguf(path), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "naïve café 東京 🙂 don't\n\n\t12345 x"
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded.ids) == text
    # The other pre-tokenizers split digits.
    assert ("12" in encoded.tokens) is (pre_tokenizer in ("gpt-2", "llama-bpe"))


@pytest.mark.parametrize(
    ("pre_tokenizer", "add_bos_token", "expected"),
    [
        ("llama-bpe", None, ["<|endoftext|>", "a"]),
        ("llama-bpe", False, ["a"]),
        ("smollm", None, ["a"]),
        ("qwen2", None, ["a"]),
        ("gpt-2", None, ["a"]),
        ("gpt-2", True, ["<|endoftext|>", "a"]),
    ],
)
def test_bos_is_added_as_in_llama_cpp(
    tmp_path: Path, pre_tokenizer: str, add_bos_token: bool | None, expected: list[str]
) -> None:
    metadata: dict[str, tuple[object, GGUFValueType]] = {
        "tokenizer.ggml.bos_token_id": (0, GGUFValueType.UINT32)
    }
    if add_bos_token is not None:
        metadata["tokenizer.ggml.add_bos_token"] = (add_bos_token, GGUFValueType.BOOL)
    path = write_tiny_gguf(tmp_path, metadata=metadata, pre_tokenizer=pre_tokenizer)
    tokenizer = load_tokenizer(convert_gguf(path))
    assert [TOKENS[number] for number in tokenizer.encode("a", add_special_tokens=True)] == expected
    assert tokenizer.encode("a", add_special_tokens=False) == [TOKENS.index("a")]


def byte_alphabet() -> set[str]:
    from tokenizers import pre_tokenizers

    return {*pre_tokenizers.ByteLevel.alphabet(), "12"}


def test_llama_3_scaling_is_derived_from_rope_freqs(tmp_path: Path) -> None:
    theta = {"rope_parameters": {"rope_theta": 5e5}}
    divisors = llama3_divisors(5e5, 8, factor=32.0, **LLAMA3_SCALING).astype(np.float32)
    assert divisors[0] == 1 and divisors[-1] == 32
    path = write_tiny_gguf(tmp_path, theta, tensors={"rope_freqs.weight": divisors})
    scaling = load_model_config(convert_gguf(path)).rope_scaling
    assert isinstance(scaling, Llama3Scaling) and scaling.factor == 32.0
    path = write_tiny_gguf(tmp_path, theta, tensors={"rope_freqs.weight": np.arange(1, 5, dtype=np.float32)})
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight is not the scaling of Llama 3\.1"):
        convert_gguf(path)


def test_yarn_is_read_and_other_scalings_are_refused(tmp_path: Path) -> None:
    def write_scaled(rope_type: str) -> Path:
        metadata = {
            "llama.rope.scaling.type": (rope_type, GGUFValueType.STRING),
            "llama.rope.scaling.factor": (4.0, GGUFValueType.FLOAT32),
            "llama.rope.scaling.original_context_length": (16, GGUFValueType.UINT32),
        }
        return write_tiny_gguf(tmp_path, metadata=metadata)

    scaling = load_model_config(convert_gguf(write_scaled("yarn"))).rope_scaling
    assert isinstance(scaling, YarnScaling) and scaling.factor == 4.0
    with pytest.raises(ConfigError, match=r"rope\.scaling\.type 'linear' is not supported"):
        convert_gguf(write_scaled("linear"))


def test_a_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _cache: Path) -> None:
    path = write_tiny_gguf(tmp_path)
    (_cache / "tiny-0.incomplete").mkdir(parents=True)
    directory = convert_gguf(path)
    monkeypatch.setattr(gguf_model, "_write_weights", None)  # a conversion would raise
    assert convert_gguf(path) == directory == resolve_model(str(path))
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(TypeError):
        convert_gguf(path)
    assert [entry.suffix for entry in _cache.iterdir() if entry.name.endswith("incomplete")] == [
        ".incomplete"
    ]


def test_each_file_has_its_own_lock_and_temporary_directory(tmp_path: Path, _cache: Path) -> None:
    path = write_tiny_gguf(tmp_path)
    path = path.rename(path.with_name("tiny-0.5b.gguf"))
    other_temporary = _cache / "tiny-0.incomplete"
    other_temporary.mkdir(parents=True)
    directory = convert_gguf(path)
    assert {entry.name for entry in _cache.iterdir()} == {
        directory.name,
        f"{directory.name}.lock",
        other_temporary.name,
    }


def test_the_alias_of_a_file_is_its_name() -> None:
    assert model_alias("models/tiny.Q8_0.gguf", None) == "local/tiny.Q8_0"
    assert model_alias("smollm2-135m", None) == "local/smollm2-135m"
    assert is_gguf("models/tiny.Q8_0.gguf") and is_gguf("smollm2-135m") and not is_gguf("Qwen/Qwen3-4B")


def damaged(path: Path) -> dict[str, bytes]:
    """Return damaged contents of a file. Each key is a part of the error message for its content."""
    valid = path.read_bytes()
    metadata = 4 + 4 + 8 + 8  # magic, version, counts
    string = struct.pack("<Q", 3) + b"abc"
    huge_array = struct.pack("<II", GGUFValueType.ARRAY, GGUFValueType.UINT8) + struct.pack("<Q", 2**60)
    return {
        "does not begin with GGUF": b"GGML" + valid[4:],
        "ends within the 1152921504606846976 metadata fields": valid[:16] + struct.pack("<Q", 2**60),
        "ends within the table of 1152921504606846976 tensors": (
            valid[:8] + struct.pack("<QQ", 2**60, 0) + bytes(64)
        ),
        "ends within the metadata field 'abc': 1152921504606846976 bytes": (
            valid[:8] + struct.pack("<QQ", 0, 1) + string + huge_array
        ),
        "has the unknown value type 77": valid[:8]
        + struct.pack("<QQ", 0, 1)
        + string
        + struct.pack("<II", 77, 0),
        "it is truncated: tensor": valid[:-100],
        "it ends within": valid[: metadata + 40],
        "cannot mmap an empty file": b"",
    }


@pytest.mark.parametrize("number", range(8))
def test_a_damaged_file_gives_one_line_and_allocates_nothing(
    tmp_path: Path, number: int, _cache: Path
) -> None:
    path = write_tiny_gguf(tmp_path)
    message, content = list(damaged(path).items())[number]
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(ConfigError) as error:
        convert_gguf(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert message in str(error.value) and "\n" not in str(error.value) and str(path) in str(error.value)
    assert peak < 1 << 20
    assert not _cache.exists()


def test_unknown_architectures_and_tensor_types_are_refused(tmp_path: Path, _cache: Path) -> None:
    path = write_tiny_gguf(tmp_path)
    valid = path.read_bytes()
    path.write_bytes(valid.replace(b"llama", b"mamba"))
    with pytest.raises(ConfigError, match=r"general.architecture is 'mamba'; supported are llama, qwen2"):
        convert_gguf(path)
    entry = valid.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
    path.write_bytes(valid[:entry] + struct.pack("<I", 99) + valid[entry + 4 :])
    with pytest.raises(ConfigError, match=r"tensor token_embd.weight has the unknown type 99"):
        convert_gguf(path)
    path.write_bytes(valid[:entry] + struct.pack("<I", GGMLQuantizationType.I32) + valid[entry + 4 :])
    with pytest.raises(ConfigError, match=r"token_embd.weight has type I32, which cannot be dequantised"):
        convert_gguf(path)
    assert not _cache.exists()


def test_the_error_of_a_valid_file_advises_no_new_download(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path)
    valid = path.read_bytes()
    entry = valid.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
    nested = struct.pack("<QIIQ", 0, GGUFValueType.ARRAY, GGUFValueType.ARRAY, 1)
    for content, message in (
        (
            valid[:4] + struct.pack("<I", 9) + valid[8:],
            "its GGUF version is 9, supported are 2 and 3; convert it to version 3",
        ),
        (
            valid[:8] + struct.pack("<QQ", 0, 1) + nested,
            "the metadata field '' is an array of arrays, which is not supported",
        ),
        (
            valid[:entry] + struct.pack("<I", 99) + valid[entry + 4 :],
            "tensor token_embd.weight has the unknown type 99; convert the file to BF16 or Q8_0",
        ),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError) as error:
            read_gguf(path)
        assert str(error.value) == f"{path}: {message}"


def test_a_file_with_a_tensor_of_200_gb_is_refused(tmp_path: Path, _cache: Path) -> None:
    path = tmp_path / "large.gguf"
    write_gguf(path, TINY, tiny_weights())
    entry = (data := path.read_bytes()).index(b"token_embd.weight") + len("token_embd.weight") + 4
    oversized = data[:entry] + struct.pack("<QQ", 32, 200 * 2**30 // 128) + data[entry + 16 :]
    path.write_bytes(oversized)
    with pytest.raises(ConfigError, match=r"it is truncated: tensor token_embd.weight ends at byte 2147"):
        convert_gguf(path)
    with path.open("r+b") as stream:  # a sparse file of the declared size
        stream.truncate(len(oversized) + 200 * 2**30)
    with pytest.raises(ConfigError, match=r"tokens|GiB free; free some space there"):
        convert_gguf(path)
    assert not list(_cache.glob("large*[0-9a-f]")) and not list(_cache.glob("*.incomplete"))


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ({"intermediate_size": 96}, {}, "ffn_gate.weight has shape"),
        ({}, {"tensors": {"blk.0.attn_q.bias": np.ones(32)}}, "blk.0.attn_q.bias is not a tensor of llama"),
        (
            {},
            {"metadata": {"llama.attention.sliding_window": (4, GGUFValueType.UINT32)}},
            "llama.attention.sliding_window is not supported",
        ),
        ({}, {"metadata": {"llama.expert_count": (4, GGUFValueType.UINT32)}}, "with experts are not"),
        ({}, {"metadata": {"split.count": (3, GGUFValueType.UINT16)}}, "the file is one part of several"),
        ({}, {"metadata": {"tokenizer.ggml.pre": ("new", GGUFValueType.STRING)}}, "with pre 'new' is not"),
        ({"rms_norm_eps": float("nan")}, {}, "must be a positive number, not nan"),
    ],
)
def test_unsupported_models_are_refused(tmp_path: Path, config, changes, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        convert_gguf(write_tiny_gguf(tmp_path, config, **changes))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_missing_file_or_package_gives_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"absent\.gguf: no such file"):
        converted_directory(str(tmp_path / "absent.gguf"))
    monkeypatch.setitem(PACKAGED, "packaged", ("no_such_package", "a.gguf", "scripts/setup.sh packaged"))
    with pytest.raises(ConfigError, match=r"is not installed; run scripts/setup\.sh packaged"):
        converted_directory("packaged")


def test_smollm2_equals_transformers() -> None:
    """scripts/make_gguf_fixture.py writes tests/fixtures/gguf/smollm2.json with torch."""
    try:
        directory = converted_directory("smollm2-135m")
    except ConfigError as error:
        pytest.skip(str(error))
    expected = json.loads((FIXTURES / "gguf" / "smollm2.json").read_text())
    tokenizer = load_tokenizer(directory)
    for text, ids in expected["tokens"].items():
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
    assert tokenizer.chat_template == expected["chat_template"]
    converted = weights_in(directory)
    assert converted.keys() == expected["weights"].keys()
    for name, (total, largest) in expected["weights"].items():
        value = converted[name].astype(np.float64)
        assert [value.sum(), np.abs(value).max()] == pytest.approx([total, largest], rel=1e-9, abs=1e-9), name
    config = load_model_config(directory)
    tokens = np.array([expected["prompt"]])
    logits = logits_of(config, load_params(directory, config, "float32"), tokens)[0]
    logprobs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    logprobs -= logits.max(-1, keepdims=True)
    prompt_logprobs = logprobs[np.arange(len(expected["prompt"]) - 1), expected["prompt"][1:]]
    assert np.abs(prompt_logprobs - expected["logprobs"]).max() < 1e-4
