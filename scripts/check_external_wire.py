"""Check that vLLM and SGLang can parse the request bodies that this server sends to an external sampler, and
that vLLM can load an adapter that this server has exported. No GPU is needed.

    .venv/bin/python -m scripts.check_external_wire write DIR
    VLLM_PYTHON scripts/check_external_wire.py read DIR WHEELS

The exit status of `read` is 1 if a parser refuses a body, if vLLM ignores a field, or if vLLM reads a value
that differs from the value in the body or in the adapter. The check does not report fields that SGLang
ignores. VLLM_PYTHON is a Python with torch, safetensors and the packages that vllm imports. WHEELS is a
directory with the unpacked wheels of vllm and sglang; their kernels are not needed.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

SEED = 2**63 - 1


def write(directory: Path) -> int:
    """Write the bodies of a minimal and a complete request for each kind of server, and an exported random
    adapter."""
    import numpy as np

    from skyrl_tx_server.engine.operations import LoraSpec, SamplingSettings
    from skyrl_tx_server.external.wire import DIALECTS, SamplingRequest
    from skyrl_tx_server.files.peft_files import write_adapter

    minimal = SamplingRequest(
        prompt=[1, 2, 3], num_samples=2, max_tokens=5, stop_tokens=(), settings=SamplingSettings()
    )
    settings = SamplingSettings(temperature=0.7, top_k=40, top_p=0.9, seed=SEED, stop_strings=("ab",))
    complete = SamplingRequest(
        prompt=[1, 2, 3], num_samples=2, max_tokens=5, stop_tokens=(3, 7), settings=settings
    )
    bodies = {
        kind: [dialect.request(request, "name", "name")[1] for request in (minimal, complete)]
        for kind, dialect in DIALECTS.items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "bodies.json").write_text(json.dumps(bodies))
    random, arrays = np.random.default_rng(0), {}
    for module in ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "lm_head"):
        for side, shape in (("A", (4, 16)), ("B", (24, 4))):
            arrays[f"base_model.model.{module}.lora_{side}.weight"] = random.normal(size=shape).astype(
                np.float32
            )
    write_adapter(directory / "adapter", arrays, LoraSpec(rank=4), "local/tiny", "float32")
    return 0


def read(directory: Path, wheels: Path) -> int:
    bodies = json.loads((directory / "bodies.json").read_text())
    errors = [
        *_vllm_requests(bodies["vllm"], wheels),
        *_vllm_adapter(directory / "adapter"),
        *_sglang(bodies["sglang"], wheels),
    ]
    print("\n".join(errors) or "vLLM reads the intended values, and SGLang accepts the bodies")
    return 1 if errors else 0


def _vllm_requests(bodies: list[dict[str, Any]], wheels: Path) -> list[str]:
    """Parse the bodies with vLLM, and return the errors. `to_sampling_params` gets defaults as vLLM would
    read them from the model's generation_config.json. It is an error if a default replaces a value of a
    body."""
    sys.path.insert(0, str(wheels))
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest  # pyright: ignore[reportMissingImports]

    errors = []
    for body in bodies:
        request = CompletionRequest(**body)
        settings = request.to_sampling_params(
            body["max_tokens"], {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}
        )
        if request.model_extra:
            errors.append(f"vLLM ignores the unknown fields {sorted(request.model_extra)}")
        names = (
            "temperature",
            "top_p",
            "top_k",
            "repetition_penalty",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "seed",
            "n",
            "logprobs",
        )
        errors += [
            f"vLLM reads {name}={getattr(settings, name)}, not {body[name]}"
            for name in names
            if getattr(settings, name) != body[name]
        ]
    return errors


def _vllm_adapter(directory: Path) -> list[str]:
    import torch  # pyright: ignore[reportMissingImports]
    from safetensors.torch import load_file
    from vllm.lora.lora_model import LoRAModel  # pyright: ignore[reportMissingImports]
    from vllm.lora.peft_helper import PEFTHelper  # pyright: ignore[reportMissingImports]

    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # pinning needs a GPU
    helper = PEFTHelper.from_local_dir(str(directory), None)
    modules = {"q_proj", "down_proj", "lm_head"}
    loaded = LoRAModel.from_local_checkpoint(
        str(directory), modules, helper, lora_model_id=1, device="cpu", dtype=torch.float32
    ).loras
    tensors = load_file(directory / "adapter_model.safetensors")
    errors = [] if 2 * len(loaded) == len(tensors) else [f"vLLM loaded {sorted(loaded)} of {sorted(tensors)}"]
    for name, module in loaded.items():
        a, b = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
        if not torch.allclose(module.scaling * module.lora_b @ module.lora_a, 32 / 4 * b @ a):
            errors.append(f"vLLM's product of the LoRA factors of {name} differs from the exported one")
    return errors


def _sglang(bodies: list[dict[str, Any]], wheels: Path) -> list[str]:
    # An empty package replaces the real one, whose __init__ imports all modules of sglang.
    package = types.ModuleType("sglang")
    package.__path__ = [str(wheels / "sglang")]
    sys.modules["sglang"] = package
    from sglang.api.v1.api_types import GenerateRequest, JsonContractError  # pyright: ignore[reportMissingImports]

    errors = []
    for body in bodies:
        try:
            GenerateRequest.from_json_value(body)
        except JsonContractError as error:
            errors.append(f"SGLang refuses the body: {error}")
    return errors


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", directory]:
            sys.exit(write(Path(directory)))
        case ["read", directory, wheels]:
            sys.exit(read(Path(directory), Path(wheels)))
        case _:
            sys.exit(__doc__)
