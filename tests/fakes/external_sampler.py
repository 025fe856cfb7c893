"""A fake vLLM or SGLang server with a Qwen3 in numpy. It has only the routes that skyrl_tx_server calls.

The server reads the base weights from Hugging Face files and the adapters from PEFT directories.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from tokenizers import Tokenizer

from tests.fakes.server import LoopbackServer

Weights = dict[str, np.ndarray]


class NumpyQwen3:
    """A Qwen3 in float64 that shares no code with the server."""

    def __init__(self, model_dir: Path) -> None:
        self.config = json.loads((model_dir / "config.json").read_text())
        self.base = {
            name: array.astype(np.float64)
            for path in model_dir.glob("*.safetensors")
            for name, array in load_file(path).items()
        }
        self.base.setdefault("lm_head.weight", self.base["model.embed_tokens.weight"])

    def with_adapter(self, directory: Path) -> Weights:
        """Return the base weights with alpha / r * B @ A added to each module of a PEFT directory."""
        config = json.loads((directory / "adapter_config.json").read_text())
        tensors = load_file(directory / "adapter_model.safetensors")
        weights = dict(self.base)
        for name in tensors:
            if name.endswith(".lora_A.weight"):
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                product = tensors[name.replace("lora_A", "lora_B")].astype(np.float64) @ tensors[name]
                weights[f"{module}.weight"] = (
                    weights[f"{module}.weight"] + config["lora_alpha"] / config["r"] * product
                )
        return weights

    def logprobs(self, weights: Weights, tokens: list[int]) -> np.ndarray:
        """Return the logprobs [T, V] of the next token at each position."""
        config, width = self.config, self.config["head_dim"]
        hidden = weights["model.embed_tokens.weight"][tokens]
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        angles = np.outer(np.arange(len(tokens)), theta ** (-np.arange(0, width, 2) / width))
        cos, sin = np.cos(np.hstack([angles, angles]))[:, None], np.sin(np.hstack([angles, angles]))[:, None]

        def norm(x: np.ndarray, name: str) -> np.ndarray:
            return (
                x
                / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
                * weights[f"{name}.weight"]
            )

        def rotate(x: np.ndarray) -> np.ndarray:
            left, right = np.split(x, 2, axis=-1)
            return x * cos + np.concatenate([-right, left], -1) * sin

        for layer in (f"model.layers.{index}" for index in range(config["num_hidden_layers"])):
            x = norm(hidden, f"{layer}.input_layernorm")
            q, k, v = (
                (x @ weights[f"{layer}.self_attn.{name}_proj.weight"].T).reshape(len(tokens), -1, width)
                for name in ("q", "k", "v")
            )
            q, k = rotate(norm(q, f"{layer}.self_attn.q_norm")), rotate(norm(k, f"{layer}.self_attn.k_norm"))
            k, v = (np.repeat(heads, q.shape[1] // heads.shape[1], axis=1) for heads in (k, v))
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(width)
            scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
            attended = np.einsum("hqk,khd->qhd", np.exp(_log_softmax(scores)), v).reshape(len(tokens), -1)
            hidden = hidden + attended @ weights[f"{layer}.self_attn.o_proj.weight"].T
            x = norm(hidden, f"{layer}.post_attention_layernorm")
            gate = x @ weights[f"{layer}.mlp.gate_proj.weight"].T
            hidden = (
                hidden
                + (gate / (1 + np.exp(-gate)) * (x @ weights[f"{layer}.mlp.up_proj.weight"].T))
                @ weights[f"{layer}.mlp.down_proj.weight"].T
            )
        return _log_softmax(norm(hidden, "model.norm") @ weights["lm_head.weight"].T)


@dataclass(kw_only=True)
class Completion:
    """One sampled completion."""

    tokens: list[int]
    logprobs: list[float]  # one per token
    finish: str  # "stop" or "length"


class ExternalSampler:
    """Serves the sampling routes of vLLM and SGLang, and the adapter routes of `kind` (`vllm` or `sglang`).

    `received` contains the sampling parameters and the adapter name of every sampling request. Tests change
    the other public attributes.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        name: str = "local/tiny",
        kind: str = "vllm",
        max_model_len: int | None = 600,
    ) -> None:
        self.model = NumpyQwen3(model_dir)
        self.name, self.kind, self.max_model_len = name, kind, max_model_len
        self.tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self.adapters: dict[str, tuple[str, Weights]] = {}
        self.received: list[dict] = []
        # Modifies the body of each completion response.
        self.change_reply: Callable[[dict], object] = lambda answer: None
        self.leaves_adapters_out = False  # if true, all samples use the base weights
        self.loads_adapters = True  # if false, the adapter routes do not exist
        self.hold_requests = False  # if true, a request waits until its client disconnects
        self.changed = threading.Condition()
        self.aborted = 0  # number of completions whose client disconnected

    def wait_until(self, condition: Callable[[], object], timeout_s: float = 20.0) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s)

    def app(self) -> Starlette:
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/completions", self._completions, methods=["POST"]),
        ]
        routes.append(Route("/generate", self._generate, methods=["POST"]))
        if self.loads_adapters:
            prefix = "/v1" if self.kind == "vllm" else ""
            routes.append(Route(f"{prefix}/load_lora_adapter", self._load, methods=["POST"]))
            routes.append(Route(f"{prefix}/unload_lora_adapter", self._unload, methods=["POST"]))
        return Starlette(routes=routes)

    async def _models(self, request: Request) -> Response:
        cards = [
            {
                "id": self.name,
                "root": self.name,
                "parent": None,
                "max_model_len": self.max_model_len,
                "owned_by": self.kind,
            }
        ]
        cards += [
            {"id": name, "root": path, "parent": self.name, "max_model_len": None, "owned_by": self.kind}
            for name, (path, _) in self.adapters.items()
        ]
        return JSONResponse({"object": "list", "data": cards})

    async def _load(self, request: Request) -> Response:
        body = await request.json()
        name, path = body["lora_name"], body["lora_path"]
        if name in self.adapters:
            return self._refused(400, f"The lora adapter '{name}' has already been loaded.")
        try:
            loaded = path, self.model.with_adapter(Path(path))
        except OSError as error:
            return self._refused(404, f"No adapter found for {path}: {error}")
        with self.changed:
            self.adapters[name] = loaded
            self.changed.notify_all()
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        if name not in self.adapters:
            return self._refused(404, f"The lora adapter '{name}' cannot be found.")
        with self.changed:
            del self.adapters[name]
            self.changed.notify_all()
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        if body["model"] != self.name and body["model"] not in self.adapters:
            return self._refused(404, f"The model `{body['model']}` does not exist.")
        assert (
            body["ignore_eos"],
            body["return_token_ids"],
            body["logprobs"],
            body["add_special_tokens"],
        ) == (True, True, 0, False)
        completions = await self._complete_all(
            request, body, body["prompt"], body["n"], body["max_tokens"], body["seed"], adapter=body["model"]
        )
        choices = [
            {
                "index": index,
                "text": self.tokenizer.decode(completion.tokens, skip_special_tokens=False),
                "finish_reason": completion.finish,
                "stop_reason": None,
                "token_ids": completion.tokens,
                "prompt_token_ids": body["prompt"],
                "logprobs": {
                    "tokens": [f"token_id:{token}" for token in completion.tokens],
                    "token_logprobs": completion.logprobs,
                },
            }
            for index, completion in enumerate(completions)
        ]
        return self._answer(
            {"object": "text_completion", "model": body["model"], "choices": choices, "usage": {}}
        )

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        if body["lora_path"] is not None and body["lora_path"] not in self.adapters:
            return self._refused(
                400, f"The following requested LoRA adapters are not loaded: {body['lora_path']}"
            )
        settings = body["sampling_params"]
        settings = settings | ({"stop_token_ids": []} if settings["ignore_eos"] else {})
        completions = await self._complete_all(
            request,
            settings,
            body["input_ids"],
            settings["n"],
            settings["max_new_tokens"],
            None,
            adapter=body["lora_path"] or self.name,
        )
        replies = [
            {
                "text": "",
                "output_ids": completion.tokens,
                "meta_info": {
                    "prompt_tokens": len(body["input_ids"]),
                    "completion_tokens": len(completion.tokens),
                    "cached_tokens": 3,
                    "finish_reason": {"type": completion.finish},
                    "output_token_logprobs": [
                        [logprob, token, None]
                        for logprob, token in zip(completion.logprobs, completion.tokens, strict=True)
                    ],
                },
            }
            for completion in completions
        ]
        return self._answer({"replies": replies} if len(replies) > 1 else replies[0])

    async def _complete_all(
        self,
        request: Request,
        settings: dict,
        prompt: list[int],
        count: int,
        max_tokens: int,
        seed: int | None,
        *,
        adapter: str,
    ) -> list[Completion]:
        with self.changed:
            self.received.append(settings | {"adapter": adapter})
            self.changed.notify_all()
        if self.hold_requests:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            with self.changed:
                self.aborted += 1
                self.changed.notify_all()
            return []
        uses_base = adapter == self.name or self.leaves_adapters_out
        weights = self.model.base if uses_base else self.adapters[adapter][1]
        # Without a seed, the number of requests is the seed, so that results are deterministic.
        seeds = [(len(self.received) if seed is None else seed) + index for index in range(count)]
        return await asyncio.to_thread(
            lambda: [
                self._complete(weights, prompt, settings, max_tokens, sample_seed) for sample_seed in seeds
            ]
        )

    def _complete(
        self, weights: Weights, prompt: list[int], settings: dict, max_tokens: int, seed: int
    ) -> Completion:
        random, tokens, logprobs = np.random.default_rng(seed), list[int](), list[float]()
        while len(tokens) < max_tokens:
            next_logprobs = self.model.logprobs(weights, prompt + tokens)[-1]
            token = int(random.choice(len(next_logprobs), p=_filtered(next_logprobs, settings)))
            tokens.append(token)
            logprobs.append(float(next_logprobs[token]))
            text = self.tokenizer.decode(tokens, skip_special_tokens=False)
            if token in settings["stop_token_ids"] or any(stop in text for stop in settings["stop"]):
                return Completion(tokens=tokens, logprobs=logprobs, finish="stop")
        return Completion(tokens=tokens, logprobs=logprobs, finish="length")

    def _answer(self, answer: dict) -> Response:
        self.change_reply(answer)
        return JSONResponse(answer.get("replies", answer))

    def _refused(self, status: int, message: str) -> Response:
        return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)


@contextlib.contextmanager
def sampling(sampler: ExternalSampler, *, port: int = 0) -> Iterator[str]:
    """Serve the sampler on a loopback port and yield its URL. Unload all adapters at the end."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        server = LoopbackServer(sampler.app())
        with server.in_thread(listener):
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        sampler.adapters.clear()


def _filtered(logprobs: np.ndarray, settings: dict) -> np.ndarray:
    """Return the probabilities after the temperature, top-k and top-p are applied."""
    if settings["temperature"] == 0:
        return np.eye(len(logprobs))[int(np.argmax(logprobs))]
    probabilities = np.exp(_log_softmax(logprobs / settings["temperature"]))
    order = np.argsort(-probabilities)
    kept = order[: settings["top_k"] if settings["top_k"] > 0 else None]
    before = np.cumsum(probabilities[kept]) - probabilities[kept]
    kept = kept[before < settings["top_p"]]
    filtered = np.zeros_like(probabilities)
    filtered[kept] = probabilities[kept]
    return filtered / filtered.sum()


def _log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
