"""A fake engine that samples fixed texts, and a byte tokenizer with a chat template, saved as files."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from skyrl_tx_server.engine.engine import Watcher, WithdrawnError
from skyrl_tx_server.engine.executor_protocol import EngineInfo
from skyrl_tx_server.engine.operations import (
    DEFAULT_TENANT,
    Operation,
    Sample,
    SampledSequence,
    SampleResult,
    StopReason,
)
from skyrl_tx_server.engine.stop_strings import find_stop
from tests.fakes.tiny_model import byte_tokenizer

END = 256
"""The token id of `<|im_end|>`."""

TEMPLATE = """\
{%- if tools %}<tools>{% for tool in tools %}{{ tool.function.name }};{% endfor %}</tools>{% endif %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]
{%- endfor %}
{{- "<|im_end|>" }}{% endfor %}
{%- if add_generation_prompt %}<assistant>
{%- if enable_thinking is defined and not enable_thinking %}<no>{% endif %}
{%- endif %}"""


def save_tokenizer(directory: Path) -> Path:
    """Save a tokenizer of bytes and `<|im_end|>` in the directory, and return the directory.

    The chat template renders the names of tools, and the role, content and tool calls of each message. With
    `enable_thinking=False`, it appends `<no>` to the generation prompt.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


class TextEngine:
    """Returns `texts[i % len(texts)]` as sample i of a request.

    A sample consists of the bytes of its text and the token `END`. It ends early after the token that
    completes a stop string, or after `max_tokens` tokens. Every token has the logprob -0.5.

    The engine reports samples to the watcher in blocks of `block_size` tokens. Only the result contains the
    last block. The engine waits for the event `gate` before each block except the first. `received` contains
    all requests. `withdrawn` is set when a request ends because its client no longer waits.
    """

    def __init__(self, texts: Sequence[str], *, block_size: int = 3, base_model: str = "local/fake") -> None:
        self.info = EngineInfo(base_model=base_model, max_context_length=400, max_lora_rank=8, vocab_size=260)
        self.failure: str | None = None
        self.texts = texts
        self.received: list[Sample] = []
        self.gate = threading.Event()
        self.gate.set()
        self.withdrawn = threading.Event()
        self._block_size = block_size
        self._tokenizer: Tokenizer = byte_tokenizer()

    def submit[R](
        self, op: Operation[R], watcher: Watcher | None = None, *, tenant: str = DEFAULT_TENANT
    ) -> Future[R]:
        assert isinstance(op, Sample)
        self.received.append(op)
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        threading.Thread(target=self._run, args=(op, watcher, future), daemon=True).start()
        return future

    def stats(self) -> dict[str, object]:
        return {}

    def stop(self) -> None:
        self.gate.set()

    def prompt_text(self) -> str:
        """Return the text of the last prompt."""
        ids = self.received[-1].prompt.tolist()
        return "".join("<|im_end|>" if token == END else self._tokenizer.decode([token]) for token in ids)

    def _run(self, op: Sample, watcher: Watcher | None, future: Future[SampleResult]) -> None:
        sequences = tuple(
            self._sequence(op, self.texts[index % len(self.texts)]) for index in range(op.num_samples)
        )
        longest = max(len(sequence.tokens) for sequence in sequences)
        for start in range(0, longest, self._block_size):
            if start:
                self.gate.wait()
            if watcher is not None and not watcher.is_waiting():
                self.withdrawn.set()
                future.set_exception(WithdrawnError("withdrawn"))
                return
            for index, sequence in enumerate(sequences):
                end = start + self._block_size
                if watcher is not None and end < len(sequence.tokens):
                    watcher.tokens(
                        index, sequence.tokens[start:end].tolist(), sequence.logprobs[start:end].tolist()
                    )
        future.set_result(SampleResult(sequences=sequences, prompt_logprobs=None, prompt_cache_hit_tokens=1))

    def _sequence(self, op: Sample, text: str) -> SampledSequence:
        tokens, reason = [*self._tokenizer.encode(text).ids, END], StopReason.STOP
        if op.settings.stop_strings:
            cut = find_stop(self._tokenizer, tokens, op.settings.stop_strings, new=len(tokens))
            tokens = tokens[:cut]
        if op.settings.max_tokens is not None and len(tokens) > op.settings.max_tokens:
            tokens, reason = tokens[: op.settings.max_tokens], StopReason.LENGTH
        logprobs = np.full(len(tokens), -0.5, np.float32)
        return SampledSequence(tokens=np.array(tokens, np.int32), logprobs=logprobs, stop_reason=reason)
